"""How a correction reaches TRL's loss: on the generation batch, by the hooks around the loss, and on its inputs.

TRL's loss multiplies each token by `importance_sampling_ratio`, as it does with use_vllm=True. With one optimizer step
a batch, pi_old is pi: then the weights wait for the log-probabilities that the loss computes anyway, and cost no
forward pass. With several, TRL computes pi_old for its own ratio, and the weights use that.

A loss that is not TRL's (Unsloth's, or one of the user's) gets the weights in its advantages: they are not negative,
so min(r w A, clip(r) w A) = w min(r A, clip(r) A). That needs pi_old in advance.

The private names of TRL that it touches are in the table of `tests/integration/trl_hooks.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from async_grpo.errors import UnsupportedError
from async_grpo.images import MODEL_INPUTS
from async_grpo.setup.algorithm import Algorithm, declares
from async_grpo.setup.overrides import overridden
from async_grpo.setup.replaced import adapter, bare, classes_of_trl, patched_in, users_class
from async_grpo.setup.sampling import WITHOUT_SAMPLER
from async_grpo.setup.trl_compat import log_probs_by
from async_grpo.training.corrections.fresh_batch import Bound, Farthest, FreshBatch
from async_grpo.training.corrections.kept_log_probs import IDS, SIZES, OverKeptTokens, Row, Sets, columns
from async_grpo.training.corrections.metrics import (
    CLIPPING_LOSSES,
    Append,
    Clip,
    EffectiveShare,
    report_clipped,
    report_ratio,
    report_weights,
)
from async_grpo.training.corrections.rule import TOKEN, Rule
from async_grpo.training.corrections.weights import limited, loss_mask, ratios
from async_grpo.training.padding import Unpadded

if TYPE_CHECKING:
    from trl import GRPOTrainer

LogProbs = Callable[[dict[str, Any]], Tensor]  # the loss's inputs -> log pi_old, [B, C]


@adapter
class CorrectedLoss(Unpadded):
    """Put before the user's trainer class: TRL's loss, with the weights of `correct`, over the kept tokens."""

    correct: Correction
    _log_pi: torch.Tensor | None = None  # [B, C], of the loss that TRL computes, once its forward pass is done
    _in_loss: dict[str, Any] | None = None  # inputs of that loss, until then
    _unused_old_logps: bool = False  # TRL is about to compute old log-probabilities that the correction replaces
    _kept: dict[str, torch.Tensor] | None = None  # of the batch that TRL assembles, or computes the loss of

    def begin_batch(self, kept: Sequence[Row] | None) -> None:
        """TRL is about to assemble a generation batch, of which `kept` are the sets of kept tokens."""
        if kept is not None and self.correct.rule.name not in WITHOUT_SAMPLER:
            if self.correct.own_loss:
                raise _computes_otherwise(self)
            self._kept = columns(kept, max(len(sizes) for sizes, _ in kept), self.accelerator.device)
        bypass = self.correct.rule.name == "bypass" and not self.correct.own_loss
        self._unused_old_logps = bypass and not self.correct.keeps_old and not one_update(self)

    def tokens_are_there(self) -> None:
        """From here to `end_batch`, TRL does with the tokens what it does with those of vLLM, if that was asked for."""
        self.use_vllm = self.correct.rule.name == "trl"

    def kept_columns(self) -> dict[str, torch.Tensor]:
        """What the loss needs to know of kept tokens, as entries of the batch that was begun."""
        return self._kept or {}

    def stays_whole(self) -> bool:
        return self._kept is not None  # kept tokens are told apart by their position in the batch

    def end_batch(self) -> None:
        """TRL has assembled the batch, or has failed to."""
        self.use_vllm = self._unused_old_logps = False
        self._kept = None

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        if "policy_version" not in inputs:  # evaluation
            return super()._compute_loss(model, inputs)
        with _weighing(self, inputs):
            loss = super()._compute_loss(model, inputs)
        if self._log_pi is not None:
            self.correct.after_loss(inputs, self._log_pi, self.state.global_step)
        elif "importance_sampling_ratio" in inputs and self.correct.rule.weighs:
            raise UnsupportedError(
                f"--correction {self.correct.rule.name} needs the log-probabilities of the loss to weigh it, and the "
                f"loss of {users_class(self)} does not compute them by _get_per_token_logps_and_entropies. Call that "
                "method in it, or take --correction bypass."
            )
        elif SIZES in inputs:
            raise _computes_otherwise(self)
        elif self.correct.fresh is not None and self.correct.fresh.waits:
            with _drawing_nothing(self):
                log_pi = self.correct.log_pi_old(inputs)
            self.correct.fresh.saw(inputs, log_pi, self.state.global_step)
        return loss

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> Any:
        if self._unused_old_logps:
            self._unused_old_logps = False
            return input_ids.new_zeros(len(input_ids), logits_to_keep, dtype=torch.float32), None, None
        with _over_kept_tokens(self, attention_mask, logits_to_keep) as over_kept:
            result = super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
            )
        # Unsloth's first question gets no answer, and what has no gradient is of another model: a teacher's, perhaps.
        if self._in_loss is not None and result[0] is not None and result[0].requires_grad:
            if self._kept is not None and not over_kept:
                raise _computes_otherwise(self)
            inputs, self._in_loss, self._log_pi = self._in_loss, None, result[0].detach()
            self.correct.in_loss(inputs, self._log_pi)
        return result


@contextmanager
def _over_kept_tokens(trainer: Any, attention_mask: torch.Tensor | None, logits_to_keep: int) -> Iterator[bool]:
    """While TRL computes log-probabilities of the batch: over the tokens that were kept; yields whether it does.

    A call without a mask, or of other rows, is none of TRL's: Unsloth's loss makes one, and gets no answer.
    """
    kept = trainer._kept
    if kept is None or attention_mask is None or len(kept[SIZES]) != len(attention_mask):
        yield False
        return
    over = OverKeptTokens(Sets.of_batch(kept, attention_mask[:, -logits_to_keep:].bool()))
    with log_probs_by(over.instead_of):
        yield True
    if over.left:
        raise _computes_otherwise(trainer)


def _computes_otherwise(trainer: Any) -> UnsupportedError:
    return UnsupportedError(
        f"{users_class(trainer)} does not compute its log-probabilities by TRL's code, so they cannot be taken over "
        "the tokens that top_p, top_k or min_p kept, and their ratios to vLLM's would be wrong. Set top_p=1, top_k=0 "
        "and min_p=None in the GRPOConfig, or take --generator hf, whose log-probabilities are of the full softmax."
    )


@contextmanager
def _weighing(trainer: Any, inputs: dict[str, Any]) -> Iterator[None]:
    """While TRL computes a loss: it multiplies by `importance_sampling_ratio`, if there is one, as with use_vllm."""
    saved = (trainer.use_vllm, trainer.vllm_importance_sampling_correction)
    trainer._in_loss, trainer._log_pi = inputs, None
    trainer._kept = {name: inputs[name] for name in (SIZES, IDS)} if SIZES in inputs else None
    if "importance_sampling_ratio" in inputs:
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    try:
        yield
    finally:
        trainer._in_loss = trainer._kept = None
        trainer.use_vllm, trainer.vllm_importance_sampling_correction = saved


def correction_of(trainer: GRPOTrainer, rule: Rule, append: Append, fresh: Bound | None = None) -> Correction:
    """What sets `rule` on this trainer's batches. Call it before the class of the trainer is changed.

    Args:
        fresh: how far trainer and sampler may be apart on fresh rollouts; None: nobody looks.
    """
    share = EffectiveShare(trainer.accelerator.gather, append)
    trainer.add_callback(share)
    return Correction(
        rule=rule,
        own_loss=has_own_loss(trainer),
        clip=_clip(trainer),
        log_pi_old=partial(log_pi_old, trainer),
        append=append,
        token_columns=trainer.token_columns if isinstance(trainer, Algorithm) else (),
        keeps_old="_generate_and_score_completions" in overridden(trainer),
        share=share,
        fresh=None if fresh is None else _fresh_batch(trainer, fresh),
    )


def _fresh_batch(trainer: Any, bound: Bound) -> FreshBatch:
    guard = FreshBatch(
        bound,
        lambda own: trainer.accelerator.gather(own.to(trainer.accelerator.device)),
        partial(_log_pi_alone, trainer),
        lambda token: str(trainer._tokenizer.decode([token])),
    )
    trainer.add_callback(guard)
    return guard


def _log_pi_alone(trainer: Any, farthest: Farthest, training: bool) -> torch.Tensor | None:
    """Log-probabilities of a completion without neighbours and padding, [tokens]; None where its prompt has images."""
    if farthest.inputs.keys() & set(MODEL_INPUTS):
        return None
    modes = [(module, module.training) for module in trainer.model.modules()]
    trainer.model.train(training)
    trainer._kept = {name: farthest.inputs[name] for name in (SIZES, IDS)} if SIZES in farthest.inputs else None
    try:
        with _drawing_nothing(trainer):
            return log_pi_old(trainer, farthest.inputs)[0]
    finally:
        trainer._kept = None
        for module, mode in modes:
            module.training = mode


def _drawing_nothing(trainer: Any) -> AbstractContextManager[None]:
    """Random numbers that a pass draws here, for dropout, are drawn again behind it: a replay makes no such pass."""
    device = trainer.accelerator.device
    return torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type=device.type)


def one_update(trainer: Any) -> bool:
    """Whether all passes over a generation batch end in one optimizer step, so that pi_old is pi."""
    passes = trainer.args.steps_per_generation * trainer.num_iterations
    return int(trainer.args.gradient_accumulation_steps) % int(passes) == 0


def has_own_loss(trainer: GRPOTrainer) -> bool:
    """Return whether the loss is not TRL's: it neither calls TRL's nor reads the weights as TRL's does.

    A class that declares its `Algorithm` may say so. The code of every other class decides, whoever wrote it.
    """
    return any(map(_has_own_loss, (trainer, *type(trainer).__mro__)))


def _has_own_loss(owner: Any) -> bool:
    """Return whether this object, or this one of its classes, puts another loss in the place of TRL's."""
    if isinstance(owner, type) and declares(owner) and owner.own_loss is not None:
        return owner.own_loss
    of_trl = isinstance(owner, type) and (owner.__module__.startswith("trl.") or owner in classes_of_trl())
    before_trls = (vars(owner).keys() if not of_trl else patched_in(owner).keys()) & {"compute_loss", "_compute_loss"}
    return any(_is_own(name, vars(owner)[name]) for name in before_trls)


def _is_own(name: str, loss: Any) -> bool:
    of_trl = [inspect.unwrap(vars_of[name]) for vars_of in classes_of_trl().values() if name in vars_of]
    function = inspect.unwrap(bare(loss))
    code = getattr(function, "__code__", None)
    if code is None or function in of_trl or name in code.co_names or "importance_sampling_ratio" in code.co_consts:
        return False
    names = inspect.getclosurevars(function)
    return not any(inspect.unwrap(bare(it)) in of_trl for it in (*names.nonlocals.values(), *names.globals.values()))


def takes_weights(trainer: Any) -> bool:
    """Whether the loss of this class of TRL's multiplies by the weights; that of `GMPOTrainer` does not."""
    losses = [vars(base)["_compute_loss"] for base in type(trainer).__mro__ if "_compute_loss" in vars(base)]
    of_trl = [inspect.unwrap(loss) for loss in losses if loss.__module__.startswith("trl.")]
    return not of_trl or "importance_sampling_ratio" in of_trl[0].__code__.co_consts


def _clip(trainer: Any) -> Clip | None:
    if trainer.loss_type not in CLIPPING_LOSSES:
        return None
    sequences = trainer.importance_sampling_level == "sequence"
    return Clip(1 - trainer.epsilon_low, 1 + trainer.epsilon_high, sequences)


def log_pi_old(trainer: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Log-probabilities of the completions' tokens under the weights as they are now, [B, C], without gradient."""
    input_ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    attention_mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    with torch.no_grad():
        logprobs, *_ = trainer._get_per_token_logps_and_entropies(
            trainer.model,
            input_ids,
            attention_mask,
            batch["completion_ids"].shape[1],
            batch_size=trainer.args.per_device_train_batch_size,
            **{name: batch[name] for name in MODEL_INPUTS if name in batch},
        )
    return logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Sets the correction `rule` on what a trainer trains on.

    Args:
        own_loss: the loss is not TRL's, and is weighed by its advantages.
        clip: how TRL's loss clips ratios; None where it does not.
        log_pi_old: one forward pass without gradient over the batch, for `own_loss` only.
        append: adds a value to the training metrics.
        token_columns: names of further tensors of the batch, each [B, C].
        keeps_old: the user's class sees the batch before it is corrected, and may read what TRL has computed.
        fresh: judges whether trainer and sampler agree.
    """

    rule: Rule
    own_loss: bool
    clip: Clip | None
    log_pi_old: LogProbs
    append: Append
    token_columns: tuple[str, ...] = ()
    keeps_old: bool = False
    share: EffectiveShare | None = None
    fresh: FreshBatch | None = None

    def __call__(self, batch: dict[str, Any]) -> None:
        """Correct a generation batch. `batch["sampling_per_token_logps"]` is log mu, [B, C]."""
        check_shapes(batch, self.token_columns)
        if self.rule.name == "bypass":
            counted = loss_mask(batch)  # for other tokens a rollout_func may say anything; 0 keeps the ratio finite
            batch["old_per_token_logps"] = batch["sampling_per_token_logps"].where(counted, 0.0)
        elif self.rule.weighs and self.own_loss:
            self._weigh_advantages(batch)
        elif self.rule.weighs:
            weights = torch.ones_like(batch["sampling_per_token_logps"])
            batch["importance_sampling_ratio"] = weights if self.rule.level == TOKEN else weights[:, :1].clone()

    def in_loss(self, inputs: dict[str, Any], log_pi: Tensor) -> None:
        """Fill in the weights of a micro-batch, once its forward pass has given log pi, [B, C], without gradient."""
        if self.rule.weighs and "importance_sampling_ratio" in inputs:
            old = inputs.get("old_per_token_logps", log_pi)
            inputs["importance_sampling_ratio"].copy_(self._weights(inputs, old))

    def after_loss(self, inputs: dict[str, Any], log_pi: Tensor, version: int) -> None:
        """Metrics of a micro-batch that was trained on. `log_pi` is of the trainer's `version`."""
        report_ratio(inputs, log_pi, version, self.append)
        if self.fresh is not None:
            self.fresh.saw(inputs, log_pi, version)
        if self.share is not None:
            self.share.saw(inputs, log_pi)
        if self.clip is not None:
            report_clipped(inputs, log_pi, self.clip, self.append)

    def _weigh_advantages(self, batch: dict[str, Any]) -> None:
        old = batch.get("old_per_token_logps")
        batch["old_per_token_logps"] = self.log_pi_old(batch) if old is None else old
        advantages: Tensor = batch["advantages"]
        per_token = advantages[:, None] if advantages.dim() == 1 else advantages
        batch["advantages"] = per_token * self._weights(batch, batch["old_per_token_logps"])

    def _weights(self, batch: dict[str, Any], log_pi_old: Tensor) -> Tensor:
        mask = loss_mask(batch)
        ratio = ratios(log_pi_old, batch["sampling_per_token_logps"], mask, self.rule.level)
        weights = limited(ratio, self.rule)
        report_weights(batch, ratio.expand_as(mask), weights.expand_as(mask), self.append)
        return weights


def check_shapes(batch: dict[str, Any], token_columns: Sequence[str] = ()) -> None:
    """Raise `UnsupportedError` for advantages or columns of tokens that are not there, or spread over the wrong axis.

    TRL's loss takes advantages of shape [B] or [B, C], of B completions with C tokens.
    """
    rows, tokens = batch["completion_ids"].shape
    per_token = ((rows, tokens),)
    allowed = {
        "advantages": ((rows,), (rows, 1), (rows, tokens)),
        **dict.fromkeys(("sampling_per_token_logps", *token_columns), per_token),
    }
    for name, shapes in allowed.items():
        if name not in batch:
            raise UnsupportedError(
                f"The trainer gave no `{name}`. Return from _generate_and_score_completions all that TRL's returns."
            )
        found = tuple(batch[name].shape)
        if found not in shapes:
            raise UnsupportedError(
                f"The trainer gave `{name}` of shape {list(found)} for {rows} completions of {tokens} tokens; "
                f"the loss takes {' or '.join(str(list(shape)) for shape in shapes)}. Correct what "
                "_generate_and_score_completions returns."
            )
