"""What `async_vs_trl.py` compares: the sides, the settings that they train, and the rounds in which they take turns."""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.control import PAIRS, control_s
from benchmarks.setups.sums import Setting
from benchmarks.sides import CORES, Run, Side, run_side

RUN_S = 14.0  # about what one run takes on 2 quiet cores, for the estimate that is printed first
SCORE_CONCURRENCY = 16

TRL = Side(name="TRL, one process")
TRL_PASSIVE = Side(name="TRL, one process, waiting threads sleep", passive=True)
TRL_UNPADDED = Side(name="TRL, one process, without padding", unpadded=True)
ONE_THREAD = Side(name="TRL, one thread", threads=1)
ONE_WORKER = Side(name="server + 1 worker", workers=1)
ONE_WORKER_ALL_THREADS = Side(
    name=f"server ({CORES} threads) + 1 worker", workers=1, server_threads=CORES, passive=True
)
TWO_WORKERS_ALL_THREADS = Side(
    name=f"server ({CORES} threads) + 2 workers",
    workers=2,
    server_threads=CORES,
    passive=True,
    flags=("--groups-per-claim", "16"),
)
DEFAULTS = Side(name="server + 2 workers, no flags", workers=2)
TWO_WORKERS = Side(name="server + 2 workers", workers=2, flags=("--groups-per-claim", "8"))
TWO_WORKERS_PADDED = replace(
    TWO_WORKERS, name="server + 2 workers, --padding trl", flags=(*TWO_WORKERS.flags, "--padding", "trl")
)
ONE_WIDE_WORKER = Side(  # as much at once as the default bound of staleness admits
    name="server + 1 worker, 20 groups a claim", workers=1, flags=("--groups-per-claim", "20")
)
SYNCHRONOUS = Side(name="server + 1 worker, --max-staleness 0", workers=1, flags=("--max-staleness", "0"))
SLOW_REWARD_WORKERS = Side(  # as with a reward that says `thread_safe = True`
    name="server + 2 workers, 16 calls at a time", workers=2, flags=("--score-concurrency", str(SCORE_CONCURRENCY))
)

EVEN = Setting(answer_tokens=48, steps=40)
TWICE = replace(EVEN, num_iterations=2)  # a worker generates a batch sooner than the server trains on it
BALANCED = Setting(prompts=8, answer_tokens=48, steps=25)
SLOW_REWARD = Setting(prompts=8, steps=26, reward_call_s=0.3, reward_item_s=0.01, accuracy=True)
LONG_TAIL = Setting(  # loss_type grpo: in TRL's dapo the filler of long answers outweighs what is to be learnt
    prompts=4,
    generations=4,
    answer_tokens=20,
    long_share=0.1,
    steps=60,
    learning_rate=8e-4,
    loss_type="grpo",
    accuracy=True,
)
LEARNING = Setting(steps=80, accuracy=True)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(slots=True)
class Progress:
    """Says after each run how many are left, and about how long they take."""

    runs: int
    done: int = 0
    started: float = field(default_factory=time.monotonic)

    def begin(self) -> None:
        say(f"{self.runs} runs: about {self.runs * RUN_S / 60:.0f} minutes on 2 quiet cores")

    def run_done(self, text: str) -> None:
        self.done += 1
        elapsed = time.monotonic() - self.started
        left_s = elapsed / self.done * (self.runs - self.done)
        say(f"[{self.done}/{self.runs}, {elapsed / 60:.0f} min, {left_s / 60:.0f} min left] {text}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """A setting, and the sides that train it in turn."""

    name: str
    setting: Setting
    sides: tuple[Side, ...]
    rounds: int = PAIRS
    work: Setting | None = None  # what one thread of TRL does to measure the total work; None: not measured
    runs: dict[str, list[Run]] = field(default_factory=dict)  # by the name of the side
    products_s: list[float] = field(default_factory=list)  # products of matrices, before each run and after the last

    def todo(self) -> list[tuple[Side, Setting]]:
        """What a round runs."""
        work = [(ONE_THREAD, self.work)] if self.work is not None else []
        return [*((side, self.setting) for side in self.sides), *work]

    def round(self, folder: Path, repeat: int, progress: Progress) -> None:
        """Run all sides, in each round from another seed: what one run learns in these steps is partly luck."""
        for side, setting in self.todo():
            self.products_s.append(control_s())
            name = f"{self.name} {side.name} {repeat}".replace(" ", "-").replace(",", "")
            run = run_side(side, replace(setting, seed=setting.seed + repeat), folder / name)
            self.runs.setdefault(side.name, []).append(run)
            progress.run_done(f"{self.name}: {side.name}: {run.step_s:.3f} s a step, {run.step_cpu_s:.3f} s of CPU")
        self.products_s.append(control_s())

    @property
    def asynchronous(self) -> tuple[Side, ...]:
        return tuple(side for side in self.sides if side.workers)

    @property
    def controls(self) -> list[float]:
        """Seconds of equal work that was done between the runs.

        Where rewards wait, and nearly nothing is computed, that is a step of TRL's, which waits as long in each round.
        """
        return self.trl_step_s() if self.setting.reward_call_s else self.products_s

    def trl(self) -> list[Run]:
        """The faster run of plain TRL with all cores, in each round."""
        plain = [self.runs[side.name] for side in self.sides if not side.workers and not side.unpadded]
        return [min(runs, key=lambda run: run.step_s) for runs in zip(*plain, strict=True)]

    def trl_step_s(self) -> list[float]:
        """Seconds of a step of plain TRL in each round, with one thread where that is faster and waits as long."""
        steps = [run.step_s for run in self.trl()]
        if self.work is None or self.work.reward_call_s != self.setting.reward_call_s:
            return steps
        return [min(step_s, run.step_s) for step_s, run in zip(steps, self.runs[ONE_THREAD.name], strict=True)]

    def speedups(self, side: Side, slow_s: list[float]) -> list[float]:
        return [step_s / run.step_s for run, step_s in zip(self.runs[side.name], slow_s, strict=True)]

    def limit(self) -> float | None:
        """Speed-up over TRL if the same work filled every core: TRL's step over total work / cores.

        Or over the time that so many rewards need at so many at a time, where that is longer.
        """
        if ONE_THREAD.name not in self.runs:
            return None
        work_s = statistics.median(run.step_s for run in self.runs[ONE_THREAD.name])
        return statistics.median(self.trl_step_s()) / max(work_s / CORES, self._scoring_s())

    def _scoring_s(self) -> float:
        setting, side = self.setting, self.asynchronous[0]
        group_s = setting.reward_call_s + setting.generations * setting.reward_item_s
        return setting.prompts * group_s / (SCORE_CONCURRENCY * side.workers)


def contests(*, quick: bool) -> dict[str, Contest]:
    if quick:
        return {
            "even": Contest(name="48-token answers", setting=replace(EVEN, steps=7), sides=(TRL, ONE_WORKER)),
            "slow": Contest(
                name="slow reward",
                setting=replace(SLOW_REWARD, steps=7),
                sides=(TRL, SLOW_REWARD_WORKERS, DEFAULTS),
            ),
        }
    no_sleep = replace(SLOW_REWARD, steps=15, reward_call_s=0.0, reward_item_s=0.0, accuracy=False)
    return {
        "even": Contest(
            name="48-token answers",
            setting=EVEN,
            sides=(TRL, TRL_PASSIVE, ONE_WORKER, ONE_WORKER_ALL_THREADS, TWO_WORKERS_ALL_THREADS),
            work=EVEN,
        ),
        "waiting": Contest(name="two steps on each batch", setting=TWICE, sides=(ONE_WORKER,)),
        "overlap": Contest(name="generation as long as training", setting=BALANCED, sides=(SYNCHRONOUS, ONE_WORKER)),
        "slow": Contest(
            name="slow reward", setting=SLOW_REWARD, sides=(TRL, SLOW_REWARD_WORKERS, DEFAULTS), work=no_sleep
        ),
        "tail": Contest(
            name="long tail",
            setting=LONG_TAIL,
            sides=(TRL, TRL_PASSIVE, TRL_UNPADDED, TWO_WORKERS, TWO_WORKERS_PADDED, ONE_WIDE_WORKER),
            work=replace(LONG_TAIL, steps=12, accuracy=False),
        ),
    }
