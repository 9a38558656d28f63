"""Server, workers, operator and kernel of one queue: what they do in any order, and what holds whatever strikes.

Server and workers are objects of one process. One that is killed loses its lock, and nothing of what it was going to
do is done. A power cut kills all of them and takes the content of files that nobody synced. In the end all go on, and
every job was used exactly once, with the right data.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from queue_damage import KINDS
from queue_disk import FAULTS, NEED_ROOM, UNSYNCED, Fault, FaultyDisk, Killed, Site, StruckError
from queue_harness import Log, Trainer, claim_now, execute, leftovers, replay

from async_grpo.errors import DiskFullError
from async_grpo.queue import Claim, WorkerQueue, retry_given_up
from async_grpo.queue.wakeups import EVERYTHING

JOBS = 6
SERVER, PLAIN, DURABLE = 0, 1, 2

workers = st.sampled_from((PLAIN, DURABLE))


class QueueMachine(RuleBasedStateMachine):
    folder: Path  # of the folders of machines
    killed: ClassVar[set[tuple[Site, str]]] = set()  # in all of them

    def __init__(self, jobs: int = JOBS, window: int = 4, poison: int = -1, root: Path | None = None) -> None:
        super().__init__()
        self.jobs, self.window, self.poison = jobs, window, poison
        self.own = None if root else Path(tempfile.mkdtemp(dir=self.folder))
        self.root = root or self.own / "q"
        self.root.mkdir(mode=0o700, exist_ok=True)
        self.disk = FaultyDisk(self.root, DURABLE)
        self.disk.killed = self.killed
        self.log_path = self.root.parent / "log"
        self.log = Log(self.log_path)
        self.trainer: Trainer | Any = None
        self.workers: dict[int, WorkerQueue] = {}
        self.claims: dict[int, list[Claim]] = {}
        self.honest = False  # nobody but the queue touches its files
        self.times_full = 0
        self.mishaps: Counter[int] = Counter()  # failures of a job, deaths of its workers, damages to its files
        self.failures: Counter[int] = Counter()  # those that the name of its file must count
        self.damaged: set[int] = set()

    # What becomes of processes

    def _act(self, who: int, do: Callable[[], object]) -> None:
        """What a process does. It waits if the disk is full, and it ends if it is struck."""
        try:
            do()
        except DiskFullError:
            self.times_full += 1
            half_written = [*(self.root / "tmp" / (f"dev{who}" if who else "server")).glob("*")]
            assert not (half_written and self.disk.cleaned_up), half_written
        except (Killed, StruckError) as error:
            self._bury(who, error)

    def _bury(self, who: int, error: BaseException | None = None) -> None:
        self._bury_workers(who, error)
        if SERVER in self.disk.dead:
            for seq in self.failures.keys() - self.trainer.queue._open.keys():
                del self.failures[seq]  # the file that counted them may be gone: the server was to write it again
            self.trainer.queue._lock.release()
            self.trainer.queue.close()
            self._start_server()
        self.disk.dead.clear()

    def _bury_workers(self, who: int, error: BaseException | None) -> None:
        if isinstance(error, StruckError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            assert error.strerror not in NEED_ROOM, f"nobody said that the disk is full: {error}"
        cut, self.disk.power_cut = self.disk.power_cut, None
        self.disk.dead |= {SERVER, PLAIN, DURABLE} if cut else {who}
        for number in self.disk.dead & self.workers.keys():
            worker = self.workers.pop(number)
            self.mishaps.update(self._claimed_by(number) | {claim.job.seq for claim in self.claims.pop(number)})
            worker._lock.release()
            worker._pipe.close()
        for path in self.disk.unsynced(newest=cut.newest) if cut else ():
            self._spoil(path, UNSYNCED[cut.unsynced](path.read_bytes()))

    def _start_server(self) -> None:
        while True:
            self.disk.dead.clear()
            try:
                about = {"window": self.window, "steps": 10, "watch_workers": False}
                self.trainer = Trainer(self.root, self.jobs, self.log, **about, files=self.disk.files(SERVER))
                return
            except DiskFullError:  # as an operator would, make room and try again
                self.disk.full = False
            except (Killed, StruckError) as error:
                self._bury_workers(SERVER, error)
                self.failures.clear()

    def _claimed_by(self, number: int) -> set[int]:
        return {int(path.name[:10]) for path in (self.root / "queue").glob(f"*_processing_by_dev{number}.*")}

    def _spoil(self, path: Path, data: bytes | None) -> None:
        """Change a file, or remove it for None."""
        if data is None:
            path.unlink()
        elif data == path.read_bytes():
            return
        else:
            path.write_bytes(data)
        if path.suffix == ".safetensors":
            self.damaged.add(int(path.name[:10]))
            self.mishaps[int(path.name[:10])] += 1

    # What server and workers do

    @initialize(honest=st.booleans())
    def start(self, honest: bool = False) -> None:
        self.honest = honest
        self._start_server()

    @rule()
    def submit(self) -> None:
        self._act(SERVER, lambda: self.trainer.submit())

    @rule()
    def collect(self) -> None:
        self._act(SERVER, lambda: self.trainer.collect())

    @rule()
    def checkpoint(self) -> None:
        self.trainer.checkpoint()

    @rule(keep=st.integers(0, 2))
    def trim(self, keep: int) -> None:
        self._act(SERVER, lambda: self.trainer.trim(keep))

    @rule()
    def recover(self) -> None:
        is_quiet = self.disk.is_quiet
        self._act(SERVER, lambda: self.trainer.queue.recover_dead())
        dead = {PLAIN, DURABLE} - self.workers.keys() if is_quiet else set()
        assert not any(map(self._claimed_by, dead)), "a dead worker keeps a job"

    @rule(number=workers, limit=st.integers(1, 3), told=st.booleans())
    def claim(self, number: int, limit: int = 4, told: bool = False) -> None:
        """told: take what the pipe tells, if it tells anything; else look at the directory."""
        if number not in self.workers:
            self._act(number, lambda: self._start_worker(number))
        if number in self.workers:
            self._act(number, lambda: self._claim(number, limit, told))

    def _start_worker(self, number: int) -> None:
        files, durable = self.disk.files(number), number == DURABLE
        self.workers[number] = WorkerQueue.open(self.root, number, "cpu", files=files, durable=durable)
        self.claims[number] = []

    def _claim(self, number: int, limit: int, told: bool) -> None:
        claims = (WorkerQueue.claim if told else claim_now)(self.workers[number], limit)
        assert len(claims) == 1 or not any(claim.attempt for claim in claims), "a job that failed is not alone"
        others = {claim.job.seq for claims in self.claims.values() for claim in claims} - self.damaged
        for claim in claims:
            seq, attempt = claim.job.seq, claim.attempt
            assert seq not in others, f"two workers have job {seq}"
            assert attempt <= self.mishaps[seq], f"attempt {attempt} of a job with {self.mishaps[seq]} mishaps"
            assert attempt >= self.failures[seq] or seq in self.damaged, f"attempt {attempt} after {self.failures[seq]}"
        self.claims[number] += claims

    def _claims_of(self, number: int) -> list[Claim]:
        """What a worker has; it claims something if it has nothing."""
        if not self.claims.get(number):
            self.submit()
            self.claim(number, 2)
        return self.claims.get(number, [])

    @rule(number=workers)
    def complete(self, number: int) -> None:
        if claims := self._claims_of(number):
            self.disk.finishing = f"queue/{claims[0].name}"
            self._act(number, lambda: execute(self.workers[number], claims[0], self.log) or claims.pop(0))
            self.disk.finishing = ""
            if number in self.workers:
                assert self.workers[number]._claims.keys() >= {claim.job.seq for claim in claims}, "it forgets a claim"

    @rule(number=workers)
    def fail(self, number: int) -> None:
        if claims := self._claims_of(number):
            self._act(number, lambda: self._fail(number, claims))

    def _fail(self, number: int, claims: list[Claim]) -> None:
        self.workers[number].fail(claims[0], "it failed")
        self.mishaps[claims[0].job.seq] += 1
        self.failures[claims.pop(0).job.seq] += 1

    @rule(number=workers)
    def hand_back(self, number: int) -> None:
        if claims := self._claims_of(number):
            self._act(number, lambda: self.workers[number].hand_back(claims[0]) or claims.pop(0))

    @rule(number=workers)
    def end_worker(self, number: int) -> None:
        if self._claims_of(number):
            is_quiet = self.disk.is_quiet
            self._act(number, lambda: self.workers[number].close())
            assert not (is_quiet and self._claimed_by(number)), "a worker that ends keeps a job"
            self.workers.pop(number, None)
            self.claims.pop(number, None)
            self.mishaps.update(self._claimed_by(number))

    # What others do

    @rule(wait=st.integers(0, 12), fault=st.sampled_from([fault for faults in FAULTS.values() for fault in faults]))
    def arm(self, wait: int, fault: Fault) -> None:
        if not (self.honest and fault.kind == "power"):
            self.disk.armed = [*self.disk.armed[-1:], (wait, fault)]

    @rule(number=workers)
    def kill_worker(self, number: int) -> None:
        self._claims_of(number)
        self._bury(number)

    @rule()
    def kill_server(self) -> None:
        self._bury(SERVER)

    @rule()
    def fill_disk(self) -> None:
        self.disk.full = True

    @precondition(lambda self: self.disk.full)
    @rule()
    def make_room(self) -> None:
        self.disk.full = False

    @rule(seq=st.integers(0, JOBS - 1))
    def operator_retries(self, seq: int) -> None:
        self.collect()  # a server looks more often than an operator acts
        retry_given_up(self.root, seq)

    @rule(lie=st.sampled_from(["lost", "stale", "garbage", "deleted"]))
    def the_pipe_lies(self, lie: str) -> None:
        pipe = self.trainer.queue._pipe
        told = {"stale": [f"{seq:010d}.a00" for seq in range(JOBS)], "garbage": ["x", "..", "9" * 15, "a00"]}
        if lie == "lost":
            pipe.take(EVERYTHING)
        elif lie == "deleted":
            pipe._path.unlink(missing_ok=True)
        pipe.announce(told.get(lie, []))

    @rule(years=st.integers(-1, 1))
    def clocks_lie(self, years: int) -> None:
        for number, path in enumerate(self.root.rglob("*")):
            moment = 1_700_000_000 + (years if number % 2 else -years) * 365 * 86400
            os.utime(path, (moment, moment))

    @precondition(lambda self: not self.honest)
    @rule(folder=st.sampled_from(["tmp", "done"]))
    def tidy_up(self, folder: str) -> None:
        """A person removes what looks unneeded."""
        self.damaged |= {int(path.name[:10]) for path in (self.root / folder).rglob("*.safetensors")}
        shutil.rmtree(self.root / folder)
        (self.root / folder).mkdir(mode=0o700)

    @precondition(lambda self: not self.honest)
    @rule(which=st.integers(0, 20), kind=st.sampled_from(sorted(KINDS)), dice=st.integers(0, 1 << 32))
    def damage_a_file(self, which: int, kind: str, dice: int) -> None:
        if files := sorted((self.root / "queue").iterdir()):
            path = files[which % len(files)]
            try:
                data = KINDS[kind](path.read_bytes(), Random(dice))
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):  # it was damaged before
                data = b""
            self._spoil(path, data)

    @precondition(lambda self: not self.honest)
    @rule(which=st.integers(0, 20))
    def remove_a_file(self, which: int) -> None:
        if files := sorted((self.root / "queue").iterdir()):
            self._spoil(files[which % len(files)], None)

    @precondition(lambda self: not self.honest)
    @rule(number=workers)
    def result_twice(self, number: int) -> None:
        """A worker finishes a job that somebody issued again, because its file was lost meanwhile."""
        if claims := self._claims_of(number):
            path = self.root / "queue" / str(claims[0].name)
            if path.exists():
                self._spoil(path, None)
            for _ in range(4):
                self.collect()
            self.complete(number)

    # The end

    def turn(self) -> None:
        """All do what they have to do; the poison job fails every time."""
        self.submit()
        self.recover()
        for number in (DURABLE, PLAIN):
            self.claim(number)
            for _ in range(4):
                if claims := self.claims.get(number):
                    (self.fail if claims[0].job.seq == self.poison else self.complete)(number)
        self.collect()

    def drain(self) -> None:
        self.disk.full, self.disk.armed = False, []
        for _ in range(60 + self.jobs):
            before = self.times_full
            self.turn()
            if self.times_full > before:
                self.checkpoint()
                self.trim(80)
            pending = any("a0" in name and "pending" in name for name in leftovers(self.root))  # an operator's
            if self.trainer.done and not pending:
                break
        self.collect()
        assert self.trainer.done, f"did not drain: {leftovers(self.root)}"

    def check(self) -> None:
        if not self.disk.cleaned_up:  # their successors remove what was half-written
            self.checkpoint()
            for who in (PLAIN, DURABLE, SERVER):
                self._bury(who)
            self.claim(PLAIN)
            self.claim(DURABLE)
        told = replay(self.log_path, self.jobs)
        assert told.regenerated <= self.damaged, "a group that had been used was generated again"
        assert self.damaged or not told.healing, f"mended {told.healing} though nothing was damaged"
        assert not told.healing.get("unknown"), told.healing
        for seq in told.given_up:
            assert self.mishaps[seq] >= 3, f"job {seq} was given up after {self.mishaps[seq]} mishaps"
        assert self.poison < 0 or told.given_up == {self.poison}
        for aside in (self.root / "quarantine").glob("*.safetensors"):
            assert aside.with_suffix(".reason").exists(), f"{aside.name} has no reason"
        assert not leftovers(self.root), leftovers(self.root)

    def teardown(self) -> None:
        try:
            if self.trainer is not None:
                self.drain()
                self.check()
        finally:
            self.close()

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()
        if self.trainer is not None:
            self.trainer.queue.close()
        self.disk.close()
        self.log.close()
        if self.own is not None:
            shutil.rmtree(self.own)
