"""The work of one decoded token, counted: kernels that the host launches, and bytes that they are given and give.

    python benchmarks/sampler_work.py [--shape 0.6B|tiny] [--rows N] [--json FILE] [--update-docs]

No clock and no GPU. Prompts are of unequal length. In a loop whose shapes grow each kernel is a launch; of passes in
fixed shapes (`engines/captured.py`) all kernels of a pass are one CUDA graph. What torch's own kernels move
between their parts (a softmax reads its input several times) is not counted, so the bytes of sampling are too few; the
kernels that draw in one pass read the logits once and one block of them again, as a test with Triton's interpreter
counts.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.setups.qwen3_shape import SHAPES, build_model, build_tokenizer
from benchmarks.table import Row, as_text, describe_machine, keep, machine_line, row
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import ContinuousBatchingConfig, GenerationConfig

from async_grpo.engines import fewer_kernels
from async_grpo.engines.captured import DecodeSteps
from async_grpo.engines.decoding import SamplingLoop

BLOCK = 4096  # of `engines/drawing_kernel.py`, which imports Triton
LOOKUPS = (torch.ops.aten.embedding.default, torch.ops.aten.index_select.default)


@torch.library.custom_op("async_grpo::rms_norm", mutates_args=())
def rms_norm(hidden: Tensor, shape: list[int], weight: Tensor, eps: float) -> Tensor:
    """One kernel, as on CUDA. On a CPU torch computes it by those that it is made of."""
    return torch.nn.functional.rms_norm(hidden, shape, weight, eps)


class Work(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """The kernels that run, each with its shapes, the bytes that they move, and what attention computes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.kernels: list[tuple[Any, ...]] = []
        self.bytes = 0
        self.attention_flop = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given, made = ([it for it in tree_leaves(part) if isinstance(it, Tensor)] for part in ((args, kwargs), result))
        changes = func._schema.is_mutable
        memory = {it.untyped_storage().data_ptr() for it in given}
        if changes or not {it.untyped_storage().data_ptr() for it in made} <= memory:  # else it is a view
            self.kernels.append((func, *(tuple(it.shape) for it in [*given, *made])))
            # A table is read as far as it is asked for, and memory written in place as far as there is what to write.
            if func in LOOKUPS:
                moved = [*given[1:], *made, *made]
            else:
                moved = [*given[1:], *given[-1:]] if changes and given[1:] else given + made
            self.bytes += sum(it.nbytes for it in moved)
            if "scaled_dot_product" in str(func):  # queries of shape (batch, heads, queries, dim), keys alike
                self.attention_flop += 4 * given[0].numel() * given[1].shape[-2]
        return result


def decoding_loop(model: Any, prompts: list[list[int]], tokens: int, steps: DecodeSteps | None) -> SamplingLoop:
    """A loop behind its prompts, in which no row ends."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    config = GenerationConfig(max_new_tokens=tokens, do_sample=True, top_k=0, pad_token_id=0, eos_token_id=-1)
    make = partial(SamplingLoop, temperature=1.0, pad_token_id=0, group_sizes=[1] * len(prompts), steps=steps)
    with torch.no_grad():
        loop: SamplingLoop = model.generate(
            input_ids=ids, attention_mask=(ids != 0).long(), generation_config=config, custom_generate=make
        )
    return loop


def work_of_passes(loop: SamplingLoop, passes: int) -> list[Work]:
    """Run the next passes, without sampling."""
    found = []
    for _ in range(passes):
        with torch.no_grad(), Work() as work:
            loop._open_rows.step(torch.full((len(loop.lengths_B),), 5), loop._sequences_BL)
        found.append(work)
    return found


def work_of_a_token(loop: SamplingLoop) -> Work:
    """Decode one token more: sampling, the test for the end, and a pass."""
    with torch.no_grad(), Work() as work:
        loop.step()
    return work


def continuous_batching(model: Any, prompts: list[list[int]]) -> Work:
    """A pass of transformers' continuous batching in which each row has one token.

    Its keys lie in pages, and sdpa gets those of all rows as one sequence, with a mask of who sees what.
    """
    found: list[Work] = []
    forward = model.forward

    def watched(**kwargs: Any) -> Any:
        with Work() as work:
            result = forward(**kwargs)
        if kwargs["input_ids"].shape == (1, len(prompts)):
            found.append(work)
        return result

    model.forward = watched
    try:
        config = GenerationConfig(max_new_tokens=4, do_sample=True, top_k=0, pad_token_id=0, eos_token_id=-1)
        pages = ContinuousBatchingConfig(num_blocks=2 * len(prompts), max_batch_tokens=sum(map(len, prompts)))
        model.generate_batch(prompts, config, continuous_batching_config=pages, progress_bar=False)
    finally:
        del model.forward  # its class has it
    return found[-1]


def counted(shape: str, rows: int) -> list[Row]:
    os.environ["QWEN3_SHAPE"] = shape
    model = build_model(build_tokenizer()).eval()
    most = min(128, SHAPES[shape][6] // 4)
    prompts = [list(range(2, 2 + most * (1 + group % 4) // 4)) for group in range(8) for _ in range(rows // 8)]
    found = {}
    for name, steps in (("shapes that grow", None), ("fixed shapes", DecodeSteps(capture=False))):
        loop = decoding_loop(model, prompts, 64, steps)
        with patch.object(fewer_kernels, "rms_norm", rms_norm):
            work_of_a_token(loop)
            found[name] = work_of_a_token(loop), work_of_passes(loop, 1)[0]
    token, grown = found["shapes that grow"]
    fixed_token, fixed = found["fixed shapes"]
    with torch.no_grad(), Work() as drawing:
        loop._sample()
    logits = loop._open_rows.logits_bV
    paged = continuous_batching(model, prompts)
    drawn = logits.nbytes * (1 + min(1, BLOCK / logits.shape[1]))
    launches = len(fixed_token.kernels) - len(fixed.kernels) + 1
    return [
        row(f"launches a token, {rows} rows, shapes that grow", [len(token.kernels)], ""),
        row(f"launches a token, {rows} rows, fixed shapes as a CUDA graph", [launches], ""),
        row("launches, of those of shapes that grow", [launches / len(token.kernels)], "", target="<= .15"),
        row("kernels of a pass, shapes that grow", [len(grown.kernels)], ""),
        row("kernels of a pass, fixed shapes", [len(fixed.kernels)], ""),
        row("kernels of a pass, of those of shapes that grow", [len(fixed.kernels) / len(grown.kernels)], ""),
        row("bytes of a pass, shapes that grow", [grown.bytes / 1e6], "MB"),
        row("bytes of a pass, fixed shapes", [fixed.bytes / 1e6], "MB"),
        row("bytes of a pass, transformers' continuous batching", [paged.bytes / 1e6], "MB"),
        row("attention of a pass, fixed shapes", [fixed.attention_flop / 1e9], "GFLOP"),
        row("attention of a pass, transformers' continuous batching", [paged.attention_flop / 1e9], "GFLOP"),
        row("bytes of sampling by torch's kernels, at least", [drawing.bytes / 1e6], "MB"),
        row("bytes of sampling in one pass over the logits", [drawn / 1e6], "MB"),
        row("bytes of sampling, of those by torch's kernels", [drawn / drawing.bytes], "", target="<= .15"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.6B", choices=SHAPES)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--update-docs", action="store_true")
    args = parser.parse_args()
    print(machine_line(describe_machine()), flush=True)
    rows = counted(args.shape, args.rows)
    print(as_text(rows))
    if args.json:
        keep("sampler_work", args.json, rows, in_docs=args.update_docs, rows_of_the_batch=args.rows, shape=args.shape)


if __name__ == "__main__":
    main()
