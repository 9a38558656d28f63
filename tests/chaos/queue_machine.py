"""A model-based test: hypothesis plays server, workers, operator, kernel and disk; all always drains exactly once.

Server and workers are objects of one process. A killed one just loses its lock, at once or before any of its file
operations; what it was going to do is never done.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import traceback
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from queue_harness import Log, Trainer, WrappedFiles, arguments, claim_now, execute, leftovers, replay

from async_grpo.errors import DiskFullError
from async_grpo.queue import Claim, WorkerQueue, retry_given_up
from async_grpo.queue.wakeups import EVERYTHING

JOBS = 6
WORKERS = (1, 2)
SERVER, NOBODY = 0, -1
TEMPORARY = "/dev/shm" if Path("/dev/shm").is_dir() else None

workers = st.sampled_from(WORKERS)
moments = st.integers(0, 8)  # operations that someone who is killed has done before


class Killed(BaseException):
    """The process is gone: nothing catches it but the test."""


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=TEMPORARY))
        self.root = self.folder / "q"
        self.log = Log(self.folder / "log")
        self.workers: dict[int, WorkerQueue] = {}
        self.claims: dict[int, list[Claim]] = {}
        self.opened: list[WrappedFiles] = []
        self.full = False
        self.damaged = False
        self.doomed, self.left_until_kill = NOBODY, 0
        self.mishaps: Counter[int] = Counter()  # failures and deaths of a job

    def _before(self, who: int, operation: str, path: str, data: bytes) -> None:
        if self.full and operation == "create":
            (self.root / path).write_bytes(data[:9])
            raise OSError(28, "No space left on device", path)
        if who == self.doomed:
            if self.left_until_kill == 0:
                raise Killed
            self.left_until_kill -= 1

    def _files(self, who: int) -> WrappedFiles:
        self.root.mkdir(mode=0o700, exist_ok=True)
        self.opened.append(WrappedFiles(self.root, partial(self._before, who)))
        return self.opened[-1]

    @initialize()
    def start(self) -> None:
        self.trainer = Trainer(
            self.root, JOBS, self.log, window=4, steps=10, watch_workers=False, files=self._files(SERVER)
        )

    @rule()
    def submit(self) -> None:
        with suppress(DiskFullError):
            self.trainer.submit()

    @rule()
    def collect(self) -> None:
        with suppress(DiskFullError):
            self.trainer.collect()

    @rule()
    def checkpoint(self) -> None:
        self.trainer.checkpoint()

    @rule()
    def recover(self) -> None:
        self.trainer.queue.recover_dead()

    @rule(moment=st.none() | moments)
    def kill_server(self, moment: int | None) -> None:
        if moment is not None:
            self._doomed(SERVER, moment, self.trainer.collect)
        self.trainer.queue._lock.release()
        self.trainer.queue.close()
        try:
            self.start()
        except DiskFullError:  # as an operator would, make room and try again
            self.full = False
            self.start()

    def _start_worker(self, number: int) -> bool:
        if number not in self.workers:
            with suppress(DiskFullError):
                self.workers[number] = WorkerQueue.open(self.root, number, "cpu", files=self._files(number))
                self.claims[number] = []
        return number in self.workers

    @rule(number=workers, limit=st.integers(1, 3), told=st.booleans())
    def claim(self, number: int, limit: int, told: bool = False) -> None:
        """told: take what the pipe tells, if it tells anything; else look at the directory."""
        if self._start_worker(number):
            with suppress(DiskFullError):
                claim = WorkerQueue.claim if told else claim_now
                self.claims[number] += claim(self.workers[number], limit)

    @rule(lie=st.sampled_from(["lost", "stale", "garbage", "deleted"]))
    def the_pipe_lies(self, lie: str) -> None:
        pipe = self.trainer.queue._pipe
        told = {"stale": [f"{seq:010d}.a00" for seq in range(JOBS)], "garbage": ["x", "..", "9" * 15, "a00"]}
        if lie == "lost":
            pipe.take(EVERYTHING)
        elif lie == "deleted":
            pipe._path.unlink(missing_ok=True)
        pipe.announce(told.get(lie, []))

    def _claims_of(self, number: int) -> list[Claim]:
        """What a worker has; it claims something if it has nothing."""
        if not self.claims.get(number):
            self.submit()
            self.claim(number, 2)
        return self.claims.get(number, [])

    @rule(number=workers)
    def complete(self, number: int) -> None:
        if claims := self._claims_of(number):
            claim = claims[0]
            fair = self.damaged or claim.attempt <= self.mishaps[claim.job.seq]
            assert fair, f"attempt {claim.attempt} of a job that failed {self.mishaps[claim.job.seq]} times"
            with suppress(DiskFullError):
                execute(self.workers[number], claim, self.log)
                claims.pop(0)

    @rule(number=workers)
    def fail(self, number: int) -> None:
        if claims := self._claims_of(number):
            with suppress(DiskFullError):
                self.workers[number].fail(claims[0], "it failed")
                self.mishaps[claims.pop(0).job.seq] += 1

    @rule(number=workers)
    def hand_back(self, number: int) -> None:
        if claims := self._claims_of(number):
            self.workers[number].hand_back(claims.pop(0))

    @rule(number=workers, moment=moments, act=st.sampled_from(["wait", "claim", "complete", "fail", "hand_back"]))
    def kill_worker(self, number: int, moment: int, act: str) -> None:
        self._claims_of(number)
        if number not in self.workers:
            return
        claimed = self._claimed_by(number)
        acts: dict[str, Any] = {"wait": int, "claim": lambda: self.claim(number, 2)}
        self._doomed(number, moment, acts.get(act) or (lambda: getattr(self, act)(number)))
        self.mishaps.update(claimed | self._claimed_by(number))
        del self.claims[number]
        worker = self.workers.pop(number)
        worker._lock.release()
        worker._pipe.close()

    def _claimed_by(self, number: int) -> set[int]:
        return {int(path.name[:10]) for path in (self.root / "queue").glob(f"*_processing_by_dev{number}.*")}

    def _doomed(self, who: int, moment: int, act: Any) -> None:
        self.doomed, self.left_until_kill = who, moment
        with suppress(Killed, DiskFullError):
            act()
        self.doomed = NOBODY

    @rule(number=workers)
    def result_twice(self, number: int) -> None:
        """A worker finishes a job that somebody issued again, because its file was lost meanwhile."""
        if claims := self._claims_of(number):
            (self.root / "queue" / str(claims[0].name)).unlink(missing_ok=True)
            self.damaged = True
            for _ in range(4):
                self.collect()
            self.complete(number)

    @rule()
    def fill_disk(self) -> None:
        self.full = True

    @precondition(lambda self: self.full)
    @rule()
    def make_room(self) -> None:
        self.full = False

    @rule(which=st.integers(0, 20), damage=st.sampled_from(["cut", "flip", "remove"]))
    def damage_a_file(self, which: int, damage: str) -> None:
        files = sorted((self.root / "queue").iterdir())
        if not files:
            return
        self.damaged = True
        file = files[which % len(files)]
        data = bytearray(file.read_bytes())
        if damage == "remove":
            file.unlink()
        elif damage == "cut":
            file.write_bytes(data[: which * len(data) // 21])
        elif data:
            data[which * (len(data) - 1) // 20] ^= 0x40
            file.write_bytes(data)

    @rule(seq=st.integers(0, JOBS - 1))
    def operator_retries(self, seq: int) -> None:
        retry_given_up(self.root, seq)

    def teardown(self) -> None:
        try:
            if hasattr(self, "trainer"):
                self._drain()
                self._check()
        finally:
            for worker in self.workers.values():
                worker.close()
            if hasattr(self, "trainer"):
                self.trainer.queue.close()
            for files in self.opened:
                files.really_close()
            self.log.close()
            shutil.rmtree(self.folder)

    def _drain(self) -> None:
        self.full = False
        for _ in range(60):
            for number in WORKERS:
                self.claim(number, 3)
                while self.claims[number]:
                    self.complete(number)
            self.trainer.submit()
            self.trainer.collect()
            if self.trainer.done and not any("a0" in name and "pending" in name for name in leftovers(self.root)):
                break
        self.trainer.collect()
        assert self.trainer.done, f"did not drain: {leftovers(self.root)}"

    def _check(self) -> None:
        told = replay(self.folder / "log", JOBS)
        if not self.damaged:
            assert not told["healing"], f"mended {told['healing']} though nothing was damaged"
            assert not told["regenerated"], "a group that had been used was generated again"
            for seq in told["given_up"]:
                assert self.mishaps[seq] >= 3, f"job {seq} was given up after {self.mishaps[seq]} failures"
        assert not leftovers(self.root), leftovers(self.root)


def machine_settings(examples: int, steps: int = 40) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
        database=None,
        phases=(Phase.generate,),
    )


def main() -> None:
    options = arguments(examples=300)
    machine = seed(options.seed)(QueueMachine)
    run_state_machine_as_test(machine, settings=machine_settings(options.examples))  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    try:
        main()
    except Exception as error:  # noqa: BLE001 - whatever hypothesis found
        traceback.print_exception(error)
        sys.exit(1)
