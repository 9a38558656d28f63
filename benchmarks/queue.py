"""The job queue: claim latency, full cycles beside other queues, codec, recovery, idle cost.

    python benchmarks/queue.py [--quick] [--json FILE]

A full cycle is: 2 KiB job issued, claimed, 64 KiB result published, taken and archived; at most 16 jobs are open. Ours
encodes, checks and decodes records all the while. The others move "bytes" that nobody looks at, and, in rows of their
own, the same "records" in our encoding, which is the work that somebody who used them here would have. On tmpfs ours
keeps all results, as a run does; on the disk the last 256, because the others delete theirs. Peers are run if they can
be imported: they are the extra `bench` (`make bench`); Redis also needs `redis-server` (Debian's package of that name).

The notes say what becomes of a claim whose worker is killed. "Synced" is a queue whose operations are on the disk when
they return, and survive a power cut: only such are compared with each other on the disk.
"""

from __future__ import annotations

import argparse
import importlib
import json
import mailbox
import os
import platform
import resource
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

# A script's own folder is first on the path, and redis must not take this file for Python's `queue`: it goes last.
sys.path.sort(key=lambda folder: Path(folder).resolve() == Path(__file__).resolve().parent)

import numpy as np

from async_grpo.job_file import decode_group, decode_job, encode_group, encode_job
from async_grpo.job_queue import Claim, ServerQueue, WorkerQueue
from async_grpo.records import Job, RolloutGroup

RUN = "benchmark"
OPEN_JOBS = 16
IDLE_S = 0.0001  # a peer that finds nothing looks again after that; ours waits for an event
JOB = os.urandom(1024).hex().encode()  # 2 KiB
RESULT = os.urandom(64 << 10)
BARE = "bare renames of unchecked bytes"  # for comparison: no queue that anyone uses


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    name: str
    value: float
    unit: str
    target: str
    ok: bool | None
    spread: tuple[float, float, float]
    note: str = ""


def row(
    name: str,
    values: list[float],
    unit: str,
    target: str = "",
    met: Callable[[float], bool] | None = None,
    note: str = "",
) -> Row:
    middle = statistics.median(values)
    spread = (min(values), middle, max(values))
    ok = met(middle) if met else None
    return Row(name=name, value=middle, unit=unit, target=target, ok=ok, spread=spread, note=note)


# --- ours ------------------------------------------------------------------------------------------------------------


def make_job(seq: int) -> Job:
    content = {"prompt": JOB[:1700].decode()}
    return Job(run_id=RUN, seq=seq, row=content, num_generations=16, seed=seq, born_version=0, min_version=0)


def make_group(job: Job, attempt: int, worker: str, *, tokens: int = 500, text: str = "") -> RolloutGroup:
    """16 completions; with 500 tokens each a file of 64 KiB."""
    count = 16 * tokens
    return RolloutGroup(
        job=job,
        attempt=attempt,
        worker=worker,
        policy_version=1,
        reward_names=("right", "format"),
        prompt_ids=np.arange(100, dtype=np.int32),
        completion_lengths=np.full(16, tokens, np.int32),
        completion_ids=np.arange(count, dtype=np.int32) * 7919 % 150_000,
        sampling_logprobs=np.linspace(-5, 0, count, dtype=np.float32),
        tool_mask=None,
        rewards=np.zeros((16, 2), np.float32),
        completions=[text] * 16,
    )


def cycles_of_ours(root: Path, workers: int, jobs: int, *, durable: bool = False, keep: int | None = None) -> float:
    """Full cycles a second through `ServerQueue` and `WorkerQueue`; `keep`: of the results, None for all."""
    server = ServerQueue.open(root / "q", RUN, durable=durable)
    with running(workers, lambda number: ours_works(root / "q", number, durable)):
        wait_until(lambda: len(server.workers()) == workers)
        started, issued, taken, trimmed = time.perf_counter(), 0, 0, 0
        while taken < jobs:
            while issued < jobs and server.open_jobs < OPEN_JOBS:
                server.submit(make_job(issued))
                issued += 1
            entries = server.finished()
            taken += sum(server.take(entry) is not None for entry in entries)
            if keep is not None and taken - trimmed >= keep:
                trimmed = taken
                server.trim_done(keep, consumed=range(issued))
            if not entries:
                server.wait(1)
        seconds = time.perf_counter() - started
    assert not any(asdict(server.healing).values()), server.healing
    server.close()
    return jobs / seconds


def ours_works(root: Path, number: int, durable: bool) -> None:
    worker = WorkerQueue.open(root, number, "cpu", durable=durable)
    while True:
        claims: list[Claim] = worker.claim(4)
        for claim in claims:
            worker.complete(claim, answer(claim.job, claim.attempt, worker.name))
        if not claims:
            worker.wait(1)


def answer(job: Job, attempt: int, worker: str) -> RolloutGroup:
    """A result of 64 KiB whose arrays are there already."""
    return RolloutGroup(**{**ANSWER, "job": job, "attempt": attempt, "worker": worker})


# --- peers -----------------------------------------------------------------------------------------------------------


ANSWER = {name: getattr(make_group(make_job(0), 0, ""), name) for name in RolloutGroup.__dataclass_fields__}


class Channel(Protocol):
    """One direction of a peer: jobs go through one, results through another."""

    def put(self, data: bytes) -> None: ...

    def claim(self) -> tuple[Any, bytes] | None: ...

    def done(self, token: Any) -> None: ...


class Renames:
    """tmp/, new/, cur/ and renames by hand, without any check: what the rest of ours costs."""

    def __init__(self, path: Path) -> None:
        self._path, self._count, self._names = path, 0, deque[str]()
        for name in ("tmp", "new", "cur"):
            (path / name).mkdir(parents=True, exist_ok=True)

    def put(self, data: bytes) -> None:
        name = f"{time.monotonic_ns():020d}.{os.getpid()}.{self._count}"
        self._count += 1
        (self._path / "tmp" / name).write_bytes(data)
        (self._path / "tmp" / name).rename(self._path / "new" / name)

    def claim(self) -> tuple[Any, bytes] | None:
        if not self._names:
            self._names.extend(sorted(os.listdir(self._path / "new"))[:64])  # noqa: PTH208 - pathlib is slower
        while self._names:
            name = self._names.popleft()
            with suppress(FileNotFoundError):
                taken = (self._path / "new" / name).rename(self._path / "cur" / name)
                return taken, taken.read_bytes()
        return None

    def done(self, token: Any) -> None:
        token.unlink()


class Maildir:
    """`mailbox.Maildir`, which syncs every message."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._box, self._path = mailbox.Maildir(path), path

    def put(self, data: bytes) -> None:
        self._box.add(b"\n\n" + data)

    def claim(self) -> tuple[Any, bytes] | None:
        for path in sorted((self._path / "new").iterdir()):
            with suppress(FileNotFoundError):
                taken = path.rename(self._path / "cur" / path.name)
                return taken, taken.read_bytes()[2:]
        return None

    def done(self, token: Any) -> None:
        token.unlink()


class Sqlite:
    """One table, WAL."""

    def __init__(self, path: Path, synchronous: str = "normal") -> None:
        path.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(path / "db", isolation_level=None, timeout=30)
        self._db.execute("pragma journal_mode=wal")
        self._db.execute(f"pragma synchronous={synchronous}")
        self._db.execute("create table if not exists q (id integer primary key, state int default 0, data blob)")
        self._db.execute("create index if not exists s on q (state, id)")

    def put(self, data: bytes) -> None:
        self._db.execute("insert into q (data) values (?)", (data,))

    def claim(self) -> tuple[Any, bytes] | None:
        found = self._db.execute(
            "update q set state = 1 where id = (select id from q where state = 0 order by id limit 1) "
            "returning id, data"
        ).fetchall()
        return found[0] if found else None

    def done(self, token: Any) -> None:
        self._db.execute("delete from q where id = ?", (token,))


class PersistQueue:
    """persist-queue, SQLiteAckQueue."""

    def __init__(self, path: Path) -> None:
        self._queue = importlib.import_module("persistqueue").SQLiteAckQueue(str(path), auto_resume=False)

    def put(self, data: bytes) -> None:
        self._queue.put(data)

    def claim(self) -> tuple[Any, bytes] | None:
        with suppress(importlib.import_module("persistqueue").Empty):
            found = self._queue.get(block=False, raw=True)
            return found["pqid"], found["data"]
        return None

    def done(self, token: Any) -> None:
        self._queue.ack(id=token)


class HueyFile:
    """huey, FileStorage."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._storage = self._make(path)

    def _make(self, path: Path) -> Any:
        return importlib.import_module("huey.storage").FileStorage("bench", str(path))

    def put(self, data: bytes) -> None:
        self._storage.enqueue(data)

    def claim(self) -> tuple[Any, bytes] | None:
        data = self._storage.dequeue()
        return (None, data) if data else None

    def done(self, token: Any) -> None:
        """A dequeued task is gone."""


class HueySqlite(HueyFile):
    """huey, SqliteStorage."""

    def _make(self, path: Path) -> Any:
        return importlib.import_module("huey.storage").SqliteStorage("bench", f"{path}.db")


class DiskCache:
    """diskcache, Deque."""

    def __init__(self, path: Path) -> None:
        self._deque = importlib.import_module("diskcache").Deque(directory=str(path))

    def put(self, data: bytes) -> None:
        self._deque.append(data)

    def claim(self) -> tuple[Any, bytes] | None:
        with suppress(IndexError):
            return None, self._deque.popleft()
        return None

    def done(self, token: Any) -> None:
        """A popped item is gone."""


class LiteQueue:
    """litequeue."""

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self._queue = importlib.import_module("litequeue").LiteQueue(str(path / "db"))

    def put(self, data: bytes) -> None:
        self._queue.put(data)

    def claim(self) -> tuple[Any, bytes] | None:
        message = self._queue.pop()
        return (message.message_id, message.data) if message else None

    def done(self, token: Any) -> None:
        self._queue.done(token)


class Dirq:
    """dirq, QueueSimple: a hard link locks an element."""

    def __init__(self, path: Path) -> None:
        self._queue = importlib.import_module("dirq.QueueSimple").QueueSimple(str(path))
        self._names: Iterator[str] = iter(())

    def put(self, data: bytes) -> None:
        self._queue.add(data)

    def claim(self) -> tuple[Any, bytes] | None:
        for fresh in (False, True):
            if fresh:
                self._names = iter(self._queue)
            for name in self._names:
                with suppress(OSError):
                    if self._queue.lock(name):
                        return name, self._queue.get(name)
        return None

    def done(self, token: Any) -> None:
        self._queue.remove(token)


class Redis:
    """Redis, one list of waiting and one of claimed items, append-only file synced every second."""

    def __init__(self, path: Path) -> None:
        self._redis = importlib.import_module("redis").Redis(unix_socket_path=str(path.parent / "socket"))
        self._name = path.name

    def put(self, data: bytes) -> None:
        self._redis.lpush(self._name, data)

    def claim(self) -> tuple[Any, bytes] | None:
        data = self._redis.lmove(self._name, f"{self._name}-claimed", "RIGHT", "LEFT")
        return (data, data) if data else None

    def done(self, token: Any) -> None:
        self._redis.lrem(f"{self._name}-claimed", 1, token)


@dataclass(frozen=True, slots=True)
class Peer:
    module: str
    channel: Callable[[Path], Channel]
    kept: bool  # whether a claim outlives its worker at all
    claim: str  # what becomes of a claim whose worker is killed
    synced: bool = False  # on the disk when an operation returns


PEERS: dict[str, Peer] = {
    "Maildir": Peer(
        "mailbox", Maildir, True, "a killed worker's message stays in cur/ and looks like a live one's", synced=True
    ),
    "SQLite WAL NORMAL": Peer("sqlite3", Sqlite, True, "a killed worker's row stays claimed for good"),
    "SQLite WAL FULL": Peer(
        "sqlite3",
        partial(Sqlite, synchronous="full"),
        True,
        "a killed worker's row stays claimed for good",
        synced=True,
    ),
    "persist-queue": Peer("persistqueue", PersistQueue, True, "given back when the queue is opened again", synced=True),
    "huey file": Peer("huey", HueyFile, False, "a killed worker's job is gone"),
    "huey sqlite": Peer("huey", HueySqlite, False, "a killed worker's job is gone", synced=True),
    "diskcache": Peer("diskcache", DiskCache, False, "a killed worker's job is gone"),
    "litequeue": Peer("litequeue", LiteQueue, True, "stays locked until somebody calls retry() for it"),
    "dirq": Peer("dirq", Dirq, True, "stays locked until somebody calls purge(), which goes by age: 10 minutes"),
    "Redis": Peer("redis", Redis, True, "stays in the list of claimed jobs for good"),
    BARE: Peer("os", Renames, True, "stays claimed for good"),
}
OURS_CLAIM = "pending again within milliseconds of its worker's death"


def available(name: str) -> bool:
    with suppress(ImportError):
        importlib.import_module(PEERS[name].module)
        return name != "Redis" or shutil.which("redis-server") is not None
    return False


def missing(names: list[str]) -> str:
    """What is not measured, and how to have it."""
    left_out = [name for name in PEERS if name not in names]
    if not left_out:
        return "every peer is installed"
    server = "" if shutil.which("redis-server") else " Redis needs `apt-get install redis-server`, too."
    return f"not installed: {', '.join(left_out)}. `make bench` installs the extra `bench`.{server}"


def cycles_of_peer(root: Path, workers: int, jobs: int, name: str, records: bool) -> float:
    """Full cycles a second, of bytes that nobody looks at or of the same records as ours."""
    make = PEERS[name].channel
    with redis_server(root) if name == "Redis" else nullcontext():
        todo, results = make(root / "jobs"), make(root / "results")
        with running(workers, lambda number: peer_works(make, root, records)):
            time.sleep(0.3)
            started, issued, taken = time.perf_counter(), 0, 0
            while taken < jobs:
                while issued < jobs and issued - taken < OPEN_JOBS:
                    todo.put(encode_job(make_job(issued)) if records else JOB)
                    issued += 1
                found = results.claim()
                if found is None:
                    assert time.perf_counter() - started < 60, f"{name}: {jobs - taken} of {jobs} results are missing"
                    time.sleep(IDLE_S)
                    continue
                if records:
                    decode_group(found[1], expect_run=RUN)
                results.done(found[0])
                taken += 1
            return jobs / (time.perf_counter() - started)


def peer_works(make: Callable[[Path], Channel], root: Path, records: bool) -> None:
    todo, results = make(root / "jobs"), make(root / "results")
    while True:
        found = todo.claim()
        if found is None:
            time.sleep(IDLE_S)
            continue
        results.put(encode_group(answer(decode_job(found[1], expect_run=RUN), 0, "dev1")) if records else RESULT)
        todo.done(found[0])


@contextmanager
def redis_server(root: Path) -> Iterator[None]:
    options = ["--port", "0", "--unixsocket", str(root / "socket"), "--dir", str(root), "--appendonly", "yes"]
    server = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL)
    try:
        wait_until((root / "socket").exists)
        yield
    finally:
        server.kill()
        server.wait()


# --- measurements ----------------------------------------------------------------------------------------------------


def claim_latencies(root: Path, pending: int) -> tuple[float, float]:
    """Median and 99th percentile in µs of one claim: the rename, and reading and checking the job."""
    server = ServerQueue.open(root / "q", RUN, watch_workers=False, max_open=pending)
    for seq in range(pending):
        server.submit(make_job(seq))
    worker = WorkerQueue.open(root / "q", 1, "cpu")
    times = []
    for _ in range(min(pending, 2000)):
        started = time.perf_counter()
        claims = worker.claim(1)
        times.append(1e6 * (time.perf_counter() - started))
        assert len(claims) == 1
    worker._claims.clear()  # handing 10,000 back is not measured
    worker.close()
    server.close()
    times.sort()
    return times[len(times) // 2], times[len(times) * 99 // 100]


def codec_ms() -> float:
    """Encode and decode a group of 16 x 512 tokens with 2 KB of text each, in ms: best of 50."""
    line = "Natalia sold 48 clips in April, and half as many in May; so she sold 48/2 = 24.\n"
    group = make_group(make_job(0), 0, "dev1", tokens=512, text=line * 25)
    times = []
    for _ in range(50):
        started = time.perf_counter()
        decode_group(encode_group(group), expect_seq=0, expect_run=RUN)
        times.append(1e3 * (time.perf_counter() - started))
    return min(times)


def death_to_pending_ms(root: Path) -> float:
    """From SIGKILL of a worker to its job being pending again."""
    server = ServerQueue.open(root / "q", RUN)
    server.submit(make_job(0))
    listen, told = os.pipe()

    def claim_and_sleep(number: int) -> None:
        queue = WorkerQueue.open(root / "q", number, "cpu")
        queue.claim(1)
        os.write(told, b"1")
        time.sleep(60)

    with running(1, claim_and_sleep) as pids:
        os.read(listen, 1)
        os.kill(pids[0], signal.SIGKILL)
        started = time.perf_counter()
        wait_until(lambda: server.counts().pending == 1, pause_s=0.0002)
        seconds = time.perf_counter() - started
    os.close(listen)
    os.close(told)
    server.close()
    return 1e3 * seconds


def idle_percent(root: Path, seconds: float) -> float:
    """CPU of a server with its reaper thread and a worker, both waiting, in percent of a core."""
    server, worker = ServerQueue.open(root / "q", RUN), WorkerQueue.open(root / "q", 1, "cpu")
    used, end = time.process_time(), time.monotonic() + seconds
    while time.monotonic() < end:
        server.wait(seconds / 4)
        worker.wait(seconds / 4)
    percent = 100 * (time.process_time() - used) / seconds
    worker.close()
    server.close()
    return percent


def restart_s(root: Path, finished: int) -> float:
    """Opening a queue with that many groups in done/."""
    ServerQueue.open(root / "q", RUN, watch_workers=False).close()
    data = b"x"
    for seq in range(finished):
        folder = root / "q" / "done" / f"{seq // 1000:07d}"
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / f"{seq:010d}.a00_complete_from_dev1.safetensors").write_bytes(data)
    started = time.perf_counter()
    ServerQueue.open(root / "q", RUN, consumed=range(finished)).close()
    return time.perf_counter() - started


# --- running ---------------------------------------------------------------------------------------------------------


@contextmanager
def running(count: int, work: Callable[[int], None]) -> Iterator[list[int]]:
    """Forked processes 1 … count, killed at the end."""
    pids = []
    for number in range(1, count + 1):
        pid = os.fork()
        if pid == 0:
            try:
                work(number)
            except BaseException as error:  # noqa: BLE001 - nothing of the parent may run on in the child
                print(f"worker {number}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        pids.append(pid)
    try:
        yield pids
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def wait_until(condition: Callable[[], bool], pause_s: float = 0.002) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("a benchmark waited 30 s in vain")
        time.sleep(pause_s)


@contextmanager
def folder(where: Path) -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="queue-benchmark-", dir=where))
    try:
        yield made
    finally:
        shutil.rmtree(made)


def repeated(times: int, where: Path, measure: Callable[[Path], float]) -> list[float]:
    values = []
    for _ in range(times):
        with folder(where) as root:
            values.append(measure(root))
    return values


class Contest:
    """Queues that take turns, so that a busy machine slows all of them; with the CPU time that a cycle costs."""

    def __init__(self, about: str, where: Path) -> None:
        self._about, self._where = about, where
        self._sides: dict[str, tuple[Callable[[Path], float], int]] = {}
        self.speed: dict[str, list[float]] = {}
        self.cpu: dict[str, list[float]] = {}

    def enter(self, side: str, measure: Callable[[Path], float], jobs: int) -> None:
        self._sides[side] = measure, jobs
        self.speed[side], self.cpu[side] = [], []

    def run(self, times: int) -> None:
        for _ in range(times):
            for side, (measure, jobs) in list(self._sides.items()):
                before = cpu_s()
                try:
                    self.speed[side] += repeated(1, self._where, measure)
                except (AssertionError, sqlite3.OperationalError) as error:
                    print(f"{self._about}: {side} failed: {error}", file=sys.stderr)
                    del self._sides[side], self.speed[side], self.cpu[side]
                else:
                    self.cpu[side].append(1e6 * (cpu_s() - before) / jobs)

    def best(self, sides: list[str]) -> float:
        return max((statistics.median(self.speed[side]) for side in sides if side in self.speed), default=0.0)


def measure_cycles(quick: bool, places: dict[str, Path]) -> list[Row]:
    names = [name for name in PEERS if available(name)]
    print(missing(names), file=sys.stderr)
    rows = []
    for place, where in places.items():
        for workers in (1, 4):
            about = f"full cycle, {place}, {workers} worker{'s' if workers > 1 else ''}"
            if place == "tmpfs":
                first = workers == 1
                rows += cycles_in_memory(about, where, workers, names if first or not quick else [], quick, first)
            elif not quick:
                rows += cycles_on_disk(about, where, workers, names)
    return rows


def cycles_in_memory(about: str, where: Path, workers: int, names: list[str], quick: bool, first: bool) -> list[Row]:
    """No power cut matters here, so all are compared."""
    jobs = 300 if quick else 1000
    contest = Contest(about, where)
    contest.enter("ours", partial(cycles_of_ours, workers=workers, jobs=3 * jobs), 3 * jobs)
    for name in names:
        for records in (False, True) if PEERS[name].kept else (False,):
            run = partial(cycles_of_peer, workers=workers, jobs=jobs, name=name, records=records)
            contest.enter(f"{name}, {'records' if records else 'bytes'}", run, jobs)
    contest.run(2 if quick else 3)
    rivals = [name for name in names if PEERS[name].kept and name != BARE]
    best_with_records = contest.best([f"{name}, records" for name in rivals])
    best_with_bytes = contest.best([f"{name}, bytes" for name in rivals])
    least = max(best_with_records, 5000.0 if first else 0.0)
    target = "ahead of every peer that keeps claims, with records" if rivals else ""
    target = f">= 5000, {target}".removesuffix(", ") if first else target
    rows = [
        row(f"{about}: ours", contest.speed["ours"], "1/s", target, lambda value: value >= least, OURS_CLAIM),
    ]
    if rivals:
        ratios = [value / best_with_bytes for value in contest.speed["ours"]]
        name = f"{about}: ours, against the fastest that keeps claims and only moves bytes"
        rows.append(row(name, ratios, "x", ">= 1", lambda value: value >= 1))
    for side, values in contest.speed.items():
        if side != "ours":
            rows.append(row(f"{about}: {side}", values, "1/s", note=PEERS[side.rpartition(", ")[0]].claim))
    if first:
        rows += [row(f"CPU of a cycle, all processes: {side}", values, "µs") for side, values in contest.cpu.items()]
    return rows


def cycles_on_disk(about: str, where: Path, workers: int, names: list[str]) -> list[Row]:
    """Queues that keep claims, those that survive a power cut apart from those that may lose what they were told."""
    rows: list[Row] = []
    for synced, jobs in ((False, 1000), (True, 200)):
        contest = Contest(about, where)
        ours = "ours, durable" if synced else "ours"
        run_ours = partial(cycles_of_ours, workers=workers, jobs=jobs, durable=synced, keep=256)
        contest.enter(ours, run_ours, jobs)
        rivals = [name for name in names if PEERS[name].kept and PEERS[name].synced is synced]
        for name in rivals:
            run = partial(cycles_of_peer, workers=workers, jobs=jobs, name=name, records=True)
            contest.enter(f"{name}, records", run, jobs)
        contest.run(3)
        least = contest.best([f"{name}, records" for name in rivals if name != BARE])
        kind = "synced" if synced else "not synced"
        target = f"ahead of every {'synced' if synced else 'unsynced'} peer that keeps claims"
        for side, values in contest.speed.items():
            if side == ours:
                rows.append(row(f"{about}, {kind}: {side}", values, "1/s", target, lambda v, least=least: v >= least))
            else:
                rows.append(row(f"{about}, {kind}: {side}", values, "1/s"))
    return rows


def cpu_s() -> float:
    """CPU time of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def measure_claims(quick: bool, where: Path) -> list[Row]:
    rows = []
    for pending in (10, 100, 1000) if quick else (10, 100, 1000, 10_000):
        medians, tails = [], []
        for _ in range(2 if quick else 5):
            with folder(where) as root:
                median, tail = claim_latencies(root, pending)
            medians.append(median)
            tails.append(tail)
        rows.append(row(f"claim p50, {pending} pending", medians, "µs", "< 50", lambda value: value < 50))
        rows.append(row(f"claim p99, {pending} pending", tails, "µs"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, peers only in one setting")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    memory = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    places = {"tmpfs": memory, "disk": Path(tempfile.gettempdir())}
    times = 3 if options.quick else 10
    rows = measure_claims(options.quick, memory)
    rows.append(row("encode + decode, 16 x 512", [codec_ms() for _ in range(times)], "ms", "< 0.3", lambda v: v < 0.3))
    deaths = repeated(times, memory, death_to_pending_ms)
    rows.append(row("death of a worker to pending", deaths, "ms", "< 100", lambda v: v < 100))
    idle = repeated(1 if options.quick else 3, memory, lambda root: idle_percent(root, 4.0))
    rows.append(row("idle, server and worker", idle, "% of a core", "< 1", lambda v: v < 1))
    restarts = repeated(1 if options.quick else 3, memory, lambda root: restart_s(root, 10_000))
    rows.append(row("restart with 10,000 in done/", restarts, "s", "< 0.5", lambda v: v < 0.5))
    rows += measure_cycles(options.quick, places)
    for entry in rows:
        verdict = {True: "reached", False: "MISSED", None: ""}[entry.ok]
        low, _, high = entry.spread
        told = f"{entry.value:>10,.2f} {entry.unit:<12} [{low:,.2f} … {high:,.2f}]"
        print(f"{entry.name:<58} {told:<48} {entry.target} {verdict}".rstrip())
    if options.json:
        machine = {
            "platform": platform.platform(),
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "load": os.getloadavg(),
        }
        options.json.write_text(json.dumps({"machine": machine, "rows": [asdict(entry) for entry in rows]}, indent=2))


if __name__ == "__main__":
    main()
