"""Generation that the user's code changes on the model or on the built trainer, and that an engine would go round."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from async_grpo.errors import UnsupportedError
from async_grpo.setup.generator_choice import HF, wants_vllm
from async_grpo.setup.replaced import of_libraries
from async_grpo.setup.trl_compat import is_adapter

if TYPE_CHECKING:
    from trl import GRPOTrainer

_BESIDE_THE_LOOP = ("_sample",)  # the workers' own loop takes its place
_ONLY_IN_TRANSFORMERS = ("generate", "_sample", "_get_logits_processor", "_get_stopping_criteria")


def check_generation(trainer: GRPOTrainer, generator: str) -> None:
    """Refuse what plain TRL would generate with, and the workers' engine would not.

    Raises:
        UnsupportedError: with the name of it and the way out.
    """
    if generator == HF:
        for name in _replaced_in(trainer.model, _BESIDE_THE_LOOP):
            raise UnsupportedError(
                f"The model's {name} is not transformers' own, and workers sample with a loop of theirs, so it would "
                "be ignored. Sample in a logits processor (_get_logits_processor of the model) or in rollout_func, or "
                "train in one process (without --distributed)."
            )
    elif not wants_vllm(trainer):
        for name in _replaced_in(trainer.model, _ONLY_IN_TRANSFORMERS):
            raise UnsupportedError(
                f"The model's {name} is not transformers' own, and vLLM would ignore it. Take --generator hf."
            )
        for name in _set_later(trainer):
            raise UnsupportedError(
                f"{name} of trainer.generation_config was set after the trainer was built, and vLLM samples by the "
                "GRPOConfig. Set it there, or in its generation_kwargs, or take --generator hf."
            )


def _replaced_in(model: Any, names: tuple[str, ...]) -> list[str]:
    base = model.get_base_model() if is_adapter(model) else model
    return [name for name in names if not of_libraries(getattr(base, name, None))]


def _set_later(trainer: Any) -> list[str]:
    """What `generation_config` has otherwise than TRL made it."""
    from transformers import GenerationConfig

    if getattr(trainer, "generation_config", None) is None:  # TRL makes none for an engine inside the model
        return []
    built = vars(GenerationConfig(**trainer.generation_kwargs, disable_compile=True))
    now = vars(trainer.generation_config)
    return [name for name in now if now[name] != built.get(name) and not name.startswith("_")]
