"""What can be known of Unsloth without a GPU: when it is imported, in what environment, and what it does to our hooks.

The stand-in in `kit/setups/fake_unsloth` does what Unsloth's source does. The real one needs a GPU (`tests/gpu`).
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_grpo.engines import vllm
from async_grpo.engines.vllm_weights import require_same_base
from async_grpo.errors import UnsupportedError
from async_grpo.rollout.trl_trainer import RolloutTrainer
from async_grpo.setup.generator_choice import VLLM, choose_generator
from kit.runs import DEADLINE_S, SETUP, command, lines_of, steps_logged
from kit.tiny_trainer import build_trainer

FAKE = SETUP.parent / "fake_unsloth"


def test_unsloth_comes_first_and_trains_through_its_own_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = tmp_path / "notes.jsonl"
    arguments = ["train", str(SETUP.with_name("unsloth_model.py")), "--num-workers", "1"]
    environment = {"FAKE_UNSLOTH_NOTES": str(notes), "TEST_STEPS": "3", "TEST_EXTRA_PATH": str(FAKE)}
    monkeypatch.delenv("FAST_INFERENCE", raising=False)
    with command(*arguments, cwd=tmp_path, **environment) as run:
        assert run.process.wait(DEADLINE_S) == 0, run.output
    assert steps_logged(tmp_path / "worker") == [1, 2, 3]
    imports = lines_of(notes)
    assert [entry["imported_before"] for entry in imports] == [[]] * 2
    assert [entry["FAST_INFERENCE"] for entry in imports] == ["0"] * 2
    caches = {Path(entry["UNSLOTH_COMPILE_LOCATION"]).name for entry in imports}
    assert caches == {"parameter_server", "dev1"}


def test_a_model_with_an_engine_of_its_own_generates_with_it(tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path)
    trainer.model.vllm_engine = object()  # what `fast_inference=True` leaves there
    trainer.args.use_vllm = trainer.use_vllm = True  # what Unsloth's trainer then sets
    del trainer.generation_config  # and so TRL does not make
    RolloutTrainer(trainer)
    assert not trainer.args.use_vllm
    assert not trainer.use_vllm, "TRL would correct for its own engine"
    assert choose_generator(None, trainer, on_gpu=True) == VLLM


def suitable_engine(**changes: Any) -> Any:
    """What we read of Unsloth's `LLM`, as `load_vllm` in unsloth_zoo 2026.10.7 makes it."""
    settings: dict[str, Any] = {"lora_config": object(), "logprobs_mode": "processed_logprobs", **changes}
    model_config = SimpleNamespace(logprobs_mode=settings["logprobs_mode"])
    config = SimpleNamespace(lora_config=settings["lora_config"], model_config=model_config)
    inside = {} if settings.get("own_process") else {"model_executor": object()}
    llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config, **inside))
    llm._unsloth_lora_without_attention = settings.get("without_attention", False)
    return llm


@pytest.mark.parametrize(
    ("changes", "asked", "reason"),
    [
        ({"own_process": True}, {}, "process of its own"),
        ({"lora_config": None}, {}, "without adapters"),
        ({"without_attention": True}, {}, "UNSLOTH_VLLM_MERGED_ROLLOUT"),
        ({"logprobs_mode": "raw_logprobs"}, {}, "raw_logprobs"),
        ({}, {"deterministic": True}, "--deterministic"),
        ({}, {"in_flight_update": True}, "--in-flight-update"),
        ({}, {"adapter": None}, "no LoRA adapter"),
        ({}, {"returns_kept": True}, "return_sampling_mask"),
    ],
)
def test_an_engine_that_cannot_serve_the_run_is_refused(changes: Any, asked: Any, reason: str) -> None:
    plain = {"adapter": ("default", object()), "in_flight_update": False, "deterministic": False, "returns_kept": False}
    vllm._require_suitable(suitable_engine(), **plain)
    with pytest.raises(UnsupportedError, match=rf"{reason}.*fast_inference=False"):
        vllm._require_suitable(suitable_engine(**changes), **{**plain, **asked})


def test_an_engine_with_another_base_is_refused(tmp_path: Path) -> None:
    model = build_trainer(tmp_path).model
    published = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    require_same_base(model, published)
    embedding = "model.embed_tokens.weight"
    require_same_base(model, {**published, embedding: published[embedding][:-4]})
    published["model.norm.weight"] += 0.5
    with pytest.raises(UnsupportedError, match=r"model\.norm\.weight.*fast_inference=False"):
        require_same_base(model, published)
