"""Steps whose micro-batches begin as their groups come, against steps that wait for all of their groups.

    python benchmarks/as_they_come.py [--quick] [--rows even,tail] [--json FILE] [--update-docs]

Both are synchronous runs (`--max-staleness 0`) of a server and its workers, with one thread each, of the same prompts,
batch, answers and optimizer steps: four micro-batches a step. They differ in `steps_per_generation`, which is 4 or 1.
The loss is dr_grpo, whose gradients are the same either way. They run in turn, in five rounds, each from another seed,
and a speed-up is that of two runs of one round. A step's time is counted from the end of the third step on.

    even    answers of one length; training takes about as long as the one worker's generation
    tail    1 % of the answers are 8 times as long; one worker, which has all groups of a step in one batch
    reward  (where it is asked for) each call of the reward function waits; two workers, one call a group

The limit beside a speed-up is that of a step whose training is hidden behind the wait for groups, but for the last
micro-batch: 1 / (w + (1 - w) / 4), where w is the share of a step in which the trainer waited without.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from async_grpo.log import logger

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.contests import Progress
from benchmarks.control import PAIRS, control_s
from benchmarks.setups.sums import Setting
from benchmarks.sides import Run, Side, run_side
from benchmarks.table import ROOT, Row, as_text, keep, row

MEMORY = Path("/dev/shm")
RESULT = ROOT / "benchmarks" / "results" / "as_they_come.json"
TARGET = ">= 1.3"
PARTS = 4
WHOLE = Setting(prompts=96, generations=8, answer_tokens=48, steps=7, micro_batches=PARTS, loss_type="dr_grpo")


@dataclass(slots=True)
class Case:
    """A workload, and what its runs took."""

    what: str
    setting: Setting
    workers: int
    flags: tuple[str, ...] = ()
    whole: list[Run] = field(default_factory=list)
    parts: list[Run] = field(default_factory=list)
    controls: list[float] = field(default_factory=list)

    def round(self, folder: Path, repeat: int, progress: Progress) -> None:
        """Run without and with, in turn the one and the other first."""
        sides = [(self.whole, False), (self.parts, True)]
        for runs, as_they_come in sides if repeat % 2 == 0 else reversed(sides):
            self.controls.append(control_s())
            side = Side(name=self.what, workers=self.workers, threads=1, flags=("--max-staleness", "0", *self.flags))
            setting = replace(self.setting, seed=self.setting.seed + repeat, as_they_come=as_they_come)
            run = run_side(side, setting, folder / f"{self.what[:8]}-{repeat}-{as_they_come}".replace(" ", "-"))
            runs.append(run)
            way = "as they come" if as_they_come else "all at once"
            progress.run_done(f"{self.what}: {way}: {run.step_s:.3f} s a step, {run.step_cpu_s:.3f} s of CPU")
        self.controls.append(control_s())

    def rows(self) -> Iterator[Row]:
        waits = statistics.median(run.mean("async/trainer_wait_fraction") for run in self.whole)
        ratios = [before.step_s / after.step_s for before, after in zip(self.whole, self.parts, strict=True)]
        yield row(
            f"speed-up, {self.what}",
            ratios,
            "x",
            target=TARGET,
            limit=1 / (waits + (1 - waits) / PARTS),
            controls=self.controls,
            note=f"without, the trainer waits for {waits:.0%} of a step",
        )
        for way, runs in (("all at once", self.whole), ("as they come", self.parts)):
            yield row(f"a step, {self.what}, {way}", [run.step_s for run in runs], "s", controls=self.controls)
            used = [run.step_cpu_s for run in runs]
            yield row(f"CPU time of a step, {self.what}, {way}", used, "s", controls=self.controls)


def cases() -> dict[str, Case]:
    tail = replace(WHOLE, prompts=64, answer_tokens=20, long_share=0.01, steps=10)
    waits = replace(WHOLE, prompts=32, steps=9, reward_call_s=0.03)
    return {
        "even": Case("answers of 48 tokens, server + 1 worker", WHOLE, workers=1),
        "tail": Case(
            "1% of the answers 8 times as long, server + 1 worker", tail, workers=1, flags=("--groups-per-claim", "64")
        ),
        "reward": Case("reward waits 30 ms a group, server + 2 workers", waits, workers=2, flags=("--score-alone",)),
    }


def measure(chosen: Sequence[Case], rounds: int) -> Iterator[Row]:
    progress = Progress(2 * rounds * len(chosen))
    progress.begin()
    with tempfile.TemporaryDirectory(prefix="as-they-come-", dir=MEMORY if MEMORY.is_dir() else None) as folder:
        for repeat in range(rounds):
            for case in chosen:
                case.round(Path(folder), repeat, progress)
    for case in chosen:
        yield from case.rows()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round, nothing is written: a minute and a half")
    parser.add_argument("--rows", default="even,tail", metavar="NAMES", help=f"of {','.join(cases())}")
    parser.add_argument("--json", type=Path, default=RESULT, help=f"where the rows go (default: {RESULT.name})")
    parser.add_argument("--update-docs", action="store_true", help="put the table into the documentation")
    args = parser.parse_args()
    names = args.rows.split(",")
    if unknown := set(names) - set(cases()):
        parser.error(f"--rows: there is no {', '.join(sorted(unknown))}")
    logger.remove()
    logger.add(sys.stderr, level="INFO")
    rows = list(measure([cases()[name] for name in names], rounds=1 if args.quick else PAIRS))
    print(as_text(rows))
    if not args.quick:
        keep("as-they-come", args.json, rows, in_docs=args.update_docs)


if __name__ == "__main__":
    main()
