"""A training step without padding against TRL's own: tokens, seconds, memory and gradients of the same loss.

    python benchmarks/padding.py [--quick] [--json FILE] [--update-docs]
    scripts/gpu_check.sh padding                             on a GPU, of 0.6 B parameters

One process computes TRL's loss of a micro-batch and its gradients, in turn as TRL does and without padding, with a
randomly initialised model of Qwen3's shape. Tokens are counted, so that they need no clock. Memory is what autograd
keeps for the backward pass, counted too; on a GPU it is torch's peak. On a CPU one thread computes, and its seconds are
those of the CPU, the fewer of two passes. The control of equal work is TRL's own pass, which is the same each time.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.control import PAIRS
from benchmarks.setups.qwen3_shape import build_model, build_tokenizer
from benchmarks.table import Row, as_text, describe_machine, keep, machine_line, row
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from async_grpo.settings import NO_PADDING, PADDING_OF_TRL
from async_grpo.setup.trl_compat import repair_trl
from async_grpo.training.padding import METRIC, Unpadded

PROMPTS = (16, 32)  # tokens, from and to
TARGETS = {"equal": ">= 0.97", "uniform": ">= 1.7", "long tail": ">= 3", "lognormal": ">= 2.1"}


class Trainer(Unpadded, GRPOTrainer):
    """TRL's, which computes padding or not."""

    def stays_whole(self) -> bool:
        return self.padding != NO_PADDING


def lengths(kind: str, rows: int, longest: int, chance: random.Random) -> list[int]:
    """Tokens of each completion."""
    if kind == "equal":
        return [96] * rows
    if kind == "uniform":
        return [chance.randint(1, 256) for _ in range(rows)]
    if kind == "long tail":  # 10 % are eight times as long
        return [384 if row % 10 == 9 else 48 for row in range(rows)]
    return [min(longest, max(1, int(chance.lognormvariate(4.605, 0.8)))) for _ in range(rows)]  # median 100


def micro_batch(
    completions: Sequence[int], vocabulary: int, device: torch.device, *, prompts: Sequence[int] = ()
) -> dict[str, Any]:
    """What TRL gives to its loss; without `prompts` their lengths are drawn."""
    chance = random.Random(len(completions))
    prompts = prompts or [chance.randint(*PROMPTS) for _ in completions]
    sides = {"prompt": prompts, "completion": completions}
    batch: dict[str, Any] = {}
    for name, sizes in sides.items():
        columns = torch.arange(max(sizes))
        size = torch.tensor(sizes)[:, None]
        mask = (columns < size) if name == "completion" else (columns >= max(sizes) - size)
        ids = torch.randint(1, vocabulary, mask.shape, generator=torch.Generator().manual_seed(len(name)))
        batch |= {f"{name}_ids": ids.where(mask, 0).to(device), f"{name}_mask": mask.long().to(device)}
    advantages = torch.randn(len(completions), generator=torch.Generator().manual_seed(0)).to(device)
    return {**batch, "advantages": advantages, "num_items_in_batch": batch["completion_mask"].sum()}


def trainer_of(shape: str, device: str, folder: Path) -> Any:
    repair_trl()
    os.environ["QWEN3_SHAPE"] = shape
    tokenizer = build_tokenizer()
    args = GRPOConfig(
        output_dir=str(folder), report_to="none", use_cpu=device == "cpu", bf16=False, per_device_train_batch_size=2,
        num_generations=2, gradient_checkpointing=False,
    )  # fmt: skip
    dataset = Dataset.from_list([{"prompt": "a"}])
    trainer: Any = Trainer(
        model=build_model(tokenizer),
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=dataset,
        args=args,
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def timed_pass(trainer: Any, batch: dict[str, Any], padding: str) -> float:
    """Seconds of a forward and a backward pass, of CPU time on a CPU; the gradients are there afterwards."""
    trainer.padding = padding
    trainer.model.zero_grad()
    started = _now()
    trainer.compute_loss(trainer.model, batch).backward()
    return _now() - started


def _now() -> float:
    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def kept_bytes(trainer: Any, batch: dict[str, Any], padding: str) -> float:
    """Bytes that autograd keeps for the backward pass, weights left out; on a GPU, torch's peak beside them."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        timed_pass(trainer, batch, padding)
        return float(torch.cuda.max_memory_allocated() - before)
    weights = {it.untyped_storage().data_ptr() for it in trainer.model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        timed_pass(trainer, batch, padding)
    return float(sum(kept.values()))


def gradients(trainer: Any) -> torch.Tensor:
    return torch.cat([it.grad.flatten().float() for it in trainer.model.parameters() if it.grad is not None])


def measured(trainer: Any, kind: str, args: argparse.Namespace) -> Iterator[Row]:
    vocabulary = int(trainer.model.config.vocab_size)
    drawn = lengths(kind, args.rows, args.longest, random.Random(1))
    batch = micro_batch(drawn, vocabulary, trainer.accelerator.device)
    for checkpointing in args.checkpointing:
        checkpoint(trainer, checkpointing)
        if checkpointing == args.checkpointing[0]:
            yield from counted(trainer, kind, batch)
        yield speed(trainer, kind, batch, args.pairs, checkpointing)


def checkpoint(trainer: Any, checkpointing: str) -> None:
    if checkpointing == "with":
        trainer.model.gradient_checkpointing_enable()
    else:
        trainer.model.gradient_checkpointing_disable()


def counted(trainer: Any, kind: str, batch: dict[str, Any]) -> Iterator[Row]:
    """What needs no clock."""
    for padding in (PADDING_OF_TRL, NO_PADDING):  # and the trial, once
        timed_pass(trainer, batch, padding)
    padded, unpadded = trainer._metrics["train"][METRIC][-2:]
    yield row(f"{kind}: tokens computed in TRL, over the real ones", [padded], "")
    target = "" if kind == "equal" or torch.cuda.is_available() else "<= 1.2"
    yield row(f"{kind}: tokens computed, over the real ones", [unpadded], "", target=target)
    memory = [kept_bytes(trainer, batch, padding) for padding in (NO_PADDING, PADDING_OF_TRL)]
    yield row(f"{kind}: memory kept for the backward pass", [memory[0] / memory[1]], "of TRL's")
    reference = gradients(trainer)
    timed_pass(trainer, batch, NO_PADDING)
    apart = float((gradients(trainer) - reference).abs().max() / reference.abs().max())
    target = "" if torch.cuda.is_available() else "<= 0.00001"
    yield row(f"{kind}: gradients apart, of the largest one", [apart], "", target=target)


def speed(trainer: Any, kind: str, batch: dict[str, Any], pairs: int, checkpointing: str) -> Row:
    controls, gains = [], []
    for _ in range(pairs):
        both = [[timed_pass(trainer, batch, padding) for padding in (PADDING_OF_TRL, NO_PADDING)] for _ in range(2)]
        padded_s, unpadded_s = map(min, zip(*both, strict=True))
        controls.append(padded_s)
        gains.append(padded_s / unpadded_s)
    name = f"{kind}: speed of a pass, {checkpointing} gradient checkpointing"
    target = "" if torch.cuda.is_available() else TARGETS[kind]  # where the smallest pieces cost more
    return row(name, gains, "x TRL's", target=target, controls=controls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model, two pairs")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shape", default="small", help="of benchmarks/setups/qwen3_shape.py")
    parser.add_argument("--rows", type=int, default=32, help="completions of the micro-batch")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--lengths", nargs="+", choices=TARGETS, default=[*TARGETS])
    parser.add_argument("--checkpointing", nargs="+", choices=["without", "with"], default=["without", "with"])
    parser.add_argument("--longest", type=int, default=1024, help="tokens of a completion, where lognormal")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--update-docs", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.shape, args.pairs = "tiny", 2
    if args.device == "cpu":
        torch.set_num_threads(1)
    print(machine_line(describe_machine()), flush=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(args.shape, args.device, Path(folder))
        for kind in args.lengths:
            for one in measured(trainer, kind, args):
                rows.append(one)
                print(as_text([one]), flush=True)
    if args.json:
        keep("padding", args.json, rows, in_docs=args.update_docs, rows_of_a_batch=args.rows, shape=args.shape)


if __name__ == "__main__":
    main()
