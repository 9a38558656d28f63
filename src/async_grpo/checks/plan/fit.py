"""Which of it fits a GPU of a given size, by stated rules, and which one change helps most.

The rules count tensors of a dense decoder: what autograd keeps of each layer, the logits, and the keys and values of
generation. `scripts/memory_peaks.py` compares them with measured peaks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from async_grpo.checks.plan.facts import Shape, TrainerFacts
from async_grpo.checks.plan.memory import MemoryEstimate, estimate

USABLE = 0.85  # of a GPU; the rest is for CUDA, kernels and fragments
_LOGITS = 4  # copies in fp32 on a CPU, where TRL's log-probabilities take the logits of a whole batch at once
_TILE = 4096 * 32768 * 4  # bytes of TRL's kernel on a GPU, which never has more logits at a time
_HALF = 2  # bytes of a number in bf16 or fp16
_LORA_RANK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Bytes of one process of the trainer."""

    memory: MemoryEstimate
    shards: int  # processes that share weights, gradients and optimizer
    activations: int  # 0 where the model's shape is not known
    published: bool  # for workers, wherever

    @property
    def total(self) -> int:
        here = self.published and not self.memory.published_in_host_memory
        return self.memory.trainer // self.shards + (self.memory.published if here else 0) + self.activations


@dataclass(frozen=True, slots=True)
class Change:
    """One change of the setup, and the bytes that it saves in the trainer."""

    text: str
    saved: int


def need_of(facts: TrainerFacts, *, on_gpu: bool, published: bool = True) -> Need:
    activations = activation_bytes(facts, on_gpu=on_gpu) or 0
    return Need(memory=estimate(facts), shards=facts.sharded_over, activations=activations, published=published)


def sequence_tokens(facts: TrainerFacts) -> int:
    """Of the longest measured prompt with the longest completion."""
    return (facts.longest_prompt or 0) + (facts.max_completion_length or 0)


def kv_bytes_a_token(shape: Shape) -> int:
    """A key and a value for each layer and each head that has its own."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * shape.element_bytes


def activation_bytes(facts: TrainerFacts, *, on_gpu: bool) -> int | None:
    """Of one forward and backward pass; None where the model's shape is not known."""
    shape = facts.shape
    if shape is None:
        return None
    rows = facts.batch.per_device_train_batch_size
    element = _HALF if facts.precision != "fp32" else shape.element_bytes
    tokens, layer = rows * sequence_tokens(facts), layer_bytes_a_token(shape, element)
    logits = 4 * rows * (facts.max_completion_length or 0) * shape.vocabulary
    logits = min(logits, _TILE) if on_gpu else _LOGITS * logits
    if facts.gradient_checkpointing:  # the input of each layer; the logits are gone when a layer is computed again
        kept = tokens * shape.layers * shape.hidden * element + max(tokens * layer, logits)
    else:
        kept = tokens * shape.layers * layer + logits
    return kept + _autocast_copies(facts)


def layer_bytes_a_token(shape: Shape, element: int) -> int:
    """What autograd keeps of one layer with fused attention and a gated MLP.

    Two norms keep their input, the normalized input and their output (6 x hidden). Attention keeps queries and keys
    before, in and after a norm of their own and turned by their position, and values and its output (4 x queries,
    4 x keys); a model without these norms takes less. The MLP keeps the gate, its activation, the other branch and
    their product. Norms compute in fp32, so half-precision inputs are kept a second time.
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    elements = 6 * shape.hidden + 4 * queries + 4 * keys + 4 * shape.intermediate
    return element * elements + (8 * shape.hidden if element < 4 else 0)


def _autocast_copies(facts: TrainerFacts) -> int:
    """Bytes of the half-precision copies that autocast makes of weights in fp32."""
    wide = facts.parameters.dtypes.get("float32", 0)
    return wide // 2 if facts.precision != "fp32" else 0


def tokens_beside(rest: float, shape: Shape) -> int:
    """How many tokens' keys and values these bytes hold."""
    return max(0, int(rest // kv_bytes_a_token(shape)))


def best_change(facts: TrainerFacts, *, published: bool = True) -> Change | None:
    """The single change that saves the most memory of the trainer's GPU."""

    def total(of: TrainerFacts) -> int:
        return need_of(of, on_gpu=True, published=published).total

    changes = [Change(text, total(facts) - total(other)) for text, other in _changes(facts)]
    return max((change for change in changes if change.saved > 0), key=lambda change: change.saved, default=None)


def _changes(facts: TrainerFacts) -> Iterator[tuple[str, TrainerFacts]]:
    batch, parameters = facts.batch, facts.parameters
    if not facts.gradient_checkpointing:
        yield "gradient_checkpointing=True", replace(facts, gradient_checkpointing=True)
    if batch.per_device_train_batch_size > 1:
        rows = batch.per_device_train_batch_size
        passes = batch.gradient_accumulation_steps * rows
        one = replace(batch, per_device_train_batch_size=1)
        text = f"per_device_train_batch_size=1 with gradient_accumulation_steps={passes}"
        yield text, replace(facts, batch=one)
    if facts.optimizer.startswith("adamw_torch"):
        yield 'optim="adamw_8bit"', replace(facts, optimizer="adamw_8bit")
    if facts.reference_bytes:
        yield "beta=0, which needs no reference model", replace(facts, reference_bytes=0)
    if facts.sharded_over == 1:
        yield "FSDP2 over two GPUs (examples/accelerate/fsdp2.yaml)", replace(facts, sharded_over=2)
    if parameters.trained == parameters.count and facts.shape is not None:
        yield f"LoRA (r={_LORA_RANK}, all linear layers)", _with_lora(facts, facts.shape)


def _with_lora(facts: TrainerFacts, shape: Shape) -> TrainerFacts:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    widths = 2 * (shape.hidden + queries) + 2 * (shape.hidden + keys) + 3 * (shape.hidden + shape.intermediate)
    trained = shape.layers * _LORA_RANK * widths
    parameters = facts.parameters
    adapter = replace(
        parameters,
        count=parameters.count + trained,
        trained=trained,
        nbytes=parameters.nbytes + 4 * trained,
        trained_bytes=4 * trained,
    )
    return replace(facts, parameters=adapter, reference_bytes=0)


def fits(need: float, gpu_memory: int) -> bool:
    return need <= USABLE * gpu_memory
