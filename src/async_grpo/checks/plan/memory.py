"""How much memory a run takes, and what of it fits a GPU of a given size, by stated rules.

The rules count what is held (weights, gradients, optimizer state, published versions) and the tensors of a dense
decoder: what autograd keeps of each layer, the logits, and the keys and values of generation. The doctor and the dry
run have all their numbers from here. `scripts/memory_peaks.py` compares them with measured peaks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from async_grpo.checks.plan.trainer_facts import Parameters, Shape, TrainerFacts
from async_grpo.engines.fixed_sizes import LEAST_ROWS, LEAST_TOKENS, rounded
from async_grpo.formatting import counted, size

USABLE = 0.85  # of a GPU; the rest is for CUDA, kernels and fragments
_LOGITS = 4  # copies in fp32 on a CPU, where TRL's log-probabilities take the logits of a whole batch at once
_TILE = 4096 * 32768 * 4  # bytes of TRL's kernel on a GPU, which never has more logits at a time
_HALF = 2  # bytes of a number in bf16 or fp16
_LORA_RANK = 16
_CRITIC = 4 * 4  # bytes a number: weight, gradient and AdamW's two, in fp32

_IN_8_BIT = 2 * (1 + 4 / 256)  # 256 numbers share one scale of four bytes
_OPTIMIZERS = {
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"), _IN_8_BIT),
    "paged_adamw_32bit": 8,
    "adafactor": 0,  # a row and a column of each matrix are not counted
    "sgd": 0,
}
"""Bytes of state for each trained number. Of all others: two numbers of the parameter's own type, as AdamW has."""


# --- what is held


def trainer_parts(facts: TrainerFacts) -> dict[str, int]:
    """Bytes of the trainer by what they are, before activations."""
    parameters = facts.parameters
    return {
        "weights": weight_bytes(parameters),
        "reference model": facts.reference_bytes,
        "gradients": parameters.trained_bytes,
        "gradients of each task": facts.gradients_besides * parameters.trained_bytes,
        "optimizer": optimizer_bytes(parameters, facts.optimizer),
        "critic with its optimizer": _CRITIC * facts.trained_besides,
    }


def trainer_bytes(facts: TrainerFacts) -> int:
    return sum(trainer_parts(facts).values())


def server_bytes(facts: TrainerFacts) -> int:
    """Bytes on the server's device, before activations."""
    return trainer_bytes(facts) + (0 if facts.published_in_host_memory else published_bytes(facts))


def weight_bytes(parameters: Parameters) -> int:
    """Bytes of the weights with their buffers. A worker that cannot map the server's, or has not yet, has as many."""
    return parameters.nbytes + parameters.buffer_bytes


def optimizer_bytes(parameters: Parameters, optimizer: str) -> int:
    each = _OPTIMIZERS.get(optimizer)
    return 2 * parameters.trained_bytes if each is None else int(each * parameters.trained)


def trained_bytes(parameters: Parameters, optimizer: str) -> int:
    """Bytes of a model that is trained: weights with buffers, gradients, and the optimizer's state."""
    return weight_bytes(parameters) + parameters.trained_bytes + optimizer_bytes(parameters, optimizer)


def published_bytes(facts: TrainerFacts) -> int:
    """Bytes of all published versions, beyond what the model itself uses of them."""
    return facts.slots * version_bytes(facts) + (frozen_bytes(facts) if copies_frozen(facts) else 0)


def version_bytes(facts: TrainerFacts) -> int:
    """Bytes of one published version: what trains."""
    parameters = facts.parameters
    return _HALF * parameters.trained if facts.published_in_bf16 else parameters.trained_bytes


def frozen_bytes(facts: TrainerFacts) -> int:
    """Bytes of what does not train, as published. Quantised weights have fewer than in bf16, and keep them."""
    parameters = facts.parameters
    held = parameters.nbytes - parameters.trained_bytes
    return min(held, _HALF * (parameters.count - parameters.trained)) if facts.published_in_bf16 else held


def copies_frozen(facts: TrainerFacts) -> bool:
    """Whether the frozen part is held twice. The model uses it as published on one device, in one type, unsharded."""
    same = frozen_bytes(facts) == facts.parameters.nbytes - facts.parameters.trained_bytes
    return not same or facts.sharded_over > 1 or facts.published_in_host_memory


def need_of(facts: TrainerFacts, *, on_gpu: bool, published: bool = True) -> int:
    """Bytes of one process of the trainer, with activations where the model's shape is known."""
    here = published and not facts.published_in_host_memory
    activations = activation_bytes(facts, on_gpu=on_gpu) or 0
    return trainer_bytes(facts) // facts.sharded_over + (published_bytes(facts) if here else 0) + activations


# --- what a pass and a token take


def sequence_tokens(facts: TrainerFacts) -> int:
    """Tokens of the longest measured prompt with the longest completion."""
    return (facts.longest_prompt or 0) + (facts.max_completion_length or 0)


def kv_bytes_a_token(shape: Shape) -> int:
    """A key and a value for each layer and each head that has its own."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * shape.element_bytes


def tokens_beside(rest: float, shape: Shape) -> int:
    """How many tokens' keys and values these bytes hold."""
    return max(0, int(rest // kv_bytes_a_token(shape)))


def activation_bytes(facts: TrainerFacts, *, on_gpu: bool) -> int | None:
    """Bytes of one forward and backward pass; None where the model's shape is not known."""
    if facts.shape is None:
        return None
    batch = facts.batch
    rows = batch.per_device_train_batch_size * (facts.train_of_group or batch.num_generations) // batch.num_generations
    logits = 4 * rows * (facts.max_completion_length or 0) * facts.shape.vocabulary
    kept = pass_bytes(
        facts.shape,
        rows * sequence_tokens(facts),
        min(logits, _TILE) if on_gpu else _LOGITS * logits,
        half=facts.precision != "fp32",
        checkpointed=facts.gradient_checkpointing,
    )
    return kept + (facts.parameters.dtypes.get("float32", 0) // 2 if facts.precision != "fp32" else 0)  # autocast's


def pass_bytes(shape: Shape, tokens: int, logits: int, *, half: bool, checkpointed: bool) -> int:
    """Bytes that one forward and backward pass keeps.

    Args:
        tokens: of all rows.
        logits: bytes of those that are there at a time.
        half: it computes in half precision.
        checkpointed: layers are computed again.
    """
    element = _HALF if half else shape.element_bytes
    layer = layer_bytes_a_token(shape, element)
    if checkpointed:  # the input of each layer; the logits are gone when a layer is computed again
        return tokens * shape.layers * shape.hidden * element + max(tokens * layer, logits)
    return tokens * shape.layers * layer + logits


def layer_bytes_a_token(shape: Shape, element: int) -> int:
    """Bytes that autograd keeps of one layer with fused attention and a gated MLP.

    Two norms keep their input, the normalized input and their output (6 x hidden). Attention keeps queries and keys
    before, in and after a norm of their own and turned by their position, and values and its output (4 x queries,
    4 x keys); a model without these norms takes less. The MLP keeps the gate, its activation, the other branch and
    their product. Norms compute in fp32, so half-precision inputs are kept a second time.
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    elements = 6 * shape.hidden + 4 * queries + 4 * keys + 4 * shape.intermediate
    return element * elements + (8 * shape.hidden if element < 4 else 0)


def size_rows(facts: TrainerFacts, *, on_gpu: bool) -> Iterator[tuple[str, str]]:
    """Activations and the bytes of a token in words, for a model whose shape is known."""
    activations = activation_bytes(facts, on_gpu=on_gpu)
    if activations is None or facts.shape is None:
        return
    tokens, kv = sequence_tokens(facts), kv_bytes_a_token(facts.shape)
    way = "with" if facts.gradient_checkpointing else "without"
    rows = counted(facts.batch.per_device_train_batch_size, "sequence")
    yield "activations", f"at most {size(activations)} for {rows} of {tokens:,} tokens, {way} gradient checkpointing"
    yield "keys, values", f"{size(kv)} a token in generation, {size(kv * tokens)} a sequence"


# --- what fits one GPU


class Fit(NamedTuple):
    """An answer for one GPU."""

    subject: str
    text: str
    fits: bool


class Change(NamedTuple):
    """One change of the setup, and the bytes that it saves."""

    text: str
    saved: int


def fit_rows(
    facts: TrainerFacts, gpu_memory: int, *, sharing: int = 0, own_weights: int = 0, elsewhere: int = 0
) -> Iterator[tuple[str, str]]:
    """Say in words what GPUs of this memory hold.

    Args:
        sharing: workers on the trainer's GPU that read its weights in place.
        own_weights: workers on the trainer's GPU that do not, as those with vLLM.
        elsewhere: most workers on one other GPU.
    """
    published = bool(sharing or own_weights or elsewhere)
    answers = [trainer_fit(facts, gpu_memory, published=published)]
    if elsewhere:
        answers.append(worker_fit(facts, gpu_memory, workers=elsewhere))
    left = USABLE * gpu_memory - need_of(facts, on_gpu=True)
    if own_weights:
        answers.append(worker_fit(facts, gpu_memory, workers=own_weights, at_most=left))
    if sharing:
        answers.append(_generation(facts, left, f"what the trainer leaves of {USABLE:g} of {size(gpu_memory)}"))
    yield from (answer[:2] for answer in answers)
    change = best_change(facts, published=published)
    if change is not None:
        yield "helps most", f"{change.text}: {size(change.saved)} less for the trainer"
    if elsewhere and (more := more_for_workers(facts, gpu_memory)):
        yield "", more


def trainer_fit(facts: TrainerFacts, gpu_memory: int, *, published: bool = True) -> Fit:
    need = need_of(facts, on_gpu=True, published=published)
    fits = need <= USABLE * gpu_memory
    unknown = "" if facts.shape else ", without activations: the model is no dense decoder"
    shared = f", sharded over {facts.sharded_over} processes" if facts.sharded_over > 1 else ""
    answer = f"{'fits' if fits else 'does NOT fit'} {USABLE:g} of {size(gpu_memory)}"
    return Fit("trainer fits", f"{size(need)} {answer}{shared}{unknown}", fits)


def worker_fit(facts: TrainerFacts, gpu_memory: int, *, workers: int = 1, at_most: float | None = None) -> Fit:
    """The answer for a GPU without the trainer, or with it: then it leaves `at_most` bytes for these workers."""
    share = USABLE if facts.vllm_share is None else facts.vllm_share
    setting = "" if facts.vllm_share is None else "vllm_gpu_memory_utilization="
    memory, named = share * gpu_memory, f"{setting}{share:g} of {size(gpu_memory)}"
    if at_most is not None and at_most < memory:
        memory, named = at_most, f"what the trainer leaves of {USABLE:g} of {size(gpu_memory)}"
    return _generation(facts, memory - workers * weight_bytes(facts.parameters), named)


def _generation(facts: TrainerFacts, rest: float, beside: str) -> Fit:
    if rest <= 0:
        return Fit("workers fit", f"the weights alone do NOT fit {beside}", False)
    if facts.shape is None:
        return Fit("workers fit", f"{size(rest)} for keys and values beside {beside}", True)
    tokens, sequence = tokens_beside(rest, facts.shape), max(1, sequence_tokens(facts))
    capacity = f"{tokens:,} tokens of keys and values beside the weights, in {beside}"
    rows = _at_a_time(facts, tokens)
    if rows == 0:
        return Fit("workers fit", f"{capacity}: a sequence of {sequence:,} tokens does NOT fit", False)
    return Fit("workers fit", f"{capacity}: {rows:,} of {sequence:,} at a time", True)


def _at_a_time(facts: TrainerFacts, tokens: int) -> int:
    """How many of the longest sequences share so many tokens. `--generator hf` decodes in buffers of a few sizes."""
    sequence = max(1, sequence_tokens(facts))
    if facts.vllm_share is not None:
        return tokens // sequence
    most = tokens // (rounded(sequence, LEAST_TOKENS) + (facts.longest_prompt or 0))  # prompts are there twice
    return most - most % max(min(LEAST_ROWS, most), 1 << max(0, most.bit_length() - 3))


def more_for_workers(facts: TrainerFacts, gpu_memory: int) -> str:
    """What gives keys and values more memory, in words; empty where nothing short of another model does."""
    if facts.vllm_share is None or facts.vllm_share >= USABLE:
        return ""
    more = size(int((USABLE - facts.vllm_share) * gpu_memory))
    return (
        f"vllm_gpu_memory_utilization={USABLE:g} where the trainer is on another GPU: {more} more for keys and values"
    )


def best_change(facts: TrainerFacts, *, published: bool = True) -> Change | None:
    """The single change that saves the most memory of the trainer's GPU."""
    now = need_of(facts, on_gpu=True, published=published)
    changes = [Change(text, now - need_of(it, on_gpu=True, published=published)) for text, it in _changes(facts)]
    return max((change for change in changes if change.saved > 0), key=lambda change: change.saved, default=None)


def _changes(facts: TrainerFacts) -> Iterator[tuple[str, TrainerFacts]]:
    batch, parameters = facts.batch, facts.parameters
    rows = batch.per_device_train_batch_size
    if not facts.gradient_checkpointing:
        yield "gradient_checkpointing=True", replace(facts, gradient_checkpointing=True)
    if rows > 1:
        text = "per_device_train_batch_size=1 with gradient_accumulation_steps="
        one = replace(batch, per_device_train_batch_size=1)
        yield f"{text}{batch.gradient_accumulation_steps * rows}", replace(facts, batch=one)
    if facts.optimizer.startswith("adamw_torch"):
        yield 'optim="adamw_8bit"', replace(facts, optimizer="adamw_8bit")
    if facts.reference_bytes:
        yield "beta=0, which needs no reference model", replace(facts, reference_bytes=0)
    twice = replace(facts, sharded_over=2 * facts.sharded_over)
    more = f"{twice.sharded_over} GPUs instead of {facts.sharded_over}"
    yield f"FSDP2 over {more if facts.sharded_over > 1 else 'two GPUs (examples/accelerate/fsdp2.yaml)'}", twice
    if parameters.trained == parameters.count and facts.shape is not None:
        yield f"LoRA (r={_LORA_RANK}, all linear layers)", _with_lora(facts, facts.shape)


def _with_lora(facts: TrainerFacts, shape: Shape) -> TrainerFacts:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    widths = 2 * (shape.hidden + queries) + 2 * (shape.hidden + keys) + 3 * (shape.hidden + shape.intermediate)
    trained, parameters = shape.layers * _LORA_RANK * widths, facts.parameters
    count, nbytes = parameters.count + trained, parameters.nbytes + 4 * trained
    adapter = replace(parameters, count=count, trained=trained, nbytes=nbytes, trained_bytes=4 * trained)
    return replace(facts, parameters=adapter, reference_bytes=0)
