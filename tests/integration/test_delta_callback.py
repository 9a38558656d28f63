"""Any trainer of transformers keeps its versions with the callback, and the chain is that of a parameter server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

from async_grpo.deltas import DeltaCallback
from async_grpo.deltas.chain import Chain
from async_grpo.deltas.tensors import as_tensors
from async_grpo.errors import DeltaChainError, UnsupportedError
from kit.tiny_trainer import build_trainer

pytestmark = pytest.mark.integration


class Noting(TrainerCallback):
    """The weights after each step."""

    def __init__(self) -> None:
        self.saved: dict[int, dict[str, torch.Tensor]] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.on_step_end(args, state, control, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.saved[state.global_step] = {name: p.detach().clone() for name, p in model.named_parameters()}


def trained(tmp_path: Path, *callbacks: Any, steps: int = 5, resume: bool = False, **options: Any) -> Noting:
    noting = Noting()
    arguments: dict[str, Any] = {"callbacks": [*callbacks, noting]}
    trainer = build_trainer(
        tmp_path, max_steps=steps, save_steps=2, save_strategy="steps", arguments=arguments, **options
    )
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2") if resume else None)
    return noting


def is_exact(chain: Chain, saved: dict[int, dict[str, torch.Tensor]]) -> bool:
    return not chain.verify().problems and all(
        torch.equal(tensor, saved[version][name])
        for version in chain.versions
        for name, tensor in as_tensors(chain.rebuild(version), chain.about.tensors).items()
    )


def test_every_version_of_a_trainer_is_kept_and_a_resumed_one_goes_on_in_its_chain(tmp_path: Path) -> None:
    folder = tmp_path / "deltas"
    first = trained(tmp_path, DeltaCallback(folder))
    chain = Chain(folder)
    assert chain.versions == [0, 1, 2, 3, 4, 5] and chain.about.run_id == "deltas"
    assert is_exact(chain, first.saved)
    assert (folder / "model" / "config.json").exists() and (folder / "model" / "tokenizer_config.json").exists()
    again = trained(tmp_path, DeltaCallback(folder), resume=True)
    chain = Chain(folder)
    assert chain.versions == [0, 1, 2, 3, 4, 5]
    assert is_exact(chain, {**first.saved, **again.saved})
    assert (folder / "superseded-1" / "000003.delta").exists()


def test_every_second_version_and_the_last_and_no_other_run_s_chain(tmp_path: Path) -> None:
    trained(tmp_path / "a", DeltaCallback(tmp_path / "deltas", every=2, run_id="a"), steps=3)
    assert Chain(tmp_path / "deltas").versions == [0, 2, 3]
    with pytest.raises(DeltaChainError, match="holds the chain of run a; this run is b"):
        trained(tmp_path / "b", DeltaCallback(tmp_path / "deltas", run_id="b"), steps=1)


def test_a_sharded_model_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.weight.ds_id = 0  # type: ignore[assignment]  # as DeepSpeed marks what ZeRO-3 shards
    state: Any = None
    with pytest.raises(UnsupportedError, match="--delta-every"):
        DeltaCallback(tmp_path).on_train_begin(None, state, None, model=model)
