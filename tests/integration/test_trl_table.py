"""Every field, argument and method of TRL's trainer is in `trl_table`, and what it says of them holds.

A new one in a new TRL makes this red: look at what it does in a distributed run, then add it.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from differential_rows import ROWS
from random_configurations import COVERING, FIELDS, draw
from trl import GRPOConfig, GRPOTrainer
from trl_contract import INSTALLED, page_is_as_made_by
from trl_hooks import ELSEWHERE, HOOKS
from trl_table import DRAWN, IRRELEVANT, REFUSED, SHOWN_ARGUMENTS, SHOWN_FIELDS, SHOWN_METHODS

from async_grpo.errors import UnsupportedError
from async_grpo.settings import TrainingSettings
from async_grpo.setup.overrides import EFFECTS, HONOURED
from async_grpo.training.before_start import refuse
from kit.tiny_trainer import build_trainer

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
OF_HOOKS = {*(hook.test for hook in HOOKS.values()), *(test for _, test in ELSEWHERE.values())}
TESTS = sorted({test for _, test, _ in SHOWN_FIELDS + SHOWN_ARGUMENTS} | {*SHOWN_METHODS.values()} | OF_HOOKS)


def once_each(names: list[str], existing: set[str], what: str) -> None:
    new = sorted(existing - set(names))
    assert not new, f"{INSTALLED}: {what} {', '.join(new)} are in no table of tests/integration/trl_table.py"
    twice = sorted({name for name in names if names.count(name) > 1})
    assert not twice, f"{what} {', '.join(twice)} are there twice"
    gone = sorted(set(names) - existing)
    assert not gone, f"{INSTALLED}: {what} {', '.join(gone)} are gone"


def test_the_page_has_these_tables() -> None:
    assert page_is_as_made_by(ROOT / "scripts" / "trl_table.py"), "run: python scripts/trl_table.py --write"


def test_every_field_is_shown_refused_or_irrelevant() -> None:
    grouped = [names for _, _, names in SHOWN_FIELDS] + [names for _, names in IRRELEVANT]
    names = [name for group in grouped for name in group.split()]
    names += [*DRAWN, *(name for name, _, _ in REFUSED)]
    once_each(names, {field.name for field in dataclasses.fields(GRPOConfig)}, "fields")


def test_every_argument_is_shown() -> None:
    names = [name for _, _, group in SHOWN_ARGUMENTS for name in group.split()]
    once_each(names, set(inspect.signature(GRPOTrainer.__init__).parameters) - {"self"}, "arguments")


def test_an_override_of_each_effect_is_shown() -> None:
    """Whether the table of methods itself is complete is part of the contract (`test_trl_contract`)."""
    assert set(SHOWN_METHODS) <= set(HONOURED)
    assert {HONOURED[name] for name in SHOWN_METHODS} == set(EFFECTS) - {"is not called by training, in TRL neither"}


@cache
def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("test", TESTS)
def test_the_test_is_there(test: str) -> None:
    path, _, name = test.partition("::")
    name, _, row = name.removesuffix("]").partition("[")
    assert name in functions_of(path) and (not row or row in ROWS), f"a table names {test}, which does not exist"


def test_the_drawn_fields_are_drawn_with_each_of_their_values(model_folder: str) -> None:
    """Already in the configurations that `make test` takes."""
    values: dict[str, set[str]] = {name: {"left out"} for name in DRAWN}
    for seed in COVERING:
        for name, value in draw(seed, model_folder).items():
            values.setdefault(name, set()).add(repr(value))
    assert not [name for name in FIELDS if {*map(repr, FIELDS[name])} - values[name]]
    assert not [name for name in DRAWN if len(values[name]) < 2]


@pytest.mark.parametrize(("name", "value", "sentence"), REFUSED, ids=[name for name, _, _ in REFUSED])
def test_what_is_refused_is_refused_with_its_sentence(name: str, value: Any, sentence: str, tmp_path: Path) -> None:
    trainer: Any = build_trainer(tmp_path)
    refuse(trainer, TrainingSettings(), None)
    setattr(trainer.args, name, value)
    with pytest.raises(UnsupportedError, match=sentence):
        refuse(trainer, TrainingSettings(), None)
