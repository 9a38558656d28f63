"""What a correction cannot do for a trainer, and what the loss is in words, before anything is started."""

from __future__ import annotations

from typing import Any

from torch import nn

from async_grpo.archive.history import Sampler
from async_grpo.errors import UnsupportedError
from async_grpo.setup.generator_choice import ENGINES, VLLM, wants_vllm
from async_grpo.setup.replaced import users_class
from async_grpo.setup.sampling import WITHOUT_SAMPLER, effective_sampling
from async_grpo.training.corrections.rule import TOKEN, Rule
from async_grpo.training.corrections.trl_loss import takes_weights


def check(rule: Rule, trainer: Any, *, own_loss: bool) -> None:
    """Raise `UnsupportedError` where this correction would be wrong for this trainer's loss.

    Args:
        own_loss: the trainer computes its loss without TRL's.
    """
    if trainer.loss_type == "vespo":
        _check_vespo(rule, trainer)
    if rule.name == "trl" and own_loss:
        raise UnsupportedError(
            f"--correction trl weighs the loss by TRL's own code, but {users_class(trainer)} has a loss of its own "
            "that does not call TRL's. Take another --correction: bypass changes only what the ratio is against."
        )
    if rule.weighs and not takes_weights(trainer):
        raise UnsupportedError(
            f"--correction {rule.name} multiplies the loss by weights, which the loss of {users_class(trainer)} does "
            "not take, in TRL neither. Take --correction bypass."
        )
    if rule.weighs and own_loss and trainer.args.off_policy_mask_threshold is not None:
        raise UnsupportedError(
            f"off_policy_mask_threshold masks whole sequences, which --correction {rule.name} would make a decision "
            f"for each token, because {users_class(trainer)} has a loss of its own and gets the weights with its "
            "advantages. Remove off_policy_mask_threshold, or take --correction bypass."
        )


def _check_vespo(rule: Rule, trainer: Any) -> None:
    if rule.weighs and rule.level != TOKEN:
        raise UnsupportedError(
            f"loss_type='vespo' multiplies the weights of a sequence's tokens itself, so a weight of the "
            f"{rule.level} level would count once for every token. Take --correction-level token."
        )
    mode = trainer.args.vllm_importance_sampling_mode
    corrects = trainer.args.vllm_importance_sampling_correction
    if rule.name == "trl" and corrects and not mode.startswith("token_"):
        raise UnsupportedError(
            f"loss_type='vespo' takes vllm_importance_sampling_mode 'token_truncate' or 'token_mask' in TRL, got "
            f"{mode!r}. Change it in the GRPOConfig, or take another --correction."
        )


def sampled_with(trainer: Any, correction: str, generator: str | None) -> Sampler:
    """How groups of a run with this correction are sampled. `generator` None: workers started by hand."""
    if generator is None and wants_vllm(trainer):
        generator = VLLM.name
    engine = ENGINES.get(generator or "", VLLM)  # an older run may have had another name for a server
    exact = engine.full_softmax or correction not in WITHOUT_SAMPLER  # or its groups name the tokens that were kept
    departures = [] if exact else effective_sampling(trainer, engine).departures()
    return Sampler(generator=generator, correction=correction, departures=departures)


def describe(rule: Rule, trainer: Any, *, max_staleness: int, own_loss: bool) -> str:
    """What the loss is, in a sentence or two; empty where it is exactly TRL's own for this setup file."""
    sentences = []
    if wants_vllm(trainer) and rule.name != "trl":
        sentences.append(f"The loss is not TRL's of use_vllm=True, which {_of_trl(trainer.args)}. Here it {_of(rule)}.")
        sentences.append("--correction trl does what TRL does.")
    elif rule.name == "trl" and not wants_vllm(trainer):
        sentences.append(
            f"The loss is TRL's of use_vllm=True, although the setup file does not ask for vLLM: it "
            f"{_of_trl(trainer.args)}."
        )
    elif rule.name not in ("trl", "none") and max_staleness > 0:
        sentences.append(f"The loss on stale rollouts {_of(rule)}; on fresh ones it is TRL's.")
    if rule.weighs and own_loss:
        sentences.append(
            f"{users_class(trainer)} has a loss that does not call TRL's, so its advantages are weighed: they get the "
            "shape [B, C], one for each token, and the loss must take that shape."
        )
    return " ".join(sentences)


def describe_noise(trainer: Any) -> str:
    """What the model trains with and is sampled without, which TRL does not do; empty where there is nothing."""
    rates = [
        max(getattr(module, "p", 0.0) if isinstance(module, nn.Dropout) else 0.0, _attention_dropout(module))
        for module in trainer.model.modules()
    ]
    noise = {  # and how to train without
        f"dropout ({max(rates, default=0.0):g})": ("disable_dropout=True in the GRPOConfig, or lora_dropout=0", rates),
        f"noise in its embeddings (neftune_noise_alpha={trainer.args.neftune_noise_alpha})": (
            "neftune_noise_alpha=None in the GRPOConfig",
            [trainer.args.neftune_noise_alpha or 0.0],
        ),
    }
    found = {name: without for name, (without, amounts) in noise.items() if max(amounts, default=0.0) > 0}
    if not found:
        return ""
    it = "it" if len(found) == 1 else "them"
    return (
        f"The model trains with {' and '.join(found)} and workers sample without {it}, so the ratio in the loss is not "
        f"1 for fresh rollouts either. {'; '.join(found.values())} makes it 1."
    )


def _attention_dropout(module: nn.Module) -> float:
    rate = getattr(module, "attention_dropout", 0.0)
    return float(rate) if isinstance(rate, (int, float)) else 0.0


def _of(rule: Rule) -> str:
    if rule.name == "bypass":
        return "clips the ratio to the policy that sampled (bypass)"
    if rule.name == "none":
        return "ignores the sampler's log-probabilities (none)"
    outside = "drops" if rule.masks else "limits"
    return (
        f"multiplies by the {rule.level} ratio of the trainer's old policy to the sampler's, and {outside} it outside "
        f"{rule.least:g} to {rule.most:g} ({rule.name})"
    )


def _of_trl(args: Any) -> str:
    if not args.vllm_importance_sampling_correction:
        return "ignores the sampler's log-probabilities (vllm_importance_sampling_correction=False)"
    bounds = [
        f"{name}={value:g}"
        for name in ("vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max")
        if (value := getattr(args, name)) is not None
    ]
    mode = f"vllm_importance_sampling_mode={args.vllm_importance_sampling_mode!r}"
    return f"recomputes the log-probabilities and weighs by their ratio to the sampler's ({', '.join([mode, *bounds])})"
