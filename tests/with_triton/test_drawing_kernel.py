"""The kernel that draws tokens in one pass, by Triton's interpreter, against torch's own kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from kit.waiting import DEADLINE_S

pytestmark = pytest.mark.skipif(not find_spec("triton"), reason="`make test-triton` makes an environment with Triton")

PROGRAM = """
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
logits = torch.randn(4, 1300).to(torch.bfloat16)
kernel.drawn_in_one_pass(logits, logits, 1.0)
print("read", sum(reads) / logits.nbytes)

row = 1.5 * torch.randn(16)
rows = row.expand(600, 16).to(torch.bfloat16).contiguous()
sampled, logprobs = kernel.drawn_in_one_pass(rows, rows, 1.0)
exact = torch.softmax(rows[0].float(), -1)
print("apart", float((torch.bincount(sampled, minlength=16) / 600 - exact).abs().max()))
torch.testing.assert_close(logprobs, exact.log()[sampled])
"""


def test_the_kernel_draws_what_the_softmax_says_and_reads_the_logits_once() -> None:
    command, env = [sys.executable, "-P", "-c", PROGRAM], {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ran.returncode == 0, ran.stderr
    found = dict(line.split() for line in ran.stdout.splitlines())
    assert 1 <= float(found["read"]) < 1.01, "and the logit of the token that was drawn"
    assert float(found["apart"]) < 0.08, "four standard deviations of a half"
