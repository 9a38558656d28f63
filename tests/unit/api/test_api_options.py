"""The keywords of AsyncGRPO are the options of the command: same names, same types, same refusals."""

from __future__ import annotations

from dataclasses import fields
from datetime import date
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import pytest

from async_grpo.api.options import NOT_FROM_PYTHON, Options, as_flags
from async_grpo.cli.compute.train import build_parser
from async_grpo.errors import UsageError
from async_grpo.settings import LaunchSettings, TrainingSettings, WorkerSettings

WIDER = {"set", "keep_done", "eval_k", "run_tags", "delta_dir", "server_devices"}
WIDER |= {"master_device_id", "worker_device_ids", "accelerate_config"}  # than the fields: also lists, Paths


def test_every_option_of_the_command_is_a_keyword() -> None:
    names = {action.dest for action in build_parser()._actions} - {"help", "run_dir"} - NOT_FROM_PYTHON.keys()
    assert set(get_type_hints(Options)) == names


def test_keywords_have_the_types_of_the_settings() -> None:
    hints = get_type_hints(Options)
    for settings in (TrainingSettings, WorkerSettings, LaunchSettings):
        for name, kind in get_type_hints(settings).items():
            if name not in WIDER:
                assert hints[name] == kind, name
            elif NoneType in get_args(kind):
                assert NoneType in get_args(hints[name]), name


def parsed(**options: Any) -> Any:
    return build_parser().parse_args(["my.py", *as_flags(options)])


def test_a_default_that_is_given_changes_nothing() -> None:
    defaults = {
        field.name: field.default
        for settings in (TrainingSettings, WorkerSettings, LaunchSettings)
        for field in fields(settings)
        if field.default is not None
    }
    given, default = vars(parsed(**defaults)), vars(parsed())
    assert {**given, "given": None} == {**default, "given": None}


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("seed", 2**32 - 1, 2**32 - 1),
        ("resume", True, True),
        ("resume", False, False),
        ("steps", None, None),
        ("eval_k", [5, 1], (1, 5)),
        ("run_tags", ("a", "b c"), ("a", "b c")),
        ("worker_device_ids", [1, 2], "1,2"),
        ("delta_dir", Path("/x/y"), "/x/y"),
        ("eval_temperature", 1e-5, 1e-5),
        ("set", {"learning_rate": 1e-5, "bf16": False}, {"learning_rate": "1e-05", "bf16": "false"}),
        ("set", {"reward_weights": [1, 0.5], "beta": "0.1"}, {"reward_weights": "[1, 0.5]", "beta": "0.1"}),
        ("set", {"output_dir": Path("/a b")}, {"output_dir": "/a b"}),
    ],
)
def test_values_become_what_the_command_reads(name: str, value: object, read: object) -> None:
    assert getattr(parsed(**{name: value}), name) == read


def test_the_size_of_the_archive_is_a_number_or_a_size() -> None:
    assert str(parsed(keep_done="2GB").keep_done) == "2000000KB"
    assert parsed(keep_done=7).keep_done.amount == 7


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"max_stalness": 2}, "no option 'max_stalness'. Did you mean max_staleness?"),
        ({"steps": 0}, "steps=0 cannot be: must be a whole number of at least 1"),
        ({"correction": "tos"}, "must be one of bypass, decoupled"),
        ({"resume": "yes"}, "resume must be True or False, got 'yes'"),
        ({"set": "learning_rate=1"}, "it must be a mapping"),
        ({"set": {"chat_template_kwargs": {"at": date(2026, 1, 2)}}}, "_kwargs has a date, which JSON has not"),
        ({"dry_run": True}, "--dry-run"),
        ({"seed": -1}, "seed=-1 cannot be: must be a whole number from 0 to 2^32 - 1"),
        ({"run_group": "a\0"}, "cannot be"),
        ({"set": {"run_name": "a\0"}}, "it has a null character in it"),
        ({"delta_dir": "\ud800"}, "it is not UTF-8"),
        ({"device": 0}, "it is for one process"),
    ],
)
def test_what_the_command_refuses_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError) as error:
        as_flags(options)
    assert why in str(error.value)
