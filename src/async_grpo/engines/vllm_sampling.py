"""How vLLM samples for a worker: its `SamplingParams`, and the tokens that truncated sampling kept.

vLLM returns those (`return_sampling_mask`) with its second model runner, and only if every request has `top_k` and a
temperature. `tests/with_vllm/test_vllm_kept_tokens.py` names what moved.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from async_grpo.errors import GeneratorError, UnsupportedError

if TYPE_CHECKING:
    from vllm import SamplingParams

    from async_grpo.tokens.kept_tokens import Kept

RETURN_KEPT = "return_sampling_mask"  # an engine argument, and an attribute of vLLM's model configuration
FULL_SOFTMAX = (
    "Set top_p=1, top_k=0 and min_p=None in the GRPOConfig, take --generator hf, whose log-probabilities are of the "
    "full softmax, or --correction trl or none."
)


def parameters(options: dict[str, Any], *, every_token: bool) -> SamplingParams:
    """Parameters of every completion. `UnsupportedError`: vLLM refuses the options."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    try:
        return SamplingParams(
            **structured(options),
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            output_kind=RequestOutputKind.DELTA if every_token else RequestOutputKind.FINAL_ONLY,
        )
    except (TypeError, ValueError) as error:
        raise UnsupportedError(f"The GRPOConfig's sampling parameters do not suit vLLM: {error}") from error


def structured(options: dict[str, Any]) -> dict[str, Any]:
    """vLLM wants an object where a user may give a dictionary."""
    from vllm.sampling_params import StructuredOutputsParams

    given = options.get("structured_outputs")
    return {**options, "structured_outputs": StructuredOutputsParams(**given)} if isinstance(given, dict) else options


def set_own(sampling: SamplingParams, own: dict[str, Any], *, returns_kept: bool) -> None:
    """Set what a job brings: see `records.OWN_SAMPLING`. `returns_kept`: the engine says which tokens it kept.

    Raises:
        ValueError: it cannot with these settings.
    """
    for name, value in own.items():
        setattr(sampling, name, value)
    if own and sampling.temperature == 0:  # as vLLM's constructor does
        sampling.top_p, sampling.top_k, sampling.min_p = 1.0, 0, 0.0
        if returns_kept:  # it takes no temperature of 0
            sampling.temperature, sampling.top_k = 1.0, 1
    if own and returns_kept and sampling.top_k <= 0:
        raise ValueError(
            "the run trains with truncated sampling, so its vLLM engines return the tokens that they kept, and vLLM "
            "does that with top_k > 0 only, in evaluations too. Give --eval-top-k a number, or take --generator hf."
        )


def require_kept(engine_arguments: type) -> dict[str, Any]:
    """The engine argument with which vLLM returns the tokens that it kept. `UnsupportedError`: this vLLM has none."""
    if RETURN_KEPT not in {field.name for field in fields(engine_arguments)}:
        raise UnsupportedError(
            "This vLLM cannot return the tokens that truncated sampling kept, over which the loss is to be computed; "
            f"vLLM 0.32 can. {FULL_SOFTMAX}"
        )
    return {RETURN_KEPT: True}


def cannot_return_kept(error: ValueError) -> UnsupportedError:
    """Why vLLM has refused to build an engine that would return them."""
    reasons = [each["msg"] for each in error.errors()] if hasattr(error, "errors") else [str(error)]  # of pydantic
    return UnsupportedError(
        "vLLM cannot start an engine that returns the tokens that truncated sampling kept, over which the loss is to "
        f"be computed. It says: {'; '.join(reasons)}. Its CPU build cannot, and VLLM_USE_V2_MODEL_RUNNER=0 turns it "
        f"off. {FULL_SOFTMAX}"
    )


def kept_of(completion: Any) -> list[Kept]:
    """The tokens that were kept at each position of a `CompletionOutput`. `GeneratorError`: vLLM does not say it."""
    sets = completion.sampling_mask.token_ids if completion.sampling_mask is not None else []
    if len(sets) != len(completion.token_ids):
        raise GeneratorError(
            f"vLLM named the kept tokens of {len(sets)} places for {len(completion.token_ids)} tokens. {FULL_SOFTMAX}"
        )
    return [np.asarray(each, np.int32).tobytes() for each in sets]
