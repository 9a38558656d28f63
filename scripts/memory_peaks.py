#!/usr/bin/env python3
"""Compare the rules of `async_grpo.checks.plan.memory` with the peak of what torch allocates on a CPU.

Each row trains a random model for three optimizer steps with plain TRL, in a process of its own, under torch's memory
profiler, which counts every allocation from the first weight on. Prints a Markdown table; `--write` puts it into
docs/what_fits.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs" / "what_fits.md"
BEGIN, END = "<!-- begin: scripts/memory_peaks.py -->", "<!-- end: scripts/memory_peaks.py -->"
# hidden, intermediate, layers, heads, KV heads, vocabulary, rows, completion, checkpointing
CASES = {
    "64 wide, 4 layers": (64, 256, 4, 4, 4, 512, 16, 128, False),
    "the same, checkpointing": (64, 256, 4, 4, 4, 512, 16, 128, True),
    "128 wide, 8 layers, 2 KV heads": (128, 384, 8, 8, 2, 512, 16, 128, False),
    "the same, checkpointing ": (128, 384, 8, 8, 2, 512, 16, 128, True),
    "32 wide, vocabulary of 8,192": (32, 64, 2, 2, 2, 8192, 16, 128, True),
    "384 wide, mostly weights": (384, 1536, 6, 6, 6, 512, 4, 32, True),
}


def measure(case: str) -> dict[str, int]:
    """Bytes of the peak, and what the rules say."""
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from torch.profiler import ProfilerActivity, profile
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    from async_grpo.checks.plan.memory import activation_bytes, need_of
    from async_grpo.checks.plan.trainer_facts import describe
    from async_grpo.rundir.run_plan import RunPlan
    from async_grpo.setup.trl_compat import repair_trl

    repair_trl()
    hidden, intermediate, layers, heads, kv_heads, vocabulary, rows, completion, checkpointing = CASES[case]
    words = {f"w{number}": number for number in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w1", padding_side="left")
    config = Qwen3Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        vocab_size=vocabulary,
        pad_token_id=0,
        eos_token_id=1,
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen,
    ):
        torch.manual_seed(0)
        trainer = GRPOTrainer(
            model=Qwen3ForCausalLM(config),
            processing_class=fast,
            reward_funcs=lambda completions, **_: [float(len(text) % 7) for text in completions],
            train_dataset=Dataset.from_list([{"prompt": "w5 w6 w7 w8"}] * 64),
            args=GRPOConfig(
                output_dir=folder,
                max_steps=3,
                per_device_train_batch_size=rows,
                num_generations=4,
                max_completion_length=completion,
                gradient_checkpointing=checkpointing,
                beta=0.0,
                bf16=False,
                use_cpu=True,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
                generation_kwargs={"min_new_tokens": completion},
            ),
        )
        facts = describe(trainer, RunPlan(config=Path("setup.py")))
        trainer.train()
    rule = need_of(facts, on_gpu=False, published=False)
    return {"peak": _peak(seen), "rule": rule, "activations": activation_bytes(facts, on_gpu=False) or 0}


def _peak(seen: Any) -> int:
    """The most bytes that were allocated at a time."""
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


def table() -> str:
    rows = ["| model | measured peak | by the rules | of it activations | rule / measured |", "|---|---|---|---|---|"]
    for case in CASES:
        command = [sys.executable, __file__, "--case", case]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        mega = {name: f"{value / 1e6:.1f} MB" for name, value in found.items()}
        ratio = found["rule"] / found["peak"]
        rows.append(f"| {case.strip()} | {mega['peak']} | {mega['rule']} | {mega['activations']} | {ratio:.2f} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, help="measure this one and print JSON")
    parser.add_argument("--write", action="store_true", help="into the docs")
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measure(args.case)))
        return
    rows = table()
    print(rows)
    if args.write:
        before, _, rest = DOCS.read_text().partition(BEGIN)
        DOCS.write_text(f"{before}{BEGIN}\n\n{rows}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
