"""How much memory the weights take, with their gradients, optimizer state and published versions.

Activations, and the cache of keys and values, depend on lengths that are not known before: they are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from async_grpo.checks.plan.facts import TrainerFacts

_BF16 = 2  # bytes of a number
_IN_8_BIT = 1 + 4 / 256  # bytes a number: 256 numbers share one scale of four bytes

# Bytes of optimizer state for each trained number, in words; the common ones. None: two numbers of its own type.
_OPTIMIZERS: dict[str, tuple[float | None, str]] = {
    "adamw_torch": (None, "2 numbers a parameter"),
    "adamw_torch_fused": (None, "2 numbers a parameter"),
    "paged_adamw_32bit": (8, "2 numbers a parameter in 4 bytes"),
    "adamw_bnb_8bit": (2 * _IN_8_BIT, "2 numbers a parameter in 1 byte"),
    "adamw_8bit": (2 * _IN_8_BIT, "2 numbers a parameter in 1 byte"),
    "paged_adamw_8bit": (2 * _IN_8_BIT, "2 numbers a parameter in 1 byte"),
    "adafactor": (0, "a row and a column of each matrix, not counted"),
    "sgd": (0, "no state"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes."""

    weights: int  # with buffers
    reference: int
    gradients: int
    optimizer: int
    optimizer_note: str  # how it was counted
    published: int  # for all readers, beyond what the model itself uses of it
    published_in_host_memory: bool  # though the model is on a GPU
    worker_own: int  # of a worker that cannot map the server's memory, or has not yet

    @property
    def server(self) -> int:
        """On its device."""
        return self.trainer + (0 if self.published_in_host_memory else self.published)

    @property
    def trainer(self) -> int:
        return self.weights + self.reference + self.gradients + self.optimizer


def estimate(facts: TrainerFacts) -> MemoryEstimate:
    """What the server holds, and what each worker holds in addition."""
    parameters = facts.parameters
    optimizer, note = _optimizer(facts)
    weights = parameters.nbytes + parameters.buffer_bytes
    return MemoryEstimate(
        weights=weights,
        reference=facts.reference_bytes,
        gradients=parameters.trained_bytes,
        optimizer=optimizer,
        optimizer_note=f"{facts.optimizer}: {note}",
        published=facts.slots * version_bytes(facts) + _frozen_copy(facts),
        published_in_host_memory=facts.published_in_host_memory,
        worker_own=weights,
    )


def version_bytes(facts: TrainerFacts) -> int:
    """Of one published version: what trains."""
    parameters = facts.parameters
    return _BF16 * parameters.trained if facts.published_in_bf16 else parameters.trained_bytes


def frozen_bytes(facts: TrainerFacts) -> int:
    """Of what does not train, as it is published. Quantised weights have fewer bytes than in bf16, and keep them."""
    parameters = facts.parameters
    held = parameters.nbytes - parameters.trained_bytes
    return min(held, _BF16 * (parameters.count - parameters.trained)) if facts.published_in_bf16 else held


def _frozen_copy(facts: TrainerFacts) -> int:
    """0 where the model itself uses what is published: on one device, in one type, and not sharded."""
    parameters, published = facts.parameters, frozen_bytes(facts)
    same = published == parameters.nbytes - parameters.trained_bytes
    return 0 if same and facts.sharded_over == 1 and not facts.published_in_host_memory else published


def _optimizer(facts: TrainerFacts) -> tuple[int, str]:
    """Bytes of its state, and how they were counted."""
    unknown = (None, "not known here, counted as AdamW's two numbers a parameter")
    each, note = _OPTIMIZERS.get(facts.optimizer, unknown)
    parameters = facts.parameters
    return 2 * parameters.trained_bytes if each is None else int(each * parameters.trained), note
