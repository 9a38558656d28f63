"""Versions that a run or any trainer kept, bit for bit; and checkpoints that `evaluate` cannot use."""

from __future__ import annotations

import copy
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from async_grpo.deltas import DeltaCallback
from async_grpo.deltas.chain import Chain
from async_grpo.deltas.checkpoint import write_checkpoint
from async_grpo.deltas.recorder import DeltaRecorder
from async_grpo.deltas.tensors import as_tensors
from async_grpo.errors import DeltaChainError, UnsupportedError, UsageError
from async_grpo.roles.answering import load_weights, model_digest
from async_grpo.settings import TrainingSettings
from async_grpo_ipc import WeightExporter
from kit.compared_with_trl import equal_weights
from kit.runs import ROOT
from kit.tiny_trainer import build_model, build_tokenizer, build_trainer

EXAMPLE = ROOT / "examples" / "read_deltas.py"
rebuild = runpy.run_path(str(EXAMPLE))["rebuild"]


def keep(model: Any, folder: Path, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Publish and keep versions 0 and 1 of `model`, and return what was trained of version 1."""
    handle = folder / "handle.json"
    settings = TrainingSettings(delta_every=1)
    trainer: Any = SimpleNamespace(model=model, processing_class=build_tokenizer())
    recorder = DeltaRecorder(trainer, handle, folder / "deltas", "r", settings)
    with WeightExporter.from_model(model, handle, slots=4, dtype=dtype) as exporter:
        for version in (0, 1):
            if version:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter += 0.01 * torch.rand_like(parameter) * parameter.requires_grad
            exporter.publish(version)
            recorder.reached(version, exporter)
        recorder.close()
    assert Chain(folder / "deltas").versions == [0, 1]
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def equal(first: Tensor, second: Tensor) -> bool:
    return first.dtype == second.dtype and torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def test_a_rebuilt_version_loads_as_a_checkpoint_of_transformers(tmp_path: Path) -> None:
    trained = keep(build_model(build_tokenizer()), tmp_path)
    write_checkpoint(Chain(tmp_path / "deltas"), 1, tmp_path / "rebuilt")
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "rebuilt", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert all(equal(parameter, trained[name]) for name, parameter in loaded.named_parameters())
    assert AutoTokenizer.from_pretrained(tmp_path / "rebuilt").pad_token == "<pad>"
    other = SimpleNamespace(model=build_model(build_tokenizer(), seed=5))
    load_weights(other, f"{tmp_path / 'deltas'}@1")  # type: ignore[arg-type]
    assert all(equal(parameter.data, trained[name]) for name, parameter in other.model.named_parameters())


def test_a_version_that_was_published_in_bf16_is_a_checkpoint_in_bf16(tmp_path: Path) -> None:
    trained = keep(build_model(build_tokenizer()), tmp_path, dtype=torch.bfloat16)
    write_checkpoint(Chain(tmp_path / "deltas"), 1, tmp_path / "rebuilt")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "rebuilt")
    assert all(equal(p, trained[name].to(torch.bfloat16)) for name, p in loaded.named_parameters())


def adapted(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"])
    return get_peft_model(build_model(build_tokenizer(), tie_word_embeddings=False, seed=seed), config)


def test_of_an_adapter_only_the_adapter_is_kept(tmp_path: Path) -> None:
    model = adapted()
    trained = keep(model, tmp_path)
    chain = Chain(tmp_path / "deltas")
    assert chain.about.kind == "adapter" and chain.about.frozen
    assert chain.rebuild(1).keys() == trained.keys()
    write_checkpoint(chain, 1, tmp_path / "rebuilt")
    model.save_pretrained(tmp_path / "saved")
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("rebuilt", "saved"))
    assert ours.keys() == theirs.keys() and all(equal(ours[name], theirs[name]) for name in ours)
    base = build_model(build_tokenizer(), tie_word_embeddings=False)
    loaded = dict(PeftModel.from_pretrained(base, tmp_path / "rebuilt").named_parameters())
    assert all(equal(loaded[name].data, tensor) for name, tensor in trained.items())
    load_weights(SimpleNamespace(model=adapted()), f"{tmp_path / 'deltas'}@1")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="is an adapter for another base"):
        load_weights(SimpleNamespace(model=adapted(seed=3)), f"{tmp_path / 'deltas'}@1")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="is an adapter, and the model"):
        load_weights(SimpleNamespace(model=build_model(build_tokenizer())), f"{tmp_path / 'deltas'}@1")  # type: ignore[arg-type]


def same_as_the_example(chain: Chain, version: int) -> bool:
    ours, theirs = chain.rebuild(version), rebuild(chain.folder, version)
    return ours.keys() == theirs.keys() and all(ours[name].tobytes() == it.tobytes() for name, it in theirs.items())


def test_the_example_reads_a_chain_without_our_package(tmp_path: Path) -> None:
    text = EXAMPLE.read_text()
    assert "async_grpo" not in text and len(re.findall(r"^.*\S", text, re.MULTILINE)) <= 30
    keep(build_model(build_tokenizer()), tmp_path, dtype=torch.bfloat16)
    chain = Chain(tmp_path / "deltas")
    assert same_as_the_example(chain, 0) and same_as_the_example(chain, 1)
    path = tmp_path / "deltas" / "000001.delta"
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    with pytest.raises(Exception):  # noqa: B017  # zstandard's, numpy's or the example's own
        rebuild(tmp_path / "deltas", 1)


# --- Any trainer of transformers, by the callback ----------------------------------------------------------------


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
    given: dict[str, Any] = {"callbacks": [*callbacks, noting]}
    trainer = build_trainer(tmp_path, max_steps=steps, save_steps=2, save_strategy="steps", arguments=given, **options)
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


# --- Checkpoints that `async-grpo evaluate` cannot use, each refused with a sentence -----------------------------


@pytest.fixture(scope="module")
def policy() -> Any:
    return build_model(build_tokenizer())


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


@pytest.mark.parametrize("damage", [cut, without_weights, broken_config])
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
