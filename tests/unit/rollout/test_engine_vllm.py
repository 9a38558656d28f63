"""Where vLLM finds the model that it is to build. The engine itself needs vLLM: `tests/with_vllm`."""

from __future__ import annotations

import sys
from dataclasses import make_dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from async_grpo.errors import UnsupportedError
from async_grpo.rollout.engines import vllm as vllm_engine
from async_grpo.rollout.engines import vllm_sampling
from async_grpo.rollout.engines.vllm import VLLMEngine


@pytest.fixture
def built_from(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """The folders that a stand-in for vLLM was started on, and what was in them then."""
    seen: list[tuple[str, list[str]]] = []

    def from_engine_args(args: SimpleNamespace) -> None:
        if getattr(args, "return_sampling_mask", False):
            raise ValueError("sampling distribution replay requires Model Runner V2")
        seen.append((args.model, sorted(path.name for path in Path(args.model).iterdir())))

    engine = ModuleType("vllm.v1.engine.llm_engine")
    engine.LLMEngine = SimpleNamespace(from_engine_args=from_engine_args)  # type: ignore[attr-defined]
    vllm = ModuleType("vllm")
    vllm.EngineArgs = SimpleNamespace  # type: ignore[attr-defined]
    for module in (vllm, ModuleType("vllm.v1"), ModuleType("vllm.v1.engine"), engine):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(vllm_engine, "engine_options", lambda *_, **__: {})
    monkeypatch.setattr(vllm_engine, "refuse_several_gpus", lambda trainer: None)
    monkeypatch.setattr(vllm_engine, "describe_model", lambda _, folder, **__: (folder / "config.json").touch())
    return seen


def build(folder: Path | None, *, returns_kept: bool = False) -> None:
    engine: Any = object.__new__(VLLMEngine)
    engine._with_text, engine._sees_images, engine._adapter, engine._in_flight_update = False, False, None, False
    engine._returns_kept, engine._deterministic = returns_kept, False
    trainer = SimpleNamespace(accelerator=SimpleNamespace(device="cuda:0"))
    engine._build(trainer, folder, seed=0)


def test_a_worker_builds_its_engine_in_the_run_directory_and_tidies_up_after_a_dead_one(
    tmp_path: Path, built_from: list[tuple[str, list[str]]]
) -> None:
    folder = tmp_path / "alive" / "dev1.engine"
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text("of one that was killed")
    build(folder)
    assert built_from == [(str(folder), ["config.json"])]
    assert not folder.exists()


def test_a_vllm_that_cannot_name_the_kept_tokens_is_refused_with_a_sentence(
    built_from: list[tuple[str, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    older = make_dataclass("EngineArgs", ["model"])
    monkeypatch.setattr(sys.modules["vllm"], "EngineArgs", older)
    with pytest.raises(UnsupportedError, match=r"This vLLM cannot return.*vLLM 0.32 can.*--generator hf"):
        build(None, returns_kept=True)
    newer = type("EngineArgs", (SimpleNamespace,), {})
    monkeypatch.setattr(vllm_sampling, "fields", lambda _: [SimpleNamespace(name="return_sampling_mask")])
    monkeypatch.setattr(sys.modules["vllm"], "EngineArgs", newer)
    with pytest.raises(UnsupportedError, match=r"It says: .* requires Model Runner V2. Its CPU build cannot.*--gen"):
        build(None, returns_kept=True)
    assert built_from == []


def test_an_engine_without_a_place_takes_a_temporary_one(built_from: list[tuple[str, list[str]]]) -> None:
    build(None)
    [(folder, files)] = built_from
    assert files == ["config.json"] and not Path(folder).exists()
