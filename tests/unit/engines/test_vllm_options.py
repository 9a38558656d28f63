"""What a `GRPOConfig` becomes for vLLM, without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.processing_utils import ImagesKwargs

from async_grpo.engines.vllm_options import (
    engine_options,
    needs_text,
    refuse_image_settings,
    refuse_several_gpus,
    sampling_options,
)
from async_grpo.errors import UnsupportedError


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
