"""The guard of fresh batches: on tokens that the version in training has sampled, trainer and sampler must agree.

The statistic is the mean of |log pi - log mu| over the tokens that the loss counts, of sequences whose policy version
is the trainer's, over all micro-batches, ranks and steps so far. `LEAST` tokens decide; fewer do where they are so far
apart that the mean of `LEAST` would be above the bound whatever the others are, and otherwise only warn. One token
counts at most `FARTHEST`, so that no single one decides. All ranks decide by the bound of rank 0.

The first judgement of a run may stop it; later ones, and those after it in a resumed run, warn, once a process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import TrainerCallback

from async_grpo.archive.history import Sampler
from async_grpo.errors import RunRefused
from async_grpo.images import MODEL_INPUTS
from async_grpo.log import logger
from async_grpo.setup.generator_choice import ENGINES
from async_grpo.setup.pieces import multiplies_in_float32
from async_grpo.training.corrections.kept_log_probs import IDS, SIZES
from async_grpo.training.corrections.weights import loss_mask

LEAST = 256  # tokens
FARTHEST = 5.0  # nats of a token; a 256th of it is below both bounds
ROUNDED, EXACT = 0.5, 0.02  # nats, mean of the tokens
WARN_FROM = 0.1  # of the bound

_CAUSES = {
    "padding": "One of these completions alone, without padding, is computed as it was sampled: so what the model "
    "computes depends on how its batch is padded. TRL passes no position ids, so a model with learned positions (the "
    "GPT-2 family) counts the padding, and a recurrence reads it; the loss of plain TRL has the same error. Use "
    "prompts of one length, or a model with rotary positions.",
    "noise": "One of these completions alone is computed as it was sampled in eval mode, and otherwise in training "
    "mode: so something acts only while the model trains, such as dropout, noise in embeddings, or code that asks "
    "`self.training`. Switch it off.",
    "sampler": "One of these completions differs also alone, without padding and in eval mode: so workers sample by "
    "other computations than the trainer's. Usual causes are a method of the trainer or the model that computes logits "
    "or generates otherwise, a rollout_func whose log-probabilities are of something else, other position ids or "
    "virtual tokens, and another attention or dtype in the engine.",
    "": "Usual causes are position ids, virtual tokens, noise in embeddings, dropout, a generate of the model's own, "
    "and another attention or dtype in the engine.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """How far trainer and sampler may be apart."""

    nats: float = inf  # mean of fresh tokens; inf: any distance is right
    basis: str = ""
    stops: bool = False  # the run, where the first judgement finds more


@dataclass(frozen=True, slots=True, kw_only=True)
class Farthest:
    """The completion of a step whose tokens are the farthest apart."""

    inputs: dict[str, Any]  # of the loss, see `alone`
    log_pi: Tensor  # [tokens], of the loss
    log_mu: Tensor
    counted: Tensor  # [tokens], bool
    apart: float  # mean of its counted tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compared:
    """The same on all ranks."""

    mean: float  # nats
    tokens: int
    bound: float  # rank 0's
    stops: bool
    all_repeat: bool  # every rank has a completion to repeat

    @property
    def decided(self) -> bool:
        return self.tokens >= LEAST or self.mean * self.tokens > self.bound * LEAST


def bound_of(trainer: Any, sampled: Sampler, publish_dtype: str | None, *, stops: bool) -> Bound:
    """How far this run's trainer and sampler may be apart. More than that `stops` the run, or is a warning."""
    if sampled.departures:  # by design the sampler's log-probabilities are of another distribution
        return Bound()
    if rounding := _rounding(trainer, sampled.generator, publish_dtype):
        return Bound(nats=ROUNDED, basis=f"as {rounding} may round", stops=stops)
    basis = "as trainer, published weights and sampler compute in float32 without TF32"
    return Bound(nats=EXACT, basis=basis, stops=stops)


def _rounding(trainer: Any, generator: str | None, publish_dtype: str | None) -> str:
    """What does not compute in float32 as the trainer does; empty where everything does."""
    dtypes = {parameter.dtype for parameter in trainer.model.parameters()} - {torch.float32}
    if dtypes:
        return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
    if trainer.accelerator.mixed_precision not in (None, "no"):
        return str(trainer.accelerator.mixed_precision)
    if publish_dtype is not None:
        return f"--publish-dtype {publish_dtype}"
    if generator is None or not ENGINES[generator].in_place:
        return "an engine that is not transformers" if generator else "the engine of workers started by hand"
    return "" if trainer.accelerator.device.type == "cpu" or multiplies_in_float32() else "TF32"


class FreshBatch(TrainerCallback):
    """Judges before an optimizer step what `saw` was given since the last judgement.

    Args:
        bound: rank 0's; on other ranks it does not matter.
        gather: concatenates a tensor of each rank, in the first dimension.
        repeat: log-probabilities of a completion alone, [tokens], in eval mode or in training mode; None where it
            cannot be alone. All ranks call it at the same times.
    """

    def __init__(
        self,
        bound: Bound,
        gather: Callable[[Tensor], Tensor],
        repeat: Callable[[Farthest, bool], Tensor | None],
        text_of: Callable[[int], str],
    ) -> None:
        self.bound, self._gather, self._repeat, self._text_of = bound, gather, repeat, text_of
        # [sum of |log pi - log mu|, tokens], of what was not judged yet
        self._sums = torch.zeros(2, dtype=torch.float32, device="cpu")
        self._found: _Compared | None = None  # at the newest step
        self._farthest: Farthest | None = None  # of this step
        self._first = True  # nothing was judged yet
        self._warned = False
        self._ended = False  # nothing is judged any more

    @property
    def waits(self) -> bool:
        """Whether there was no judgement yet."""
        return self._first and not self._ended

    @property
    def undecided(self) -> dict[str, float]:
        """What the steps have shown where that does not decide, for the summary; otherwise empty."""
        found = self._found if self.waits else None
        return {} if found is None else {"undecided_tokens": found.tokens, "undecided_nats": float(f"{found.mean:.3g}")}

    def saw(self, inputs: Mapping[str, Any], log_pi: Tensor, version: int) -> None:
        """A micro-batch is trained on at this version, with the log-probabilities `log_pi`, [B, C]."""
        if self._ended:
            return
        apart = (log_pi.float() - inputs["sampling_per_token_logps"].float()).abs()
        fresh = loss_mask(inputs) & (inputs["policy_version"] == version)[:, None] & ~apart.isnan()
        apart = apart.clamp(max=FARTHEST).where(fresh, 0.0)
        self._sums = self._sums.to(apart) + torch.stack([apart.sum(), fresh.sum().to(apart)])
        if self._first:
            self._keep_farthest(inputs, log_pi, apart, fresh)

    def _keep_farthest(self, inputs: Mapping[str, Any], log_pi: Tensor, apart: Tensor, fresh: Tensor) -> None:
        means = apart.sum(-1) / fresh.sum(-1).clamp(min=1)
        row = int(means.argmax())
        if means[row].item() > (0.0 if self._farthest is None else self._farthest.apart):
            there = inputs["completion_mask"][row].bool()
            self._farthest = Farthest(
                inputs=alone(inputs, row),
                log_pi=log_pi[row][there],
                log_mu=inputs["sampling_per_token_logps"][row][there],
                counted=fresh[row][there],
                apart=means[row].item(),
            )

    def on_pre_optimizer_step(self, args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
        if self._ended:
            return
        farthest, self._farthest = self._farthest, None  # its log-probabilities are of these weights
        found = self._found = self._over_ranks(farthest)
        first, self._first = self._first, self._first and not found.decided
        step, cause = state.global_step + 1, ""
        if found.decided and first and found.mean > found.bound:
            cause = self._cause(farthest) if farthest is not None and found.all_repeat else ""
            if found.stops:
                self._stop(found, step, farthest, cause)
        if found.mean > found.bound * (WARN_FROM if found.decided else 1.0):
            self._warn(found, step, cause)
            self._ended = found.decided
        self._ended |= found.bound == inf
        if found.decided:
            self._sums = torch.zeros_like(self._sums)

    def _stop(self, found: _Compared, step: int, farthest: Farthest | None, cause: str) -> NoReturn:
        if self.bound.nats == inf:
            raise RunRefused("Trainer and sampler disagree on rollouts of the same weights: rank 0 says how.")
        token = "" if farthest is None else f"{self._first_token(farthest)} "
        raise RunRefused(
            f"{self._sentence(found, step)} {token}{_CAUSES[cause]} --accept-mismatch trains all the same."
        )

    def _warn(self, found: _Compared, step: int, cause: str) -> None:
        if self._warned or self.bound.nats == inf:  # or rank 0 does
            return
        self._warned = True
        few = "" if found.decided else " So few tokens do not stop a run."
        logger.warning("{}{} {} This is said once.", self._sentence(found, step), few, _CAUSES[cause])

    def _over_ranks(self, farthest: Farthest | None) -> _Compared:
        mine = self._sums.new_tensor([self.bound.nats, float(self.bound.stops), float(farthest is not None)])
        rows = self._gather(torch.cat([self._sums, mine])[None])
        apart, tokens = rows[:, :2].sum(0).tolist()
        bound, stops, _ = rows[0, 2:].tolist()
        mean, all_repeat = apart / max(1.0, tokens), bool(rows[:, 4].all())
        return _Compared(mean=mean, tokens=int(tokens), bound=bound, stops=bool(stops), all_repeat=all_repeat)

    def _sentence(self, found: _Compared, step: int) -> str:
        most = self.bound.nats if found.mean > self.bound.nats else WARN_FROM * self.bound.nats
        return (
            f"Trainer and sampler disagree on rollouts of the same weights: their log-probabilities are "
            f"{found.mean:.2g} nats apart, the mean of {found.tokens:,} tokens before optimizer step {step}, and at "
            f"most {most:g} are expected, {self.bound.basis}."
        )

    def _first_token(self, farthest: Farthest) -> str:
        apart = (farthest.log_pi - farthest.log_mu).abs().where(farthest.counted, 0.0)
        first = int((apart > min(self.bound.nats, apart.max().item() / 2)).int().argmax())
        token = int(farthest.inputs["completion_ids"][0, first])
        return (
            f"The first one in a completion is {self._text_of(token)!r} (id {token}), its token {first + 1}: "
            f"{farthest.log_pi[first].item():.3f} in the trainer, {farthest.log_mu[first].item():.3f} in the worker."
        )

    def _cause(self, farthest: Farthest) -> str:
        """The key of `_CAUSES`. Every rank makes the same passes: the model may be sharded."""
        passes = [self._repeat(farthest, training) for training in (False, True)]
        evaluated, trained = (None if each is None else _agrees(each, farthest) for each in passes)
        if evaluated is None:
            return ""
        if not evaluated:
            return "sampler"
        return "padding" if trained else "noise"


def _agrees(log_pi: Tensor, farthest: Farthest) -> bool:
    """Whether most of the distance is gone."""
    apart = (log_pi - farthest.log_mu).abs().clamp(max=FARTHEST)[farthest.counted]
    return apart.mean().item() < farthest.apart / 2


def alone(inputs: Mapping[str, Any], row: int) -> dict[str, Any]:
    """One row of the loss's inputs, [1, tokens] without padding; the inputs of images stay those of all rows."""
    cut = {name: inputs[name] for name in MODEL_INPUTS if name in inputs}
    cut |= {name: inputs[name][row : row + 1] for name in (SIZES, IDS) if name in inputs}
    for part in ("prompt", "completion"):
        there = inputs[f"{part}_mask"][row].bool()
        cut |= {f"{part}_{name}": inputs[f"{part}_{name}"][row][there][None] for name in ("ids", "mask")}
    return cut
