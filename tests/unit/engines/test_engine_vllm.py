"""Where vLLM finds the model that it is to build. The engine itself needs vLLM: `tests/with_vllm`."""

from __future__ import annotations

import sys
import threading
from dataclasses import make_dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from async_grpo.engines import vllm as vllm_engine
from async_grpo.engines import vllm_sampling
from async_grpo.engines.vllm import VLLMEngine
from async_grpo.engines.vllm_hooks import BuildersStream
from async_grpo.errors import UnsupportedError


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


def test_an_engine_without_a_folder_takes_a_temporary_one(built_from: list[tuple[str, list[str]]]) -> None:
    build(None)
    [(folder, files)] = built_from
    assert files == ["config.json"] and not Path(folder).exists()


class CUDAStreams:
    """In place of `torch.cuda`: each thread has a current stream."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._own = threading.local()
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "current_stream", lambda: getattr(self._own, "stream", "the default"))
        patch.setattr(torch.cuda, "set_stream", self.set)
        self.calls = 0

    def set(self, stream: str) -> None:
        self._own.stream = stream
        self.calls += 1


def test_the_thread_that_steps_an_engine_uses_the_stream_of_the_one_that_built_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's second model runner copies tokens behind the stream that was current while it warmed up."""
    streams = CUDAStreams(monkeypatch)
    seen: list[str] = []
    engine: Any = object.__new__(VLLMEngine)
    engine._engine = SimpleNamespace(
        step=lambda: seen.append(torch.cuda.current_stream()) or [], reset_prefix_cache=lambda **_: None
    )
    engine._load_base = lambda tensors: seen.append(torch.cuda.current_stream())
    engine._adapter, engine._images, engine._returns_kept, engine._in_flight_update = None, None, False, False
    streams.set("of the warm-up")
    engine._stream = BuildersStream()

    def work() -> None:
        engine.load({}, 1)
        engine.step()
        engine.step()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert seen == ["of the warm-up"] * 3
    assert streams.calls == 2, "once in each thread"


class KeepsTwoAdapters:
    """The adapters of vLLM's engine. The one that was added first goes when there is no room."""

    def __init__(self) -> None:
        self.there: list[int] = []
        self.pushed_out: list[int] = []

    def add_lora(self, request: SimpleNamespace) -> None:
        self.there.append(request.lora_int_id)
        self.pushed_out += self.there[:-2]
        self.there = self.there[-2:]

    def remove_lora(self, number: int) -> None:
        self.there.remove(number)


def engine_with_adapters(kept: KeepsTwoAdapters, monkeypatch: pytest.MonkeyPatch) -> Any:
    request = ModuleType("vllm.lora.request")
    fields = ("lora_name", "lora_int_id", "lora_path")
    request.LoRARequest = lambda *given: SimpleNamespace(**dict(zip(fields, given, strict=True)))  # type: ignore[attr-defined]
    for module in (ModuleType("vllm"), ModuleType("vllm.lora"), request):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    engine: Any = object.__new__(VLLMEngine)
    engine._engine = kept
    engine._adapter, engine._adapters, engine._adapters_loaded = ("default", None), {}, 0
    engine._in_flight_update, engine._loaded, engine._stream = False, -1, BuildersStream()
    engine._base_loaded, engine._shares_weights_of, engine._load_base = False, None, lambda tensors: None
    return engine


def test_an_adapter_that_was_lost_while_it_was_loaded_pushes_out_no_adapter_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_with_adapters(kept := KeepsTwoAdapters(), monkeypatch)
    engine.load({}, 1)
    engine.load({}, 2, in_use={1})
    engine.forget_weights()  # the trainer died while version 2 was copied
    engine.load({}, 2, in_use={1})
    assert kept.pushed_out == [], "requests in flight go on with version 1"
    assert sorted(engine._adapters) == [1, 2] and kept.there == [1, 3]
    engine.forget_weights()
    engine.forget_weights()
    assert kept.there == [1]


def test_an_adapter_that_could_not_be_added_takes_none_in_use_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_with_adapters(kept := KeepsTwoAdapters(), monkeypatch)
    engine.load({}, 1)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(kept, "add_lora", Mock(side_effect=RuntimeError("the trainer died meanwhile")))
        engine.load({}, 2, in_use={1})
    engine.forget_weights()
    assert kept.there == [1] and list(engine._adapters) == [1], "requests in flight go on with version 1"
