"""What the user's `GRPOConfig` says to vLLM: sampling parameters and engine settings, as plain dictionaries.

The names are vLLM's; nothing here imports it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from async_grpo.engines import stop_tags
from async_grpo.errors import UnsupportedError
from async_grpo.setup.generator_choice import VLLM
from async_grpo.setup.sampling import effective_sampling

# What transformers calls these in `generation_kwargs`, for files that were written for it.
_RENAMED = {"stop_strings": "stop", "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
_OURS = {
    "n": "num_generations says how many completions a prompt gets",
    "seed": "all completions of a group would be the same; set the trainer's `seed`",
    "logprobs": "every sampled token's log-probability is kept anyway",
    **dict.fromkeys(("output_kind", "stream_interval", "flat_logprobs"), "the workers decide how outputs come"),
}
_DISTRIBUTION = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_NEED_TEXT = ("stop", "bad_words", "structured_outputs")
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM can reserve memory for


def sampling_options(trainer: Any) -> dict[str, Any]:
    """The arguments of vLLM's `SamplingParams` for one completion, as TRL would give them.

    Raises:
        UnsupportedError: `generation_kwargs` holds something that this run decides itself.
    """
    given: dict[str, Any] = dict(trainer.args.generation_kwargs or {})
    for name, reason in _OURS.items():
        if name in given:
            raise UnsupportedError(f"generation_kwargs has {name!r}: {reason}. Remove it.")
    given.pop("do_sample", None)
    options: dict[str, Any] = {
        "max_tokens": trainer.max_completion_length,
        "stop_token_ids": _ends(given, trainer.eos_token_ids),
    }
    options |= {_RENAMED.get(name, name): value for name, value in given.items()}
    if tags := stop_tags(trainer):
        stops = options.get("stop") or []
        options["stop"] = [*([stops] if isinstance(stops, str) else stops), *tags]
    sampling = effective_sampling(trainer, VLLM)
    options |= {name: getattr(sampling, name) for name in _DISTRIBUTION}
    if sampling.regex is not None:
        options["structured_outputs"] = {"regex": sampling.regex}
    options["detokenize"] = needs_text(options)
    return options


def _ends(given: dict[str, Any], eos_token_ids: list[int]) -> list[int]:
    """Take from `given` what ends a completion. As with TRL's engine, stop tokens come beside the end tokens."""
    ends = given.pop("eos_token_id", eos_token_ids)
    ends = [ends] if isinstance(ends, int) else ends
    return sorted({*(() if given.get("ignore_eos") else ends), *(given.pop("stop_token_ids", None) or ())})


def needs_text(options: dict[str, Any]) -> bool:
    """Whether the engine has to turn tokens into text, and so needs the tokenizer, to follow the options."""
    return any(options.get(name) for name in _NEED_TEXT)


def sees_images(trainer: Any) -> bool:
    """Whether the trainer's model takes images, whatever its data has."""
    return hasattr(trainer.processing_class, "image_processor")


def refuse_image_settings(trainer: Any) -> None:
    """Raise `UnsupportedError` for settings of the image processor that only the making of prompts would use."""
    described = getattr(trainer.processing_class.image_processor, "valid_kwargs", None)
    settings = {"processor_kwargs", "images_kwargs", *getattr(described, "__annotations__", ())}
    if found := sorted(settings & trainer.chat_template_kwargs.keys()):
        raise UnsupportedError(
            f"chat_template_kwargs has {', '.join(found)}, for the image processor. vLLM and TRL's loss process images "
            "without it, so they would see other pixels than the prompt has tokens for. Set it on the processor "
            "itself, as in AutoProcessor.from_pretrained(NAME, max_pixels=…), and remove it from chat_template_kwargs."
        )


def engine_options(trainer: Any, *, seed: int, deterministic: bool, merged: bool = False) -> dict[str, Any]:
    """The arguments of vLLM's `EngineArgs` that depend on the user's trainer.

    Args:
        merged: an adapter is merged into the weights, so the engine knows of none.
    """
    args = trainer.args
    return {
        "dtype": _dtype(trainer),
        "gpu_memory_utilization": args.vllm_gpu_memory_utilization,
        "max_model_len": args.vllm_max_model_length,
        "max_num_seqs": max(args.generation_batch_size, trainer.num_generations),
        "model_impl": args.vllm_model_impl,
        "trust_remote_code": args.trust_remote_code,
        "enable_prefix_caching": not deterministic,  # a hit computes the prompt in other pieces, so with other bits
        "seed": seed,
        **({} if merged else _lora_options(trainer.model)),
    }


def refuse_several_gpus(trainer: Any) -> None:
    """Raise `UnsupportedError` where the setup file asks for an engine over several GPUs, and it is in a worker."""
    if trainer.args.vllm_tensor_parallel_size > 1:
        raise UnsupportedError(
            f"vllm_tensor_parallel_size={trainer.args.vllm_tensor_parallel_size}: an engine in a worker runs on one "
            "GPU. Set it to 1 and start a worker on every GPU: the engines then share the prompts. Or take "
            "--generator vllm-server, where each worker starts a server that may have several."
        )


def describe_model(trainer: Any, folder: Path, *, with_text: bool) -> None:
    """Write what vLLM reads to build the model: the configuration, and the tokenizer where text is needed."""
    base = trainer.model.get_base_model() if adapter_of(trainer.model) else trainer.model
    config = type(base.config).from_dict(base.config.to_dict())
    config.architectures = config.architectures or [type(base).__name__]
    config.save_pretrained(folder)
    if with_text:
        trainer.processing_class.save_pretrained(folder)


def _dtype(trainer: Any) -> str:
    """What the trainer computes in, so that the sampler's log-probabilities are near the trainer's."""
    if trainer.args.bf16:
        return "bfloat16"
    if trainer.args.fp16:
        return "float16"
    return str(trainer.model.dtype).removeprefix("torch.")


def adapter_of(model: Any) -> tuple[str, Any] | None:
    """Name and configuration of the adapter that trains, or None for a model without one.

    Raises:
        UnsupportedError: the adapter is not a LoRA adapter, or other parameters train as well.
    """
    if not hasattr(model, "peft_config"):
        return None
    name = model.active_adapter
    config = model.peft_config[name]
    others = [n for n, parameter in model.named_parameters() if parameter.requires_grad and ".lora_" not in n]
    if str(config.peft_type).rpartition(".")[2].upper() != "LORA" or others:
        what = f"{others[0]} trains as well as the adapter" if others else f"the adapter is {config.peft_type}"
        raise UnsupportedError(f"vLLM takes LoRA adapters and nothing else, but {what}. Take --generator hf.")
    return name, config


def _lora_options(model: Any) -> dict[str, Any]:
    adapter = adapter_of(model)
    if adapter is None:
        return {}
    rank = max([adapter[1].r, *(adapter[1].rank_pattern or {}).values()])
    reserved = next((size for size in LORA_RANKS if size >= rank), None)
    if reserved is None:
        raise UnsupportedError(f"LoRA rank {rank} is over {LORA_RANKS[-1]}, vLLM's largest. Take --generator hf.")
    return {"enable_lora": True, "max_lora_rank": reserved}
