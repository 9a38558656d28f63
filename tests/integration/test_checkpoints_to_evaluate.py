"""Checkpoints that `async-grpo evaluate` cannot use, each refused with a sentence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model

from async_grpo.errors import UsageError
from async_grpo.roles.answering import load_weights, model_digest
from kit.compared_with_trl import equal_weights
from kit.tiny_trainer import build_model, build_tokenizer

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def policy() -> Any:
    return build_model(build_tokenizer())


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def garbage(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"no tensors at all")


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


@pytest.mark.parametrize("damage", [cut, garbage, without_weights, broken_config])
def test_a_checkpoint_that_cannot_be_read_is_named(damage: Callable[[Path], None], policy: Any, tmp_path: Path) -> None:
    policy.save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(UsageError, match=f"The weights of {tmp_path} cannot be read: ") as caught:
        load_weights(SimpleNamespace(model=policy), str(tmp_path))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"num_hidden_layers": 3}, "another model .*layers.2"),
        ({"num_hidden_layers": 1}, "another model .*lacks model.layers.1"),
        ({"hidden_size": 16}, "another model|cannot be read"),
        ({"vocab_size": 200}, "another model|cannot be read"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(own: dict[str, Any], words: str, policy: Any, tmp_path: Path) -> None:
    build_model(build_tokenizer(), **own).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=words):
        load_weights(SimpleNamespace(model=policy), str(tmp_path))  # type: ignore[arg-type]


def test_the_weights_of_a_checkpoint_of_the_same_model_are_taken(policy: Any, tmp_path: Path) -> None:
    other = build_model(build_tokenizer(), seed=1)
    other.save_pretrained(tmp_path)
    assert model_digest(policy) != model_digest(other)
    load_weights(SimpleNamespace(model=policy), str(tmp_path))  # type: ignore[arg-type]
    assert model_digest(policy) == model_digest(other)


def test_an_adapter_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    model = get_peft_model(build_model(build_tokenizer()), LoraConfig(r=2, target_modules="all-linear"))
    model.save_pretrained(tmp_path)
    before = copy.deepcopy(model.state_dict())
    load_weights(SimpleNamespace(model=model), str(tmp_path))  # type: ignore[arg-type]
    assert equal_weights(model, before)
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UsageError, match=f"The weights of {tmp_path} cannot be read: "):
        load_weights(SimpleNamespace(model=model), str(tmp_path))  # type: ignore[arg-type]
