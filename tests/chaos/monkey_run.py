"""One real run for the monkey, with its operator: who starts it again, does what its messages ask, and judges it.

The run is deterministic, so whatever happens to it, the weights of each checkpoint are those of a run that nothing
disturbed. Only a finished group that was destroyed while no server lived may change them, and then the log says so.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path

import psutil

from async_grpo.archive import checkpoint_folders
from async_grpo.archive.audit import audit
from async_grpo.archive.checkpoint_folders import Checkpoint
from async_grpo.errors import RunDirError
from async_grpo.rundir.paths import FINISHED, RunDir
from kit.runs import SETUP, Command

STEPS = 40
OPTIONS = ("--steps", str(STEPS), "-n", "2", "--deterministic", "--max-attempts", "1000", "--stop-grace", "60")
DEADLINE_S = 180.0  # for anything to change in the files of a live run, and for its processes to end
OTHER_VERSION = "whose weights are no more"  # the server's warning that a group was sampled by a later version
STARTS = 8  # until a run goes on, each after doing what the last one asked for
DISK_BYTES = 64 << 20


def weights(checkpoint: Path) -> str:
    return hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()


def undisturbed(folder: Path) -> dict[int, str]:
    """The weights after each step of a run that nothing happens to."""
    run = MonkeyRun(folder, {}, save_steps=1)
    run.finish()
    return {found.state.step: weights(found.path) for found in run.checkpoints()}


class MonkeyRun:
    """The run in `folder/home`, and what was done to it."""

    def __init__(self, folder: Path, expected: dict[int, str], save_steps: int = 4) -> None:
        self.folder, self.expected = folder, expected
        grpo = json.dumps({"save_steps": save_steps})
        self._env = {"OMP_NUM_THREADS": "1", "TEST_REWARD_S": "0.1", "TEST_GRPO": grpo}
        self.home, self.elsewhere, self._aside = (folder / name for name in ("home", "elsewhere", "aside"))
        self.run_dir, self.outputs = self.home / "worker", self.home / "checkpoints"
        for path in (self.home, self.elsewhere, self._aside):
            path.mkdir(parents=True)
        self.mine: dict[Path, bytes] = {}  # the user's files, which nobody may touch
        self.victim = self.plant_mine(folder / "victim.txt")
        self.obstacles: dict[Path, Path | None] = {}  # planted -> what was in its place
        self.torn: set[Path] = set()  # checkpoints
        self.may_be_told: set[str] = set()  # patterns of anomalies: what is really lost
        self.hit_groups = False  # files of the queue
        self.starts = 0
        self._launcher: Command | None = None
        self._seen: set[psutil.Process] = set()

    # --- processes

    def start(self, cwd: Path | None = None) -> None:
        arguments = [*OPTIONS, "--run-dir", str(self.run_dir), *(["--resume"] if self._has_begun() else [])]
        self.starts += 1
        self._launcher = Command(["train", str(SETUP), *arguments], cwd or self.home, **self._env)

    def processes(self) -> dict[str, psutil.Process]:
        """The live ones: `launcher`, `server`, `worker 1`, …"""
        if self._launcher is None or self._launcher.process.poll() is not None:
            return {}
        found = {"launcher": psutil.Process(self._launcher.process.pid)}
        for child in found["launcher"].children():
            with suppress(psutil.Error):
                words = child.cmdline()
                name = f"worker {words[words.index('--id') + 1]}" if "--id" in words else "server"
                found[name] = child
        self._seen |= set(found.values())
        return found

    def await_end(self) -> None:
        """Wait until nothing of the run lives."""
        deadline = time.monotonic() + DEADLINE_S
        while self.processes():
            assert time.monotonic() < deadline, f"the run does not end:\n{self.said()}"
            time.sleep(0.05)
        _, alive = psutil.wait_procs(self._seen, timeout=DEADLINE_S)
        assert not alive, f"left behind by the launcher: {[process.cmdline() for process in alive]}"

    def kill_all(self) -> None:
        self.processes()
        for process in self._seen:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if self._launcher is not None:
            self._launcher.wait()

    # --- the operator

    def go_on(self, wait: bool = True) -> None:
        """See that the run trains: start it where it has ended, after doing what it asked for."""
        for _ in range(STARTS):
            if self.processes() and (not wait or self._await_change()):
                return
            if self.finished():
                return
            self.await_end()
            self._obey()
            self.start()
        raise AssertionError(f"it does not go on after {STARTS} starts:\n{self.said()}")

    def finish(self) -> None:
        for _ in range(STARTS):
            self.go_on(wait=False)
            self.await_end()
            if self.finished():
                return
        raise AssertionError(f"not finished:\n{self.said()}")

    def finished(self) -> bool:
        try:
            state = RunDir(self.run_dir).read_state()
        except RunDirError:
            return False
        return not self.processes() and state is not None and state.state == FINISHED and state.step == STEPS

    def said(self) -> str:
        return self._launcher.output[-4000:] if self._launcher is not None else ""

    def _has_begun(self) -> bool:
        return os.path.lexists(self.run_dir / "run.json")

    def _obey(self) -> None:
        """Take away what the last words of the run name: what was planted, and torn checkpoints."""
        said = self.said()
        for path in [path for path in self.obstacles if str(path) in said]:
            self.put_back(path)
        for path in [path for path in self.torn if f"Move {path} away" in said]:
            path.rename(self._aside / f"torn-{time.monotonic_ns()}")
            self.torn.remove(path)

    def _await_change(self) -> bool:
        """Wait until some file of the run is new, gone, or of another size; False when the run ended instead."""
        before, deadline = self._tree(), time.monotonic() + DEADLINE_S
        while self._tree() == before:
            if not self.processes():
                return False
            assert time.monotonic() < deadline, f"nothing happens in {DEADLINE_S:.0f} s:\n{self.said()}"
            time.sleep(0.05)
        return True

    def _tree(self) -> set[tuple[str, int]]:
        found = set()
        for folder in (self.run_dir, self.outputs):
            for inner, _, names in os.walk(folder):
                for name in names:
                    with suppress(FileNotFoundError):
                        found.add((f"{inner}/{name}", os.lstat(f"{inner}/{name}").st_size))
        return found

    # --- what is done to it

    def plant_mine(self, path: Path) -> Path:
        """A file of the user's own."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.mine[path] = f"mine, {path.name}\n".encode()
        path.write_bytes(self.mine[path])
        return path

    def put_aside(self, path: Path) -> None:
        """Make room for an obstacle at `path`."""
        before = self._aside / f"{path.name}-{time.monotonic_ns()}" if os.path.lexists(path) else None
        if before is not None:
            path.rename(before)
        self.obstacles[path] = before

    def put_back(self, path: Path) -> None:
        """Take the obstacle away; what was there before comes back, unless the run has made a new one."""
        before = self.obstacles.pop(path)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        if before is not None:
            before.rename(path)

    def checkpoints(self) -> list[Checkpoint]:
        """Those of the run that nobody tore."""
        state = RunDir(self.run_dir).read_state(accepted=True)
        found = checkpoint_folders.of_run(self.outputs, state.run_id) if state is not None else []
        return [checkpoint for checkpoint in found if checkpoint.path not in self.torn]

    # --- the judgement

    def check(self) -> None:
        for path, content in self.mine.items():
            assert path.is_file() and path.read_bytes() == content, f"the user's {path} was touched"
        if not self._has_begun() or self.run_dir / "run.json" in self.obstacles:
            return
        judged_by = ("consumed.jsonl", "server.lock")  # the record, and whether a server still writes it
        is_judged = not any(self.run_dir / name in self.obstacles for name in judged_by)
        for anomaly in audit(self.run_dir).anomalies if is_judged else ():
            assert any(re.match(pattern, anomaly) for pattern in self.may_be_told), f"the audit says: {anomaly}"
        for checkpoint in self.checkpoints() if self.expected and not self._may_differ() else ():
            with suppress(FileNotFoundError):  # it is being replaced
                found, step = weights(checkpoint.path), checkpoint.state.step
                assert step == 0 or found == self.expected[step], f"{checkpoint.path} has other weights"

    def _may_differ(self) -> bool:
        log = self.run_dir / "log_parameter_server.txt"
        return self.hit_groups and log.is_file() and OTHER_VERSION in log.read_text(errors="replace")

    def check_end(self) -> None:
        self.check()
        if self.outputs / f"checkpoint-{STEPS}" in self.torn:
            return
        newest = max(self.checkpoints(), key=lambda checkpoint: checkpoint.state.step)
        assert newest.state.step == STEPS
        used = newest.state.consumed_below + len(newest.state.consumed) - len(newest.state.unusable)
        assert used == STEPS * 4, f"{used} groups are in the last weights"
