"""The queue under faults: one machine, its model, and what must hold of it whatever strikes.

Server and workers are objects of one process. A fault strikes at a file operation: before it, in the middle of it if it
writes a file, or after it. A killed process loses its lock, and nothing of what it was going to do is done. A power cut
kills all of them and takes the content of files that nobody synced. Then all go on: every job is used exactly once.

python tests/chaos/queue_machine.py --root DIR [--part kill] [--seed N]

Parts: `kill`, `error` and `power` strike at every file operation of a fixed life; `any` has hypothesis play server,
workers, operator, kernel and disk; `corrupt` reads damaged files; `disk` fills the file system of DIR/q. Each prints a
summary as JSON.
"""

from __future__ import annotations

import ast
import errno
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, ClassVar, NamedTuple

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from queue_damage import KINDS, read_damaged_files
from queue_harness import Log, Trainer, arguments, claim_now, execute, leftovers, replay

import async_grpo.queue
from async_grpo.errors import BadFileError, DiskFullError
from async_grpo.queue import Claim, WorkerQueue, retry_given_up, wakeups
from async_grpo.queue import worker as queue_worker
from async_grpo.queue.filesystem import Files, OsFiles
from async_grpo.queue.wakeups import EVERYTHING

JOBS, POISON = 6, 3
SERVER, PLAIN, DURABLE = 0, 1, 2
OPERATIONS = [name for name in vars(Files) if not name.startswith("_") and name != "close"]
PACKAGE = Path(async_grpo.queue.__file__).parent
CHANGING = ("create", "rename", "unlink", "make_folder")
FOR_PEOPLE = "listing"  # it opens the directory itself

# What is left of a file that nobody synced. Names reach the disk in order, as on a journalling file system.
UNSYNCED: dict[str, Callable[[bytes], bytes]] = {
    "full": lambda data: data,
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "zeroed": lambda data: bytes(len(data)),
    "zero end": lambda data: data[: len(data) * 3 // 4] + bytes(len(data) - len(data) * 3 // 4),
}


class Fault(NamedTuple):
    """What strikes at a file operation."""

    kind: str  # kill, power, or the name of an error
    moment: str  # before, in, after
    unsynced: str = "full"  # what is left after a power cut
    newest: bool = False  # of the newest file alone


FAULTS = {
    "kill": [Fault("kill", moment) for moment in ("before", "in", "after")],
    "error": [Fault(name, moment) for name in ("ENOSPC", "EDQUOT", "EIO") for moment in ("before", "in")],
    "power": [Fault("power", "after")]
    + [Fault("power", "after", left, newest) for left in UNSYNCED if left != "full" for newest in (False, True)],
}


class Killed(BaseException):
    """The process is gone: nothing catches it but the machine."""


class StruckError(OSError):
    """An error that a fault made."""


class Site(NamedTuple):
    """A place in the queue's modules that does a file operation."""

    module: str
    function: str
    operation: str


class WatchedFiles(OsFiles):
    """`Files` whose every operation passes through `around(operation, do, path, …)`."""

    def __init__(self, root: Path, around: Callable[..., Any]) -> None:
        super().__init__(root)
        for name in OPERATIONS:
            setattr(self, name, partial(around, name, getattr(self, name)))


workers = st.sampled_from((PLAIN, DURABLE))


class QueueMachine(RuleBasedStateMachine):
    folder: Path  # of the folders of machines
    killed: ClassVar[set[tuple[Site, str]]] = set()  # where, and at which moment of it, a process was killed

    def __init__(self, jobs: int = JOBS, window: int = 4, poison: int = -1, root: Path | None = None) -> None:
        super().__init__()
        self.jobs, self.window, self.poison = jobs, window, poison
        self.own = None if root else Path(tempfile.mkdtemp(dir=self.folder))
        self.root = root or self.own / "q"
        self.root.mkdir(mode=0o700, exist_ok=True)
        self.log_path = self.root.parent / "log"
        self.log = Log(self.log_path)
        self.trainer: Trainer | Any = None
        self.workers: dict[int, WorkerQueue] = {}
        self.claims: dict[int, list[Claim]] = {}
        self.opened: list[WatchedFiles] = []
        self.honest = False  # nobody but the queue touches its files
        self.full = False
        self.times_full = 0
        self.armed: list[tuple[int, Fault]] = []  # operations until it strikes, after the one before
        self.dead: set[int] = set()
        self.power_cut: Fault | None = None
        self.cleaned_up = True  # none of the faults hit somebody who removed what was half-written
        self.operations: list[str] = []
        self.unsynced: dict[str, None] = {}  # files by their content, the newest last
        self.unsynced_names: set[str] = set()
        self.finishing = ""  # the claim of the result that is being handed over
        self.mishaps: Counter[int] = Counter()  # failures of a job, deaths of its workers, damages to its files
        self.failures: Counter[int] = Counter()  # those that the name of its file must count
        self.damaged: set[int] = set()

    # What happens to a file operation

    def _files(self, who: int) -> WatchedFiles:
        self.opened.append(WatchedFiles(self.root, partial(self._around, who)))
        return self.opened[-1]

    def _around(self, who: int, operation: str, do: Callable[..., Any], path: str, *more: Any) -> Any:
        if who in self.dead:
            raise Killed
        self.operations.append(operation)
        if who != DURABLE:
            assert operation != "sync"
        elif operation == "unlink" and path == self.finishing:
            result = path.replace("_processing_by_", "_complete_from_")
            assert result not in {*self.unsynced, *self.unsynced_names}, (
                "the claim is dropped before the result is safe"
            )
        if self.full and operation == "create":
            (self.root / path).write_bytes(more[0][:9])
            raise StruckError(errno.ENOSPC, "full", path)
        if fault := self._due():
            self._strike(fault, who, operation, do, path, *more)
        result = do(path, *more)
        self._remember(operation, path, *more)
        return result

    def _due(self) -> Fault | None:
        if not self.armed:
            return None
        wait, fault = self.armed.pop(0)
        if wait == 0:
            return fault
        self.armed.insert(0, (wait - 1, fault))
        return None

    def _strike(self, fault: Fault, who: int, operation: str, do: Callable[..., Any], path: str, *more: Any) -> None:
        if fault.moment == "in" and operation == "create":
            (self.root / path).write_bytes(more[0][: len(more[0]) // 2])
        elif fault.moment == "after":
            with suppress(OSError, BadFileError):
                do(path, *more)
                self._remember(operation, path, *more)
        if fault.kind not in ("kill", "power"):
            self.cleaned_up &= operation != "unlink"
            raise StruckError(getattr(errno, fault.kind), "struck", path)
        caller = sys._getframe(2).f_code
        self.killed.add((Site(Path(caller.co_filename).stem, caller.co_name, operation), fault.moment))
        self.dead |= {who} if fault.kind == "kill" else {SERVER, PLAIN, DURABLE}
        self.power_cut = fault if fault.kind == "power" else None
        raise Killed

    def _remember(self, operation: str, path: str, to: Any = "") -> None:
        if operation == "create":
            self.unsynced[path] = None
        elif operation == "rename":
            was_unsynced = path in self.unsynced
            self.unsynced.pop(path, None)
            self.unsynced.pop(to, None)
            self.unsynced |= {to: None} if was_unsynced else {}
            self.unsynced_names.add(to)
        elif operation in ("unlink", "sync"):
            self.unsynced.pop(path, None)
            self.unsynced_names = {name for name in self.unsynced_names if not name.startswith(f"{path}/")}

    # What becomes of processes

    def _act(self, who: int, do: Callable[[], object]) -> None:
        """What a process does. It waits if the disk is full, and it ends if it is struck."""
        try:
            do()
        except DiskFullError:
            self.times_full += 1
            owner = f"dev{who}" if who else "server"
            half_written = [*(self.root / "tmp" / owner).glob("*")]
            assert not (half_written and self.cleaned_up), half_written
        except (Killed, StruckError):
            self.dead.add(who)
            self._bury()

    def _bury(self) -> None:
        server_is_dead = SERVER in self.dead
        self._bury_workers()
        if server_is_dead:
            for seq in self.failures.keys() - self.trainer.queue._open.keys():
                del self.failures[seq]  # the file that counted them may be gone: it was to be written anew
            self.trainer.queue._lock.release()
            self.trainer.queue.close()
            self._start_server()

    def _bury_workers(self) -> None:
        for number in self.dead & self.workers.keys():
            worker = self.workers.pop(number)
            self.mishaps.update(self._claimed_by(number) | {claim.job.seq for claim in self.claims.pop(number)})
            worker._lock.release()
            worker._pipe.close()
        if self.power_cut is not None:
            left = [path for path in self.unsynced if (self.root / path).is_file()]
            for path in left[-1:] if self.power_cut.newest else left:
                data = (self.root / path).read_bytes()
                self._spoil(self.root / path, UNSYNCED[self.power_cut.unsynced](data))
        self.dead, self.power_cut = set(), None

    def _start_server(self) -> None:
        while True:
            try:
                about = {"window": self.window, "steps": 10, "watch_workers": False}
                self.trainer = Trainer(self.root, self.jobs, self.log, **about, files=self._files(SERVER))
                return
            except DiskFullError:  # as an operator would, make room and try again
                self.full = False
            except (Killed, StruckError):
                self._bury_workers()
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
        is_quiet = not (self.full or self.armed)
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
        files, durable = self._files(number), number == DURABLE
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
            self.finishing = f"queue/{claims[0].name}"
            self._act(number, lambda: execute(self.workers[number], claims[0], self.log) or claims.pop(0))
            self.finishing = ""

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
            is_quiet = not (self.full or self.armed)
            self._act(number, lambda: self.workers[number].close())
            assert not (is_quiet and self._claimed_by(number)), "a worker that ends keeps a job"
            self.workers.pop(number, None)
            self.claims.pop(number, None)
            self.mishaps.update(self._claimed_by(number))

    # What others do

    @rule(wait=st.integers(0, 12), fault=st.sampled_from([fault for faults in FAULTS.values() for fault in faults]))
    def arm(self, wait: int, fault: Fault) -> None:
        if not (self.honest and fault.kind == "power"):
            self.armed = [*self.armed[-1:], (wait, fault)]

    @rule(number=workers)
    def kill_worker(self, number: int) -> None:
        self._claims_of(number)
        self.dead.add(number)
        self._bury()

    @rule()
    def kill_server(self) -> None:
        self.dead.add(SERVER)
        self._bury()

    @rule()
    def fill_disk(self) -> None:
        self.full = True

    @precondition(lambda self: self.full)
    @rule()
    def make_room(self) -> None:
        self.full = False

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
        self.full, self.armed = False, []
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
        if not self.cleaned_up:  # their successors remove what was half-written
            self.checkpoint()
            self.dead = {SERVER, PLAIN, DURABLE}
            self._bury()
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
        for files in self.opened:
            files.close()
        self.log.close()
        if self.own is not None:
            shutil.rmtree(self.own)


def live(machine: QueueMachine) -> None:
    """A life in which server and workers do everything that they can do."""
    machine.start()
    machine.submit()
    machine.claim(PLAIN, 2, told=True)
    machine.complete(PLAIN)
    machine.hand_back(PLAIN)
    machine.tidy_up("tmp")
    machine.turn()
    machine.checkpoint()
    machine.claim(PLAIN, 2)
    machine.kill_worker(PLAIN)
    machine.turn()
    machine.kill_server()
    machine.turn()
    machine.end_worker(DURABLE)
    machine.trim(1)


def play(*faults: tuple[int, Fault]) -> list[str]:
    """The life with these faults in it, to its end; returns the operations until then."""
    machine = QueueMachine(poison=POISON)
    machine.armed = list(faults)
    try:
        live(machine)
    except BaseException:
        machine.close()
        raise
    operations = [*machine.operations]
    machine.teardown()
    return operations


def cases_of(kind: str, operations: list[str], recovery: int) -> tuple[list[Any], list[Any]]:
    """Every fault of a kind at every operation: those that each slice has, and the others."""
    first = [
        (at, fault)
        for at, operation in enumerate(operations)
        for fault in FAULTS[kind]
        if (fault.moment != "in" or operation == "create") and (kind != "power" or operation in CHANGING)
    ]
    alone: list[Any] = [(one,) for one in first]
    if kind == "power":
        return [], alone
    if kind == "error":  # it strikes twice, or its victim is killed
        return [], [*alone, *((one, (0, second)) for one in first for second in (one[1], *FAULTS["kill"]))]
    full = Fault("ENOSPC", "in")
    cleaning = [((at, full), (0, fault)) for at, fault in first if operations[at] == "create"]
    return alone + cleaning, [(one, (later, one[1])) for one in first for later in range(recovery)]


def strike(kind: str, options: Any) -> dict[str, Any]:
    """The life again and again, each time with another fault in it."""
    operations = play()
    always, others = cases_of(kind, operations, options.recovery)
    cases = always + others[options.seed % options.every :: options.every]
    for case in cases:
        try:
            play(*case)
        except Exception as error:
            raise AssertionError(f"{operations[case[0][0]]}: {case}") from error
    if kind == "kill":
        missed = {(site, moment) for site in sites() for moment in ("before", "after")} - QueueMachine.killed
        assert not missed, f"nobody was killed at {missed}"
    return {"operations": len(operations), "cases": len(cases)}


def sites() -> Iterator[Site]:
    """Where the queue's modules do file operations, by their sources."""
    for path in sorted(PACKAGE.glob("*.py")):
        functions = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))
        for function in functions if path.stem != FOR_PEOPLE else ():
            asked = (node for node in ast.walk(function) if isinstance(node, ast.Attribute) and node.attr in OPERATIONS)
            yield from (
                Site(path.stem, function.name, node.attr) for node in asked if ast.unparse(node.value).endswith("files")
            )


def any_order(options: Any) -> dict[str, Any]:
    """Whatever hypothesis draws. A failure is printed with the blob that repeats it."""
    machine_settings = settings(
        max_examples=options.examples,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
        database=None,
        phases=(Phase.generate,),
    )
    machine = seed(options.seed)(QueueMachine)
    run_state_machine_as_test(machine, settings=machine_settings)  # type: ignore[no-untyped-call]
    return {"examples": options.examples}


def fill_disk(options: Any) -> dict[str, Any]:
    """The archive fills the file system of `--root`/q; only a checkpoint allows the trainer to trim it."""
    machine = QueueMachine(jobs=200, window=32, root=options.root / "q")
    machine.start()
    machine.teardown()
    assert machine.times_full, "the disk was never full: give it less room"
    return {"jobs": machine.jobs, "disk_full": machine.times_full}


PARTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "corrupt": lambda options: read_damaged_files(options.root, options.count, options.seed),
    **{kind: partial(strike, kind) for kind in FAULTS},
    "any": any_order,
    "disk": fill_disk,
}


def main() -> None:
    options = arguments(part="corrupt,any,kill,error,power", every=1, recovery=15, examples=3000, count=40_000)
    QueueMachine.folder = options.root
    wakeups._inotify = lambda masks: -1  # nobody waits for it here, and the kernel takes 10 ms to close one
    queue_worker._PIPE_TRUST_S = 3600.0  # whether the directory is looked at is a matter of `told`, not of time
    for part in options.part.split(","):
        started = time.monotonic()
        print(json.dumps({**PARTS[part](options), "seconds": round(time.monotonic() - started, 1)}), flush=True)


if __name__ == "__main__":
    try:
        main()
    except Exception as error:  # noqa: BLE001 - whatever was found
        traceback.print_exception(error)
        sys.exit(1)
