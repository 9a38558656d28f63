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
from transformers.processing_utils import ImagesKwargs

from async_grpo.engines import vllm as vllm_engine
from async_grpo.engines import vllm_sampling
from async_grpo.engines.vllm import VLLMEngine
from async_grpo.engines.vllm_hooks import BuildersStream
from async_grpo.engines.vllm_options import (
    engine_options,
    needs_text,
    refuse_image_settings,
    refuse_several_gpus,
    sampling_options,
)
from async_grpo.errors import UnsupportedError


@pytest.fixture
def built_from(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, list[str]]]:
    """The arguments that a stand-in for vLLM was started with, and what was in its folder then."""
    seen: list[tuple[Any, list[str]]] = []

    def from_engine_args(args: SimpleNamespace, usage_context: str) -> None:
        if getattr(args, "return_sampling_mask", False):
            raise ValueError("sampling distribution replay requires Model Runner V2")
        assert usage_context == "LLM", "as many tokens a step as `vllm.LLM`"
        seen.append((args, sorted(path.name for path in Path(args.model).iterdir())))

    engine = ModuleType("vllm.v1.engine.llm_engine")
    engine.LLMEngine = SimpleNamespace(from_engine_args=from_engine_args)  # type: ignore[attr-defined]
    vllm = ModuleType("vllm")
    vllm.EngineArgs = SimpleNamespace  # type: ignore[attr-defined]
    usage = ModuleType("vllm.usage.usage_lib")
    usage.UsageContext = SimpleNamespace(LLM_CLASS="LLM")  # type: ignore[attr-defined]
    packages = map(ModuleType, ("vllm.v1", "vllm.v1.engine", "vllm.usage"))
    for module in (vllm, *packages, engine, usage):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(vllm_engine, "engine_options", lambda *_, **__: {})
    monkeypatch.setattr(vllm_engine, "refuse_several_gpus", lambda trainer: None)
    monkeypatch.setattr(vllm_engine, "describe_model", lambda _, folder, **__: (folder / "config.json").touch())
    return seen


def build(folder: Path | None, *settings: str) -> None:
    engine: Any = object.__new__(VLLMEngine)
    engine._with_text, engine._sees_images, engine._adapter, engine._in_flight_update = False, False, None, False
    engine._returns_kept, engine._deterministic = False, False
    vars(engine).update(dict.fromkeys(settings, True))
    trainer = SimpleNamespace(accelerator=SimpleNamespace(device="cuda:0"))
    engine._build(trainer, folder, seed=0)


def test_a_worker_builds_its_engine_in_the_run_directory_and_tidies_up_after_a_dead_one(
    tmp_path: Path, built_from: Any
) -> None:
    folder = tmp_path / "alive" / "dev1.engine"
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text("of one that was killed")
    build(folder)
    [(args, files)] = built_from
    assert (args.model, files) == (str(folder), ["config.json"]) and not folder.exists()


def test_a_vllm_that_cannot_name_the_kept_tokens_is_refused_with_a_sentence(
    built_from: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = make_dataclass("EngineArgs", ["model"])
    monkeypatch.setattr(sys.modules["vllm"], "EngineArgs", older)
    with pytest.raises(UnsupportedError, match=r"This vLLM cannot return.*vLLM 0.32 can.*--generator hf"):
        build(None, "_returns_kept")
    newer = type("EngineArgs", (SimpleNamespace,), {})
    monkeypatch.setattr(vllm_sampling, "fields", lambda _: [SimpleNamespace(name="return_sampling_mask")])
    monkeypatch.setattr(sys.modules["vllm"], "EngineArgs", newer)
    with pytest.raises(UnsupportedError, match=r"It says: .* requires Model Runner V2. Its CPU build cannot.*--gen"):
        build(None, "_returns_kept")
    assert built_from == []


@pytest.mark.parametrize("setting", ["_in_flight_update", "_deterministic", "_with_text"])
def test_it_takes_a_temporary_folder_and_schedules_ahead_where_no_token_has_to_be_known_at_once(
    setting: str, built_from: Any
) -> None:
    build(None, setting)
    [(args, files)] = built_from
    assert files == ["config.json"] and not Path(args.model).exists()
    assert hasattr(args, "async_scheduling") is (setting != "_with_text")


def test_a_buffer_that_the_checkpoint_would_fill_is_refused() -> None:
    model = torch.nn.Linear(2, 2, bias=False)
    model.attention = torch.nn.Module()
    model.attention.register_buffer("_k_scale", torch.ones(1))
    model.load_weights = lambda weights: {"weight"}  # type: ignore[assignment]
    engine: Any = object.__new__(VLLMEngine)
    engine._runner = SimpleNamespace(get_model=lambda: model)
    engine._load_all({})
    model.register_buffer("layer_scalar", torch.ones(1))
    with pytest.raises(UnsupportedError, match=r"1 parameters .* does not publish, the first is layer_scalar"):
        engine._load_all({})


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


# --- What a `GRPOConfig` becomes for vLLM, without vLLM ----------------------------------------------------------


def trainer(model: Any = None, **changes: Any) -> SimpleNamespace:
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": None, "repetition_penalty": 1.1}
    more = {"generation_kwargs": None, "vllm_structured_outputs_regex": None, "generation_batch_size": 32}
    memory = {"vllm_gpu_memory_utilization": 0.4, "vllm_max_model_length": 2048, "vllm_tensor_parallel_size": 1}
    loading = {"vllm_model_impl": "vllm", "trust_remote_code": False, "bf16": False, "fp16": False}
    return SimpleNamespace(
        args=SimpleNamespace(**{**sampling, **more, **memory, **loading, **changes}),
        model=model or SimpleNamespace(dtype=torch.float32),
        max_completion_length=64,
        num_generations=8,
        eos_token_ids=[7, 5],
        tools=[],
    )


def test_the_tags_of_a_tokenizer_end_messages_beside_the_users_own_stops() -> None:
    given = trainer(generation_kwargs={"stop": "</a>"})
    given.tools, given.processing_class = [print], SimpleNamespace(stop_tags=("</tool>", "</answer>"))
    options = sampling_options(given)
    assert options["stop"] == ["</a>", "</tool>", "</answer>"]
    assert options["detokenize"] is True


def adapter(rank: int = 16, peft_type: str = "LORA", beside: bool = False) -> SimpleNamespace:
    names = ["base_model.model.q_proj.lora_A.default.weight"]
    parameters = [(name, SimpleNamespace(requires_grad=True)) for name in names + ["norm.weight"] * beside]
    return SimpleNamespace(
        dtype=torch.bfloat16,
        active_adapter="default",
        peft_config={"default": SimpleNamespace(r=rank, rank_pattern={}, peft_type=peft_type)},
        named_parameters=lambda: iter(parameters),
    )


def test_sampling_parameters_are_those_of_the_config() -> None:
    assert sampling_options(trainer()) == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.0,
        "repetition_penalty": 1.1,
        "max_tokens": 64,
        "stop_token_ids": [5, 7],
        "detokenize": False,
    }


def test_generation_kwargs_win_whatever_they_are_called() -> None:
    kwargs = {"stop_strings": ["</a>"], "max_new_tokens": 9, "eos_token_id": 3, "frequency_penalty": 0.5}
    wanted = {"stop": ["</a>"], "max_tokens": 9, "stop_token_ids": [3], "frequency_penalty": 0.5}
    wanted["detokenize"] = True  # a stop string is found in text
    options = sampling_options(trainer(generation_kwargs=kwargs))
    assert {name: options[name] for name in wanted} == wanted
    assert sampling_options(trainer(generation_kwargs={"do_sample": False}))["temperature"] == 0.0


@pytest.mark.parametrize(
    ("kwargs", "ends"),
    [
        ({"stop_token_ids": [9]}, [5, 7, 9]),
        ({"stop_token_ids": [9], "eos_token_id": [3, 4]}, [3, 4, 9]),
        ({"ignore_eos": True}, []),
        ({"ignore_eos": True, "stop_token_ids": [9]}, [9]),
        ({"ignore_eos": False, "stop_token_ids": None}, [5, 7]),
    ],
)
def test_what_ends_a_completion_is_what_ends_it_in_trls_engine(kwargs: dict[str, Any], ends: list[int]) -> None:
    """There vLLM adds the end tokens itself, unless it is to ignore them."""
    assert sampling_options(trainer(generation_kwargs=kwargs))["stop_token_ids"] == ends


def test_a_regex_needs_the_tokenizer() -> None:
    options = sampling_options(trainer(vllm_structured_outputs_regex="[0-9]+"))
    assert options["structured_outputs"] == {"regex": "[0-9]+"}
    assert needs_text(options)


@pytest.mark.parametrize("name", ["n", "seed", "logprobs"])
def test_what_the_run_decides_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"generation_kwargs has '{name}'.*Remove it"):
        sampling_options(trainer(generation_kwargs={name: 1}))


def test_engine_settings_are_those_of_the_config() -> None:
    options = engine_options(trainer(), seed=3, deterministic=False)
    wanted = {"gpu_memory_utilization": 0.4, "max_model_len": 2048, "max_num_seqs": 32, "dtype": "float32", "seed": 3}
    assert {**wanted, "enable_prefix_caching": True}.items() <= options.items() and "enable_lora" not in options
    assert not engine_options(trainer(), seed=0, deterministic=True)["enable_prefix_caching"]
    assert engine_options(trainer(bf16=True), seed=0, deterministic=False)["dtype"] == "bfloat16"


def test_an_engine_over_several_gpus_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"vllm_tensor_parallel_size=2.*Set it to 1"):
        refuse_several_gpus(trainer(vllm_tensor_parallel_size=2))


@pytest.mark.parametrize(("rank", "room"), [(4, 8), (16, 16), (17, 32)])
def test_room_for_an_adapter(rank: int, room: int) -> None:
    options = engine_options(trainer(adapter(rank)), seed=0, deterministic=False)
    assert (options["enable_lora"], options["max_lora_rank"]) == (True, room)


@pytest.mark.parametrize("model", [adapter(peft_type="IA3"), adapter(beside=True), adapter(rank=1000)])
def test_an_adapter_that_vllm_cannot_take_is_refused(model: Any) -> None:
    with pytest.raises(UnsupportedError, match="--generator hf"):
        engine_options(trainer(model), seed=0, deterministic=False)


def test_settings_of_the_image_processor_in_chat_template_kwargs_are_refused() -> None:
    """TRL gives them to the processor that makes the prompt, and neither vLLM nor TRL's loss would follow them."""
    processor = SimpleNamespace(image_processor=SimpleNamespace(valid_kwargs=ImagesKwargs))
    given: dict[str, Any] = {"enable_thinking": False}
    trainer = SimpleNamespace(processing_class=processor, chat_template_kwargs=given)
    refuse_image_settings(trainer)
    for name in ("do_resize", "processor_kwargs"):
        trainer.chat_template_kwargs = {**given, name: {}}
        with pytest.raises(UnsupportedError, match=rf"has {name}, for the image processor.*from_pretrained"):
            refuse_image_settings(trainer)
