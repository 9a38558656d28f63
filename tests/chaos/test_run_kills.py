"""The real thing: the tiny recipe with two workers, while random processes of the run are killed.

What was killed is started again as an operator would: workers by the launcher, everything else with `--resume`.
The seed of the kills is printed; `ASYNC_GRPO_CHAOS_SEED` sets it.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from async_grpo.archive.audit import audit

ROOT = Path(__file__).resolve().parents[2]
GROUPS_A_STEP = 16
STOP_S = 30.0  # for what a killed launcher leaves behind to end in good order
STUCK_S = 120.0  # without a step, although nothing is killed

SETUP = """\
import importlib.util

spec = importlib.util.spec_from_file_location("recipe", {recipe!r})
recipe = importlib.util.module_from_spec(spec)
spec.loader.exec_module(recipe)


def get_trainer():
    trainer = recipe.get_trainer()
    trainer.args.save_steps = {save_steps}
    return trainer
"""


class KilledRun:
    """A run of the tiny recipe, the pids that it consists of, and what was done to them."""

    def __init__(self, folder: Path, *, steps: int, save_steps: int) -> None:
        self.folder, self.steps = folder, steps
        self.run_dir = folder / "worker"
        self.setup = folder / "setup.py"
        recipe = str(ROOT / "src" / "app" / "trainer_setup_tiny.py")
        self.setup.write_text(SETUP.format(recipe=recipe, save_steps=save_steps))
        self.kills: list[str] = []
        self.starts = 0
        self.anomalies: list[str] = []
        self._launcher: subprocess.Popen[bytes] | None = None
        self._started: list[psutil.Process] = []

    def start(self) -> None:
        """As an operator would: the first time, and then again and again with --resume."""
        options = ["--steps", str(self.steps), "--run-dir", str(self.run_dir), "--max-attempts", "10"]
        resume = ["--resume"] if self.starts else []
        self.starts += 1
        with (self.folder / f"output-{self.starts:03d}.txt").open("wb") as output:
            self._launcher = subprocess.Popen(
                [sys.executable, "-m", "async_grpo.cli", "train", str(self.setup), "-n", "2", *options, *resume],
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def output(self) -> str:
        return (self.folder / f"output-{self.starts:03d}.txt").read_text(errors="replace")

    def ended(self) -> int | None:
        """Exit code of the launcher, or None."""
        assert self._launcher is not None
        return self._launcher.poll()

    def processes(self) -> dict[str, psutil.Process]:
        """What the run consists of now: `launcher`, `server`, `worker 1`, ..."""
        assert self._launcher is not None
        if self._launcher.poll() is not None:
            return {}
        found = {"launcher": psutil.Process(self._launcher.pid)}
        for child in found["launcher"].children():
            try:
                arguments = child.cmdline()
            except psutil.Error:
                continue
            if "server" in arguments:
                found["server"] = child
            elif "--id" in arguments:
                found[f"worker {arguments[arguments.index('--id') + 1]}"] = child
        self._started += found.values()
        return found

    def kill(self, role: str, process: psutil.Process | None = None) -> bool:
        """SIGKILL to one process of the run, if it is alive."""
        victim = process or self.processes().get(role)
        if victim is None:
            return False
        try:
            victim.kill()  # psutil looks at the start time, so a recycled pid is safe
        except psutil.NoSuchProcess:
            return False
        self.kills.append(role)
        return True

    def steps_used(self) -> int:
        """Lines of batches in the record, of all processes together."""
        record = self.run_dir / "consumed.jsonl"
        return record.read_text().count('"step"') if record.exists() else 0

    def await_step(self, more: int = 1) -> bool:
        """Wait until training continues; False when the run ended instead."""
        before, deadline = self.steps_used(), time.monotonic() + STUCK_S
        while self.steps_used() < before + more:
            if self.ended() is not None:
                return False
            assert time.monotonic() < deadline, f"no step in {STUCK_S:.0f} s:\n{self.output()[-3000:]}"
            time.sleep(0.05)
        return True

    def await_end(self) -> int:
        """Exit code, once nothing of what was started is left."""
        deadline = time.monotonic() + STUCK_S + self.steps
        while (code := self.ended()) is None:
            self.processes()
            assert time.monotonic() < deadline, f"the run does not end:\n{self.output()[-3000:]}"
            time.sleep(0.05)
        _, alive = psutil.wait_procs(set(self._started), timeout=STOP_S)
        assert not alive, f"left behind {STOP_S:.0f} s after the launcher: {[p.cmdline() for p in alive]}"
        return code

    def finished(self) -> bool:
        state = self.run_dir / "run.json"
        return state.exists() and json.loads(state.read_text())["state"] == "finished"

    def look(self) -> None:
        """Audit the run as it is, in the middle of everything."""
        if (self.run_dir / "run.json").exists():
            self.anomalies += audit(self.run_dir).anomalies

    def end_all(self) -> None:
        self.processes()
        for process in set(self._started):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if self._launcher is not None:
            self._launcher.wait()


@contextmanager
def killed_run(folder: Path, *, steps: int, save_steps: int) -> Iterator[KilledRun]:
    run = KilledRun(folder, steps=steps, save_steps=save_steps)
    try:
        run.start()
        yield run
    finally:
        run.end_all()


def start_again_until_it_finishes(run: KilledRun) -> None:
    for _ in range(5):
        run.await_end()
        if run.finished():
            return
        run.start()
    raise AssertionError(f"not finished without any kill:\n{run.output()[-3000:]}")


def check_result(run: KilledRun, *, accuracy: float | None) -> None:
    report = audit(run.run_dir)
    assert not run.anomalies, f"while it ran: {run.anomalies[:20]}"
    assert report.clean, report.anomalies[:20]
    assert report.steps == run.steps
    used = sorted(group.seq for group in report.groups if group.state == "used")
    assert len(used) == run.steps * GROUPS_A_STEP
    between = [group for group in report.groups[: used[-1]] if group.state not in ("used", "dropped", "open")]
    assert not between, f"neither used nor accounted for: {between[:5]}"
    assert max(report.staleness) <= 4
    summary = json.loads((run.run_dir / "summary.json").read_text())
    print(
        f"{len(run.kills)} kills ({', '.join(f'{run.kills.count(r)} {r}' for r in sorted(set(run.kills)))}), "
        f"{run.starts} starts; {report.attempts()} attempts, {report.staleness} staleness, "
        f"{report.duplicates} duplicates, {report.count('dropped')} dropped, "
        f"{report.taken_back} of versions taken back; accuracy {summary.get('accuracy_after')}"
    )
    if accuracy is not None:
        assert summary["accuracy_after"] >= accuracy


def strike(run: KilledRun, rng: random.Random) -> bool:
    """Kill one process at random, now and then another with it or a moment later. True if the run has ended."""
    victims = run.processes()
    if not victims:
        return True
    chosen = rng.sample(sorted(victims), k=min(len(victims), rng.choice((1, 1, 1, 2))))
    for role in chosen:
        run.kill(role, victims[role])
    run.look()
    if "launcher" in chosen and rng.random() < 0.5:  # what it leaves behind is ending in good order meanwhile
        time.sleep(rng.uniform(0, 0.5))
        for role in sorted(victims.keys() - set(chosen)):
            run.kill(role, victims[role])
    return bool({"launcher", "server"} & set(chosen)) or run.ended() is not None


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    seed = int(os.environ.get("ASYNC_GRPO_CHAOS_SEED", random.SystemRandom().randrange(10**6)))
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.mark.slow
def test_a_worker_the_server_and_the_launcher_are_killed_once_each(tmp_path: Path, rng: random.Random) -> None:
    with killed_run(tmp_path, steps=24, save_steps=5) as run:
        for role in rng.sample(["worker 1", "server", "launcher"], 3):
            if not run.await_step(more=rng.randint(1, 6)):
                break
            run.kill(role)
            run.look()
            if not role.startswith("worker"):
                run.await_end()
                run.look()
                run.start()
        start_again_until_it_finishes(run)
        check_result(run, accuracy=None)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_200_steps_with_a_kill_every_two_seconds(tmp_path: Path, rng: random.Random) -> None:
    """The two seconds are counted while it trains; one start in five is cut short as well."""
    with killed_run(tmp_path, steps=200, save_steps=10) as run:
        deadline = time.monotonic() + 1800
        while not run.finished():
            assert time.monotonic() < deadline, f"not finished after {run.starts} starts and {len(run.kills)} kills"
            if rng.random() < 0.2:
                time.sleep(rng.uniform(0, 8))  # while it loads
            elif run.await_step():
                time.sleep(2.0)
            if strike(run, rng):
                run.await_end()
                run.look()
                if not run.finished():
                    run.start()
        run.await_end()
        check_result(run, accuracy=0.9)
