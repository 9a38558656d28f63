"""What fits a GPU, in words: the rows of a dry run and the lines of the doctor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from async_grpo.checks.plan.facts import TrainerFacts
from async_grpo.checks.plan.fit import (
    USABLE,
    Change,
    activation_bytes,
    best_change,
    fits,
    kv_bytes_a_token,
    need_of,
    sequence_tokens,
    tokens_beside,
)
from async_grpo.checks.plan.memory import estimate
from async_grpo.formatting import counted, size


class Fit(NamedTuple):
    """An answer for one GPU."""

    subject: str
    text: str
    fits: bool


def size_rows(facts: TrainerFacts, *, on_gpu: bool) -> Iterator[tuple[str, str]]:
    """Activations and the bytes of a token, for a model whose shape is known."""
    activations = activation_bytes(facts, on_gpu=on_gpu)
    if activations is None or facts.shape is None:
        return
    tokens, kv = sequence_tokens(facts), kv_bytes_a_token(facts.shape)
    way = "with" if facts.gradient_checkpointing else "without"
    rows = counted(facts.batch.per_device_train_batch_size, "sequence")
    yield "activations", f"{size(activations)} in a pass over {rows} of {tokens:,} tokens, {way} gradient checkpointing"
    yield "keys, values", f"{size(kv)} a token in generation, {size(kv * tokens)} a sequence"


def fit_rows(facts: TrainerFacts, gpu_memory: int, *, sharing: int, elsewhere: int) -> Iterator[tuple[str, str]]:
    """What GPUs of this memory hold.

    Args:
        sharing: workers on the trainer's GPU.
        elsewhere: most workers on one other GPU.
    """
    answers = [trainer_fit(facts, gpu_memory, published=bool(sharing or elsewhere))]
    if elsewhere:
        answers.append(worker_fit(facts, gpu_memory, workers=elsewhere))
    if sharing:
        answers.append(shared_fit(facts, gpu_memory))
    for answer in answers:
        yield answer.subject, answer.text
    change = best_change(facts, published=bool(sharing or elsewhere))
    if change is not None:
        yield "helps most", f"{change.text}: {size(change.saved)} less for the trainer"
    if elsewhere and (more := best_generation_change(facts, gpu_memory)) is not None:
        yield "", f"{more.text}: {size(more.saved)} more for keys and values"


def trainer_fit(facts: TrainerFacts, gpu_memory: int, *, published: bool = True) -> Fit:
    need = need_of(facts, on_gpu=True, published=published)
    answer = "fits" if fits(need.total, gpu_memory) else "does NOT fit"
    unknown = "" if facts.shape else ", without activations: the model is no dense decoder"
    shared = f", sharded over {need.shards} processes" if need.shards > 1 else ""
    return Fit(
        "trainer fits",
        f"{size(need.total)} {answer} {USABLE:g} of {size(gpu_memory)}{shared}{unknown}",
        fits(need.total, gpu_memory),
    )


def worker_fit(facts: TrainerFacts, gpu_memory: int, *, workers: int = 1) -> Fit:
    """On a GPU without the trainer."""
    share = USABLE if facts.vllm_share is None else facts.vllm_share
    setting = "" if facts.vllm_share is None else "vllm_gpu_memory_utilization="
    rest = share * gpu_memory - workers * estimate(facts).worker_own
    return _generation(facts, rest, f"{setting}{share:g} of {size(gpu_memory)}")


def shared_fit(facts: TrainerFacts, gpu_memory: int) -> Fit:
    """On the trainer's GPU, whose published weights the workers read."""
    rest = USABLE * gpu_memory - need_of(facts, on_gpu=True).total
    return _generation(facts, rest, f"the trainer at {USABLE:g} of {size(gpu_memory)}")


def best_generation_change(facts: TrainerFacts, gpu_memory: int) -> Change | None:
    """What gives keys and values the most room; None where nothing short of another model does."""
    if facts.vllm_share is not None and facts.vllm_share < USABLE:
        more = int((USABLE - facts.vllm_share) * gpu_memory)
        return Change(f"vllm_gpu_memory_utilization={USABLE:g} where the trainer is on another GPU", more)
    return None


def _generation(facts: TrainerFacts, rest: float, beside: str) -> Fit:
    if rest <= 0:
        return Fit("workers fit", f"the weights alone do NOT fit {beside}", False)
    if facts.shape is None:
        return Fit("workers fit", f"{size(rest)} for keys and values beside {beside}", True)
    tokens, sequence = tokens_beside(rest, facts.shape), max(1, sequence_tokens(facts))
    room = f"{tokens:,} tokens of keys and values beside the weights, in {beside}"
    if tokens < sequence:
        return Fit("workers fit", f"{room}: a sequence of {sequence:,} tokens does NOT fit", False)
    return Fit("workers fit", f"{room}: {tokens // sequence:,} of {sequence:,} at a time", True)
