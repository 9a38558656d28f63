"""The kernels that draw tokens: by Triton's interpreter against torch's own, and as they are compiled for an H100."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from kit.waiting import DEADLINE_S

pytestmark = pytest.mark.skipif(not find_spec("triton"), reason="`make test-triton` makes an environment with Triton")

DRAWS = """
import torch
from triton.runtime.interpreter import InterpreterBuilder
from async_grpo.engines import drawing_kernel as kernel
from async_grpo.engines.drawing import _wrong

torch.manual_seed(0)
kernel.BLOCK = 512
assert _wrong(kernel.drawn_in_one_pass, torch.device("cpu"), rows=8) is None

reads = []
load = InterpreterBuilder.create_masked_load

def counted(self, pointers, mask, *others):
    reads.append(int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8)
    return load(self, pointers, mask, *others)

InterpreterBuilder.create_masked_load = counted
logits = torch.randn(2, 50000).to(torch.bfloat16)
kernel.drawn_in_one_pass(logits, logits, 1.0)
print("read", sum(reads) / logits.nbytes)

kernel.BLOCK = 4
row = 1.5 * torch.randn(14)
rows = row.expand(600, 14).to(torch.bfloat16).contiguous()
scores = rows.masked_fill(torch.arange(14) % 5 == 0, float("-inf"))
for scored in (rows, scores):
    sampled, logprobs = kernel.drawn_in_one_pass(rows, scored, 1.0)
    exact = torch.softmax(scored[0].float(), -1)
    print("apart", float((torch.bincount(sampled, minlength=14) / 600 - exact).abs().max()))
    torch.testing.assert_close(logprobs, torch.log_softmax(rows[0].float(), -1)[sampled])

rows[0, 3], scores[1] = float("nan"), float("-inf")
sampled, logprobs = kernel.drawn_in_one_pass(rows, scores, 1.0)
assert logprobs[:2].isnan().all() and logprobs[2:].isfinite().all() and 0 <= sampled.min() <= sampled.max() < 14
"""

# Triton compiles for a GPU that is not there. Addresses and the vocabulary are multiples of 16, as they mostly are.
COMPILES = """
import re, subprocess, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from async_grpo.engines import drawing_kernel as kernel

for dtype in ("bf16", "fp16", "fp32"):
    for function, pointers, others in (
        (kernel._sum, {"logits": dtype, "sums": "fp32"}, {"BLOCK": kernel.BLOCK}),
        (kernel._draw, {"logits": dtype, "scores": "fp32", "sums": "fp32", "scores_sums": "fp32", "uniform": "fp32",
                        "sampled": "i64", "logprobs": "fp32"}, {"BLOCK": kernel.BLOCK, "BLOCKS": 64}),
    ):
        signature = {name: f"*{kind}" for name, kind in pointers.items()}
        signature |= {"temperature": "fp32", "vocabulary": "i32", "blocks": "i32", **dict.fromkeys(others, "constexpr")}
        aligned = [index for index, name in enumerate(signature) if name in pointers or name == "vocabulary"]
        source = ASTSource(function, signature, others, {(it,): [["tt.divisibility", 16]] for it in aligned})
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(made.asm["cubin"])
            file.flush()
            asked = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
            code = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
        count = len(re.findall(r"^\\s+/\\*[0-9a-f]{4,}\\*/\\s+(?!NOP)", code, re.MULTILINE))
        print(function.__name__, count * made.metadata.num_warps * 32 / kernel.BLOCK)
"""


def printed(program: str, **env: str) -> list[tuple[str, float]]:
    command = [sys.executable, "-P", "-c", program]
    ran = subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return [(name, float(value)) for name, value in map(str.split, ran.stdout.splitlines())]


def test_the_kernels_draw_what_the_softmax_says_and_read_the_logits_once() -> None:
    (_, read), *apart = printed(DRAWS, TRITON_INTERPRET="1")
    assert 1 <= read < 1.03, "and the block that was drawn"
    assert all(value < 0.08 for _, value in apart), "four standard deviations of a half"


def test_the_kernels_are_a_few_instructions_for_each_logit_of_an_h100() -> None:
    """`_draw` is over one block."""
    found = printed(COMPILES)
    assert len(found) == 6 and all(value < {"_sum": 24, "_draw": 60}[name] for name, value in found)
