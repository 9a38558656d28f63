"""Forward passes over one token a row, on CUDA each of them one CUDA graph.

A pass launches some fifty kernels a layer, whatever the batch, and the host needs longer for that than a GPU for the
work. A graph is one launch. It reads the addresses that it was captured with: a published version lies in one of a few
slots, which stay where they are, so the graphs of a slot are right for every version that is ever published there.
Where a GPU has too little memory for the graphs of all slots, each batch copies its version's weights to one place.

Shapes: b rows in the batch, R of the pass (a few shapes serve every b), V the vocabulary.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from async_grpo.engines.fewer_kernels import replaced, replacements
from async_grpo.engines.fixed_batch import FixedBatch, KeyValueMemory, one_token_attention, shapes_of
from async_grpo.engines.fixed_sizes import LEAST_ROWS, LEAST_TOKENS, rounded
from async_grpo.errors import reason_of
from async_grpo.formatting import size
from async_grpo.log import logger

Shape = tuple[int, int, int, int]  # rows and tokens of a batch, and of a pass over a part of it
Addresses = frozenset[tuple[str, int]]  # of a model's tensors by name: what a graph is captured with
SLOTS = 3  # one more with `--delta-every`
LEAST_FREE = 0.05  # of a GPU's memory, which graphs leave


@dataclass(slots=True)
class Graphs:
    """CUDA graphs of one place of weights, and how many bytes fewer the GPU had free after each."""

    of_shape: dict[Shape, torch.cuda.CUDAGraph] = field(default_factory=dict)
    taken: list[int] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """What they take: by the median, since other processes take memory, and give some back, meanwhile."""
        return median_low(self.taken or [0]) * len(self.taken)


class HostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Notes the last kernel whose result the host waits for: it would spoil a capture, and torch with it."""

    found = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
        if reads and func is not torch.ops.aten.index.Tensor:  # which has the tag for masks alone
            self.found = str(func)
        return func(*args, **(kwargs or {}))


def copies_instead(*, graphs: int, weights: int, free: int, total: int) -> bool:
    """Whether a copy of the weights fits where more graphs do not. Bytes: of both, and of the GPU."""
    return graphs > free - LEAST_FREE * total >= weights


class DecodeSteps:
    """The passes of one engine: `begin` with what the prompts left, then `step` by `step`.

    Args:
        capture: make graphs. Otherwise, and where one cannot be captured, the same passes run kernel by kernel.
    """

    def __init__(self, *, capture: bool) -> None:
        self._capture = capture
        self._said: set[str] = set()
        self._moving: set[str] = set()  # weights that differ in their place, once they are copied to one
        self._copies: dict[str, Tensor] = {}  # these, and those of linear layers where precision is mixed
        self._exporter = ""
        self._forget()

    def of_exporter(self, generation: str) -> None:
        """Let the graphs of another exporter go, which has ended: this one's slots lie elsewhere."""
        if generation != self._exporter:
            self._exporter = generation
            self._forget_graphs()

    def _forget(self) -> None:
        """Let the memory of batches go, and with it what is of its addresses."""
        self._memory: KeyValueMemory | None = None
        self._batches: list[FixedBatch] = []  # in that memory, one at a time; the last is the one in use
        self._forget_graphs()

    def _forget_graphs(self) -> None:
        self._logits_RV: Tensor | None = None
        self._pool: Any = None
        self._graphs: dict[Addresses, Graphs] = {}
        self._here = Graphs()  # those of the weights in use
        self._warm: set[Shape] = set()  # ran once: what a kernel loads at first is there

    def can(self, model: PreTrainedModel, inputs: dict[str, Any]) -> bool:
        """Whether the model's passes are known here, by the inputs that `generate` prepared; the log has it, once."""
        reason = _why_not(model, inputs)
        fixed = "in fixed shapes, by CUDA graphs" if self._capture else "in fixed shapes"
        how = fixed if reason is None else f"in growing shapes, kernel by kernel: {reason}"
        self._say(f"tokens are decoded {how}")
        return reason is None

    def _say(self, text: str, *, once: str = "", level: str = "INFO") -> None:
        if (once or text) not in self._said:
            self._said.add(once or text)
            logger.log(level, text)

    def begin(
        self, model: PreTrainedModel, cache: Cache, mask_bL: Tensor | None, positions_bL: Tensor, longest: int,
        kwargs: dict[str, Any],
    ) -> None:  # fmt: skip
        """Take over the keys and values of prompts, whose rows may grow to `longest` tokens."""
        self._model, self._kwargs, self._full = model, kwargs, False
        self._rows, self._position = cache.layers[0].keys.shape[0], positions_bL.shape[-1]
        self._least_rows = min(LEAST_ROWS, self._rows)  # one long row has the memory of one
        self._take_batch(cache, positions_bL, rounded(self._rows, self._least_rows), rounded(longest, LEAST_TOKENS))
        self._batch.take(cache, mask_bL, positions_bL)
        self._copy_weights()
        self._replaced = replacements(model)
        where = self._addresses()
        if self._capture and self._graphs and where not in self._graphs and not self._moving:
            self._moving = self._to_copy(where)
            if self._moving:
                self._forget_graphs()
                self._copy_weights()
                where = self._addresses()
        self._here = self._graphs.setdefault(where, Graphs())

    def _addresses(self) -> Addresses:
        model = self._model
        tensors = *model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)
        return frozenset((name, it.data_ptr()) for name, it in tensors if name not in self._copies)

    def _to_copy(self, where: Addresses) -> set[str]:
        """Names of weights to copy from now on, by what the last place's graphs took; none where graphs are kept."""
        last, graphs = next(reversed(self._graphs.items()))
        self._say(f"the CUDA graphs of one weight slot take {size(graphs.nbytes)} of the GPU so far")
        moving = {name for name, _ in where - last}
        weights = {it.data_ptr(): it.nbytes for name, it in self._model.named_parameters() if name in moving}
        more, copied = graphs.nbytes * max(1, SLOTS - len(self._graphs)), sum(weights.values())
        free, total = _free_memory(self._model.device)
        if not copies_instead(graphs=more, weights=copied, free=free, total=total):
            return set()
        self._say(f"versions are copied ({size(copied)}): {size(free)} are free, and {size(more)} of graphs to come")
        return moving

    @property
    def _batch(self) -> FixedBatch:
        return self._batches[-1]

    def _take_batch(self, cache: Cache, positions_bL: Tensor, rows: int, tokens: int) -> None:
        """Take the smallest with at least these rows and tokens a row; where there is none, a new one."""
        kind = (*shapes_of(cache), positions_bL.shape[:-2], self._mixed())
        if self._memory is None or self._memory.kind != kind or self._memory.tokens < rows * tokens:
            self._forget()
            gc.collect()  # frees the memory of what is forgotten
            self._memory = KeyValueMemory(cache, kind, rows * tokens, self._mixed())
        fit = [batch for batch in self._batches if batch.most_rows >= rows and batch.most_tokens >= tokens]
        smallest = min(fit, key=lambda batch: batch.most_rows * batch.most_tokens, default=None)
        batch = smallest or FixedBatch(cache, positions_bL, rows, tokens, self._memory)
        self._batches = [*(it for it in self._batches if it is not batch), batch]
        if self._logits_RV is not None and len(self._logits_RV) < batch.most_rows:
            self._forget_graphs()  # they write into the memory of fewer logits

    def _mixed(self) -> torch.dtype | None:
        """What mixed precision multiplies in."""
        kind = self._model.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def _copy_weights(self) -> None:
        """Copy once a batch to where graphs find them: weights that autocast would cast, and all that move."""
        mixed, made = self._mixed(), dict[tuple[int, torch.dtype], Tensor]()
        for name, module in self._model.named_modules():
            cast = mixed if isinstance(module, nn.Linear) and module.weight.dtype == torch.float32 else None
            for part, own in module.named_parameters(prefix=name, recurse=False):
                if cast is None and part not in self._moving:
                    continue
                key = own.data_ptr(), cast or own.dtype
                if key not in made:  # weights that are tied have one copy
                    there = self._copies.get(part)
                    made[key] = torch.empty_like(own, dtype=key[1], requires_grad=False) if there is None else there
                    made[key].copy_(own)
                self._copies[part] = made[key]
        if mixed is not None:
            torch.clear_autocast_cache()  # the prompts' own casts of the same weights

    def smaller_without(self, ended: int) -> bool:
        """Whether the passes have fewer rows without so many rows of the batch."""
        return rounded(self._rows - ended, self._least_rows) < rounded(self._rows, self._least_rows)

    def select(self, stay: Tensor) -> None:
        """Keep these rows of the batch."""
        self._rows = len(stay)
        self._batch.select(stay)

    def step(self, sampled_b: Tensor) -> Tensor:
        """The logits `[b, V]` behind these tokens, in the model's dtype. The next step writes over them."""
        self._batch.tokens_R1[: self._rows, 0] = sampled_b
        self._position += 1
        tokens = min(rounded(self._position, LEAST_TOKENS), self._batch.most_tokens)
        self._batch.rows, self._batch.tokens = rounded(self._rows, self._least_rows), tokens
        shape = (self._batch.most_rows, self._batch.most_tokens, self._batch.rows, self._batch.tokens)
        if self._capture and not self._full and shape not in self._here.of_shape and shape in self._warm:
            self._add_graph(shape)
        if shape in self._here.of_shape:
            self._here.of_shape[shape].replay()
        elif self._capture and shape not in self._warm:
            self._warm.add(shape)
            with HostReads() as reads:  # type: ignore[no-untyped-call]  # as above
                self._pass()
            if reads.found:
                self._give_up(f"a pass waits for the GPU ({reads.found})")
        else:
            self._pass()
        assert self._logits_RV is not None
        return self._logits_RV[: self._rows]

    def _give_up(self, reason: str) -> None:
        self._capture = False
        logger.warning("no more CUDA graphs: {}", reason)

    def _add_graph(self, shape: Shape) -> None:
        free, total = _free_memory(self._model.device)
        self._full = free < LEAST_FREE * total  # for this batch: the trainer's memory comes and goes
        if self._full:
            taken = size(sum(graphs.nbytes for graphs in self._graphs.values()))
            text = f"fewer CUDA graphs: {size(free)} of {size(total)} are free, and they took {taken}"
            self._say(text, once="full", level="WARNING")
            return
        graph, self._pool = torch.cuda.CUDAGraph(), self._pool or torch.cuda.graph_pool_handle()
        try:
            with _undone(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._pass()
        except torch.OutOfMemoryError:
            self._full = True
        except Exception as error:  # noqa: BLE001  # whatever the model does that no graph can do
            with suppress(Exception):  # torch before 2.12 forgets it, and then gives no cached memory back
                torch._C._cuda_endAllocateToPool(self._model.device.index, self._pool)
            self._give_up(f"one could not be made: {reason_of(error.__context__ or error)}")
        else:
            self._here.of_shape[shape] = graph
            self._here.taken.append(max(0, free - torch.cuda.mem_get_info(self._model.device)[0]))

    def _pass(self) -> None:
        """Compute kernel by kernel, or note the kernels of a graph."""
        mixed = torch.autocast(
            self._model.device.type, self._mixed(), enabled=self._mixed() is not None, cache_enabled=False
        )
        with one_token_attention(self._model), replaced(self._replaced), mixed:
            inputs = self._model.prepare_inputs_for_generation(**self._batch.inputs(), **self._kwargs)
            output = functional_call(self._model, self._copies, (), {**inputs, "return_dict": True}, tie_weights=False)
        self._batch.count_up()
        logits_RV: Tensor = output.logits[:, -1]
        if self._logits_RV is None or len(self._logits_RV) < len(logits_RV):
            self._logits_RV = logits_RV.new_empty(self._batch.most_rows, logits_RV.shape[1])
        self._logits_RV[: len(logits_RV)] = logits_RV  # one memory for all graphs, which are many


@contextmanager
def _undone() -> Iterator[None]:
    """Leave the thread's stream and the GPU's generator as they are; a capture that fails does not.

    torch before 2.13 marks the generator that a capture begins with, and refuses to draw by it until the capture ends.
    """
    stream, drawn = torch.cuda.current_stream(), torch.cuda.default_generators[torch.cuda.current_device()]
    own = drawn.graphsafe_get_state()
    drawn.graphsafe_set_state(own.clone_state())
    try:
        yield
    finally:
        drawn.graphsafe_set_state(own)
        torch.cuda.set_stream(stream)


def _free_memory(device: torch.device) -> tuple[int, int]:
    """Bytes that a graph can have, and all bytes of the GPU."""
    torch.cuda.empty_cache()  # as a capture does
    return torch.cuda.mem_get_info(device)


def _why_not(model: PreTrainedModel, inputs: dict[str, Any]) -> str | None:
    name, attention = type(model).__name__, model.config.get_text_config(decoder=True)._attn_implementation
    if attention != "sdpa":
        return f"the attention of {name} is {attention}, not sdpa"
    if model._is_stateful or not model._can_compile_fullgraph or not model._can_set_attn_implementation():
        return f"transformers has no fixed shapes for {name}"
    cache = inputs.get("past_key_values")
    kinds = set() if cache is None or cache.offloading else {type(layer) for layer in cache.layers}
    if not kinds or kinds - {DynamicLayer, DynamicSlidingWindowLayer}:
        return f"its cache is of {', '.join(sorted(kind.__name__ for kind in kinds)) or 'another kind'}"
    others = {key for key, value in inputs.items() if isinstance(value, Tensor)} - {"attention_mask", "position_ids"}
    if others or "position_ids" not in inputs:
        return f"{name} takes {', '.join(sorted(others)) or 'no positions'}"
    return None
