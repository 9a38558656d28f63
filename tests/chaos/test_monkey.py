"""The monkey: faults from a table, in any order, against real runs of a tiny model.

After each, the audit is clean or says what is really lost, the weights are those of a run that nothing disturbed, and
the user's files are as they were. hypothesis shrinks what it finds to the shortest sequence.

    MONKEY_SECONDS=600    how long (what is under way comes to its end: up to three runs, or the shrinking)
    MONKEY_SEED=…         the first seed; each is for a few runs, and is printed
    MONKEY_JSON=FILE      where to write the counts
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from monkey_faults import FAULTS, mount_small_disk, unmount
from monkey_run import MonkeyRun, undisturbed

SECONDS = float(os.environ.get("MONKEY_SECONDS", "600"))
FAULTS_A_RUN = 8
NOTHING = "nothing"  # what hypothesis begins with, and shrinks to
SETTINGS = settings(
    max_examples=3,  # then the next seed; of 10 or more, hypothesis would try each beginning with nothing behind it
    stateful_step_count=FAULTS_A_RUN,
    database=None,
    deadline=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


class Monkey(RuleBasedStateMachine):
    """One run, and what is done to it."""

    folder: Path
    expected: dict[int, str]
    counts: Counter[str]

    def __init__(self) -> None:
        super().__init__()
        folder = self.folder / f"run-{time.monotonic_ns()}"
        folder.mkdir()
        self.why_no_small_disk = mount_small_disk(folder)
        self.run = MonkeyRun(folder, self.expected)
        self.counts["runs"] += 1
        self.sound = True

    @rule(
        name=st.sampled_from([NOTHING, *FAULTS]), pick=st.integers(0, 999), pause=st.sampled_from([0.0, 0.2, 1.0, 3.0])
    )
    def strike(self, name: str, pick: int, pause: float) -> None:
        with self._judged():
            self.run.go_on()
            time.sleep(pause)
            if name != NOTHING and not self.run.finished() and FAULTS[name].possible(self.run):
                self.counts[name] += 1
                print(f"  {name} ({pick})", flush=True)
                FAULTS[name].strike(self.run, random.Random(pick))
            self.run.check()

    def teardown(self) -> None:
        try:
            if self.sound:
                with self._judged():
                    self.run.finish()
                    self.run.check_end()
        finally:
            self.run.kill_all()
            self.counts["starts"] += self.run.starts
            unmount(self.run.folder)
            shutil.rmtree(self.run.folder, ignore_errors=True)

    @contextmanager
    def _judged(self) -> Iterator[None]:
        """Keep the files of a run in which something is wrong, and say what."""
        try:
            yield
        except BaseException:
            self.sound = False
            traceback.print_exc(limit=-3)
            kept = self.folder / f"kept-{self.run.folder.name}"
            shutil.copytree(self.run.folder, kept, symlinks=True, ignore=_special)
            print(f"{self.run.said()}\nits files: {kept}", flush=True)
            raise


def _special(folder: str, names: list[str]) -> list[str]:
    """What cannot be copied, or only in hours."""
    paths = [Path(folder) / name for name in names]
    return [path.name for path in paths if not (path.is_dir() or path.is_file()) or path.stat().st_size > 1 << 24]


@pytest.fixture(scope="module")
def counts() -> Iterator[Counter[str]]:
    found: Counter[str] = Counter()
    began = time.monotonic()
    yield found
    if "MONKEY_JSON" in os.environ:
        found["seconds"] = round(time.monotonic() - began)
        Path(os.environ["MONKEY_JSON"]).write_text(json.dumps(found) + "\n")


@pytest.mark.slow
@pytest.mark.timeout(0)  # its own deadlines bound every wait
def test_the_monkey_breaks_nothing(tmp_path: Path, counts: Counter[str]) -> None:
    number = int(os.environ.get("MONKEY_SEED", random.SystemRandom().randrange(10**6)))
    members = {"folder": tmp_path, "expected": undisturbed(tmp_path / "undisturbed"), "counts": counts}
    ends = time.monotonic() + SECONDS
    while time.monotonic() < ends:
        print(f"MONKEY_SEED={number}", flush=True)
        machine = seed(number)(type("SeededMonkey", (Monkey,), members))
        run_state_machine_as_test(machine, settings=SETTINGS)
        number += 1
    print(dict(counts), flush=True)
    assert counts["runs"] > 0
