"""A whole experiment on two cores, killed twice on the way: `make experiment-demo`.

    python scripts/experiment_demo.py [--folder DIR] [--update-docs]

PITA, QSharp, DPO, GRPO and GRPO-HF on paths in star graphs and on sums, two rounds each, from one tiny reference that
is trained here first. One stage is killed, its line is blocked, then the runner is killed, and `resume_from=` finishes
it all. What had finished before must not run again. `--update-docs` puts table and plot into docs/experiments.md.
"""

from __future__ import annotations

import argparse
import os
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.table import describe_machine, machine_line, update_docs
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast

from async_grpo_experiments.runner import states
from async_grpo_experiments.runner.config_files import config_of
from async_grpo_experiments.runner.graph import graph_of
from async_grpo_experiments.runner.run import RUN_LOG
from async_grpo_experiments.slots.ledger import FINISHED, LEDGER, RUNNING, Record, read
from async_grpo_experiments.worlds.star import star_graphs, walks
from async_grpo_experiments.worlds.tiny import save, small_transformer

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "src" / "app" / "trainer_setup_tiny.py"  # of the sums
NODES, BRANCHES, LENGTH = 10, 3, 2
STEPS, NOISY = 400, 150  # of the reference; in the last ones more and more sums are wrong
WRONG_SUMS = 0.6
ROWS = 64  # of graphs, and of sums, in a step
AT_MOST_S = 3 * 3600
PICTURE = ROOT / "docs" / "images" / "experiment_demo.png"
BATCH = {"batch_size": 128, "num_workers": 0}
ALGORITHMS: Mapping[str, Mapping[str, object]] = {
    "QSharp": {**BATCH, "lr": 1e-3, "max_steps": 400, "loss_type": "bce", "guidance.mode": "bernoulli"},
    "PITA": {**BATCH, "lr": 1e-3, "max_steps": 400},
    "DPO": {**BATCH, "lr": 1e-4, "max_steps": 60},
    "GRPO": {**BATCH, "lr": 4e-4, "max_steps": 40, "samples_per_prompt": 8, "workers": 1, "kl_coef": 0.01},
    "GRPO-HF": {**BATCH, "lr": 4e-4, "max_steps": 40, "samples_per_prompt": 8, "workers": 1, "kl_coef": 0.01},
}
KEYS = (
    "experiment.name=demo",
    "gpu=cpu",
    "rounds_of_training=2",
    "training.datasets=[star,sums]",
    "training.micro_batch_size=128",
    "system.max_parallel_jobs=2",
    "generation.batch_size=64",
    "generation.max_new_tokens=4",
    "data_collection.max_examples=1000",
    "data_collection.samples_per_example=2",
    "evaluation.max_examples=64",
    "evaluation.num_samples=4",
    "evaluation.etas=[0.1,0.3,1]",
    "model_pairs=[tiny]",
    f"++datasets.star.made={{branches: {BRANCHES}, length: {LENGTH}, nodes: {NODES}}}",
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A token a character, with the space before it where there is one: for paths and for sums."""
    digits = [*"0123456789"]  # first: in the sums' recipe a digit's token id is its value
    words = [*digits, "+", "=", *(f" {digit}" for digit in digits), " |", " /", " =", "<pad>", "<eos>"]
    characters = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(" ?[^ ]"), behavior="isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def make_reference(folder: Path) -> None:
    """Train a model that walks along a random branch of each graph, and whose likeliest sum is right."""
    tokenizer = build_tokenizer()
    model = small_transformer(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(6 * (step + 1) / STEPS, 1.0, 4 * (STEPS - step) / STEPS)
    )
    draw, sums = torch.Generator().manual_seed(0), runpy.run_path(str(RECIPE))
    prompts, answers = sums["teacher_tokens"](tokenizer)
    for step in range(STEPS):
        graphs = list(star_graphs(BRANCHES, LENGTH, ROWS, nodes=NODES, seed=1_000_000 + step))
        branches = torch.randint(BRANCHES, (ROWS,), generator=draw).tolist()
        rows = torch.randint(len(prompts), (ROWS,), generator=draw)
        wrong = WRONG_SUMS * max(0.0, 1 - (STEPS - step) / NOISY)
        answer = sums["with_errors"](answers[rows], wrong, draw)
        loss = answer_loss(model, *walks(graphs, branches, tokenizer))
        loss = loss + answer_loss(model, torch.cat([prompts[rows], answer], 1), prompts.shape[1])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if not (step + 1) % 100:
            print(f"demo: the reference, step {step + 1} of {STEPS}: loss {loss.item():.2f}", flush=True)
    save(folder, model.eval(), tokenizer)


def answer_loss(model: Any, ids_BT: torch.Tensor, start: int) -> torch.Tensor:
    """The mean over the tokens from `start` on."""
    logits_BTV = model(ids_BT, use_cache=False).logits[:, start - 1 : -1]
    return cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, start:].flatten())


def command(reference: Path) -> list[str]:
    """The one command of the experiment."""
    keys = [*KEYS, f"+models.tiny.ref={reference}"]
    enabled: dict[str, Mapping[str, object]] = {"QSharp-HF": {"enabled": False}}
    enabled |= {name: {"enabled": True, **own} for name, own in ALGORITHMS.items()}
    keys += [f"++algos.{name}.{key}={value}" for name, own in enabled.items() for key, value in own.items()]
    return ["experiment", *keys]


class Runner:
    """One process of `async-grpo experiment`, in the folder of the demo."""

    def __init__(self, folder: Path, arguments: Sequence[str]) -> None:
        self._folder = folder
        self._process = subprocess.Popen([sys.executable, "-m", "async_grpo.cli", *arguments], cwd=folder)

    def until(self, condition: Callable[[Mapping[str, Record]], bool]) -> Path:
        """Wait until this holds for the records of the stages; returns the folder of the experiment."""
        deadline = time.monotonic() + AT_MOST_S
        while self._process.poll() is None and time.monotonic() < deadline:
            for ledger in self._folder.glob(f"outputs/demo/*/{LEDGER}"):
                if condition(read(ledger)):
                    return ledger.parent
            time.sleep(0.2)
        self.kill()
        sys.exit("The experiment ended early, or took too long: its log is above.")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def ended(self) -> int:
        return self._process.wait(AT_MOST_S)


def share_done(records: Mapping[str, Record]) -> float:
    return sum(record.state == FINISHED for record in records.values()) / max(1, len(records))


def running(records: Mapping[str, Record]) -> list[Record]:
    return [record for record in records.values() if record.state == RUNNING]


def can_be_hit(record: Record) -> bool:
    """Whether something needs this stage."""
    return record.pid is not None and not record.task.endswith(".evaluate")


def finished(root: Path) -> dict[str, str]:
    """The attempt that has left each finished stage."""
    found = {name: states.manifest_of(root / stage.folder) for name, stage in graph_of(config_of(root)).items()}
    return {name: manifest.attempt for name, manifest in found.items() if manifest is not None}


def starts(root: Path) -> dict[str, int]:
    """How often each stage was started."""
    names = [line.split()[2] for line in (root / RUN_LOG).read_text().splitlines() if " starts on " in line]
    return {name: names.count(name) for name in names}


def run(folder: Path) -> tuple[Path, str]:
    """The experiment with both kills; returns its folder, and what it cost in words."""
    if not (folder / "reference").exists():
        make_reference(folder / "reference")
    began = time.monotonic()
    runner = Runner(folder, command(folder / "reference"))
    root = runner.until(lambda records: share_done(records) > 0.1 and any(map(can_be_hit, running(records))))
    victim = next(filter(can_be_hit, running(read(root / LEDGER))))
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    print(f"demo: killed {victim.task}", flush=True)
    runner.until(lambda records: share_done(records) > 0.5)
    runner.kill()
    before, during = finished(root), [record.task for record in running(read(root / LEDGER))]
    print(f"demo: killed the runner; running: {', '.join(during) or 'none'}; finished: {len(before)}", flush=True)
    before_s = cpu_s()
    code = Runner(folder, ["experiment", f"resume_from={root}"]).ended()
    assert code == 0, f"the resumed experiment ended with {code}"
    after, again = finished(root), [name for name, count in starts(root).items() if count > 1]
    assert {name: after[name] for name in before} == before, "a finished stage has run again"
    assert {*again} <= {victim.task, *during}, f"{again} were started more than once"
    took, used = time.monotonic() - began, cpu_s() - before_s
    return root, (
        f"{len(after)} stages in {took / 60:.0f} minutes, on {machine_line(describe_machine())}; after the kill of the "
        f"runner, {used / 60:.0f} minutes of CPU for {len(after) - len(before)} of them. SIGKILL hit `{victim.task}`, "
        f"then the runner, when {len(before)} stages had finished: none of these ran again."
    )


def cpu_s() -> float:
    """Seconds of CPU of the children that have ended, and of theirs; what a killed runner had started is not in it."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def write_docs(root: Path, cost: str) -> None:
    """Put the table and the plot into the docs."""
    table = (root / "results.md").read_text().partition("\n")[2].replace("\n## ", "\n### ")
    shutil.copyfile(root / "kl.png", PICTURE)
    update_docs("experiment-demo", f"{cost}\n{table}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / f"experiment_demo_{time.strftime('%H%M%S')}")
    parser.add_argument("--update-docs", action="store_true")
    options = parser.parse_args()
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    root, cost = run(folder)
    print((root / "results.md").read_text())
    print(f"demo: {cost}\ndemo: {root / 'results.md'}, {root / 'kl.png'}")
    if options.update_docs:
        write_docs(root, cost)


if __name__ == "__main__":
    main()
