"""How much memory the weights and what belongs to them will take. Activations, and the cache of keys and values,
depend on lengths that are not known before, and are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from async_grpo.checks.plan.facts import TrainerFacts

_BLOCK = 256  # numbers that share one scale in 8-bit optimizers, which is four bytes

# Numbers that an optimizer keeps of each trained one: in the parameters' own type, in 4 bytes, in 1 byte (with scales).
_OWN = {
    "adamw_torch": 2,
    "adamw_torch_fused": 2,
    "adamw_torch_xla": 2,
    "adamw_torch_npu_fused": 2,
    "schedule_free_adamw": 2,
    "schedule_free_radam": 2,
    "schedule_free_sgd": 1,
    "grokadamw": 3,
    "stable_adamw": 2,
    "adagrad": 1,
    "rmsprop": 1,
    "sgd": 0,
    "lomo": 0,
}
_FOUR_BYTES = {
    "paged_adamw_32bit": 2,
    "ademamix": 3,
    "paged_ademamix_32bit": 3,
    "lion_32bit": 1,
    "paged_lion_32bit": 1,
    "rmsprop_bnb": 1,
    "rmsprop_bnb_32bit": 1,
}
_ONE_BYTE = {
    "adamw_bnb_8bit": 2,
    "adamw_8bit": 2,
    "paged_adamw_8bit": 2,
    "adamw_torch_8bit": 2,
    "ademamix_8bit": 3,
    "paged_ademamix_8bit": 3,
    "lion_8bit": 1,
    "paged_lion_8bit": 1,
    "rmsprop_bnb_8bit": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes."""

    weights: int  # with buffers
    reference: int
    gradients: int
    optimizer: int
    optimizer_note: str  # how it was counted
    published: int  # slots and what is frozen, once, for all readers
    worker_own: int  # of a worker that cannot map the server's memory, or has not yet

    @property
    def server(self) -> int:
        return self.weights + self.reference + self.gradients + self.optimizer + self.published


def estimate(facts: TrainerFacts) -> MemoryEstimate:
    """What the server holds, and what each worker holds beside it."""
    parameters = facts.parameters
    optimizer, note = optimizer_bytes(facts)
    weights = parameters.nbytes + parameters.buffer_bytes
    return MemoryEstimate(
        weights=weights,
        reference=facts.reference_bytes,
        gradients=parameters.trained_bytes,
        optimizer=optimizer,
        optimizer_note=note,
        published=facts.slots * parameters.trained_bytes + (parameters.nbytes - parameters.trained_bytes),
        worker_own=weights,
    )


def optimizer_bytes(facts: TrainerFacts) -> tuple[int, str]:
    """Bytes of the state of the optimizer that `args.optim` names, and how they were counted."""
    name, parameters = facts.optimizer, facts.parameters
    if name in _OWN:
        return _OWN[name] * parameters.trained_bytes, f"{name}: {_numbers(_OWN[name])}"
    if name in _FOUR_BYTES:
        return _FOUR_BYTES[name] * 4 * parameters.trained, f"{name}: {_numbers(_FOUR_BYTES[name])} in 4 bytes"
    if name in _ONE_BYTE:
        scales = 4 * parameters.trained // _BLOCK
        return _ONE_BYTE[name] * (parameters.trained + scales), f"{name}: {_numbers(_ONE_BYTE[name])} in 1 byte"
    if name == "adafactor":
        return 4 * parameters.factored, "adafactor: a row and a column of each matrix"
    return 2 * parameters.trained_bytes, f"{name}: not known here, counted as AdamW's two numbers a parameter"


def _numbers(count: int) -> str:
    return {0: "no state", 1: "one number a parameter"}.get(count, f"{count} numbers a parameter")
