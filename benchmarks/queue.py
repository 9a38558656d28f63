"""The job queue: claim latency, full cycles beside other queues, codec, recovery, idle cost.

    python benchmarks/queue.py [--quick] [--json FILE]

A full cycle is: 2 KiB job issued, claimed, 64 KiB result published, taken and archived; at most 16 jobs are open. Ours
encodes, checks and decodes records all the while; the others move bytes. Peers are run if they can be imported
(`pip install persist-queue huey diskcache litequeue dirq redis`; Redis also needs `redis-server`). "claims die" says
that a job whose worker is killed is gone.
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

import numpy as np

from async_grpo.job_file import decode_group, encode_group
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


def row(name: str, values: list[float], unit: str, target: str = "", met: Callable[[float], bool] | None = None) -> Row:
    middle = statistics.median(values)
    spread = (min(values), middle, max(values))
    return Row(name=name, value=middle, unit=unit, target=target, ok=met(middle) if met else None, spread=spread)


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


def cycles_of_ours(root: Path, workers: int, jobs: int) -> float:
    """Full cycles a second through `ServerQueue` and `WorkerQueue`."""
    server = ServerQueue.open(root / "q", RUN)
    with running(workers, lambda number: ours_works(root / "q", number)):
        wait_until(lambda: len(server.workers()) == workers)
        started, issued, taken = time.perf_counter(), 0, 0
        while taken < jobs:
            while issued < jobs and server.open_jobs < OPEN_JOBS:
                server.submit(make_job(issued))
                issued += 1
            entries = server.finished()
            taken += sum(server.take(entry) is not None for entry in entries)
            if not entries:
                server.wait(1)
        seconds = time.perf_counter() - started
    assert not any(asdict(server.healing).values()), server.healing
    server.close()
    return jobs / seconds


def ours_works(root: Path, number: int) -> None:
    worker = WorkerQueue.open(root, number, "cpu")
    template = make_group(make_job(0), 0, worker.name)
    fields = {name: getattr(template, name) for name in RolloutGroup.__dataclass_fields__}
    while True:
        claims: list[Claim] = worker.claim(4)
        for claim in claims:
            worker.complete(claim, RolloutGroup(**{**fields, "job": claim.job, "attempt": claim.attempt}))
        if not claims:
            worker.wait(1)


# --- peers -----------------------------------------------------------------------------------------------------------


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
    """One table, WAL, synchronous=NORMAL."""

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(path / "db", isolation_level=None, timeout=30)
        self._db.execute("pragma journal_mode=wal")
        self._db.execute("pragma synchronous=normal")
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


# name: module, channel, whether a claim survives a crash
PEERS: dict[str, tuple[str, Callable[[Path], Channel], bool]] = {
    "Maildir": ("mailbox", Maildir, True),
    "SQLite WAL NORMAL": ("sqlite3", Sqlite, True),
    "persist-queue": ("persistqueue", PersistQueue, True),
    "huey file": ("huey", HueyFile, False),
    "huey sqlite": ("huey", HueySqlite, False),
    "diskcache": ("diskcache", DiskCache, False),
    "litequeue": ("litequeue", LiteQueue, True),
    "dirq": ("dirq", Dirq, True),
    "Redis": ("redis", Redis, True),
    BARE: ("os", Renames, True),
}


def available(name: str) -> bool:
    with suppress(ImportError):
        importlib.import_module(PEERS[name][0])
        return name != "Redis" or shutil.which("redis-server") is not None
    return False


def cycles_of_peer(root: Path, workers: int, jobs: int, name: str) -> float:
    """Full cycles a second."""
    make = PEERS[name][1]
    with redis_server(root) if name == "Redis" else nullcontext():
        todo, results = make(root / "jobs"), make(root / "results")
        with running(workers, lambda number: peer_works(make, root)):
            time.sleep(0.3)
            started, issued, taken = time.perf_counter(), 0, 0
            while taken < jobs:
                while issued < jobs and issued - taken < OPEN_JOBS:
                    todo.put(JOB)
                    issued += 1
                found = results.claim()
                if found is None:
                    assert time.perf_counter() - started < 60, f"{name}: {jobs - taken} of {jobs} results are missing"
                    time.sleep(IDLE_S)
                    continue
                assert len(found[1]) == len(RESULT)
                results.done(found[0])
                taken += 1
            return jobs / (time.perf_counter() - started)


def peer_works(make: Callable[[Path], Channel], root: Path) -> None:
    todo, results = make(root / "jobs"), make(root / "results")
    while True:
        found = todo.claim()
        if found is None:
            time.sleep(IDLE_S)
            continue
        results.put(RESULT)
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


def measure_cycles(quick: bool, places: dict[str, Path]) -> list[Row]:
    """Ours and the peers in turns, so that a busy machine slows all of them; with the CPU time that a cycle costs."""
    rows: list[Row] = []
    names = [name for name in PEERS if available(name)]
    print(f"not installed: {', '.join(set(PEERS) - set(names)) or 'none'}", file=sys.stderr)
    for place, where in places.items():
        for workers in (1, 4):
            first = place == "tmpfs" and workers == 1
            about = f"full cycle, {place}, {workers} worker{'s' if workers > 1 else ''}"
            rows += compare_cycles(about, where, workers, names if first or not quick else [], quick, first)
    return rows


def compare_cycles(about: str, where: Path, workers: int, names: list[str], quick: bool, first: bool) -> list[Row]:
    jobs, times = (300, 2) if quick else (1000, 3)
    values: dict[str, list[float]] = {"": [], **{name: [] for name in names}}
    cpu: dict[str, list[float]] = {name: [] for name in values}
    for _ in range(times):
        before = cpu_s()
        values[""] += repeated(1, where, lambda root: cycles_of_ours(root, workers, 3 * jobs))
        cpu[""].append(1e6 * (cpu_s() - before) / (3 * jobs))
        for name in [name for name in values if name]:
            before = cpu_s()
            try:
                values[name] += repeated(1, where, partial(cycles_of_peer, workers=workers, jobs=jobs, name=name))
            except (AssertionError, sqlite3.OperationalError) as error:
                print(f"{about}: {name} failed: {error}", file=sys.stderr)
                del values[name], cpu[name]
            else:
                cpu[name].append(1e6 * (cpu_s() - before) / jobs)
    rivals = [statistics.median(values[name]) for name in values if name not in ("", BARE) and PEERS[name][2]]
    least = max([*rivals, 5000.0 if first else 0.0])
    target = "ahead of every peer whose claims survive" if rivals else ""
    target = f">= 5000, {target}" if first else target
    ours = row(f"{about}: ours", values.pop(""), "1/s", target, (lambda value: value >= least) if target else None)
    peers = [row(f"{about}: {name}{'' if PEERS[name][2] else ' (claims die)'}", values[name], "1/s") for name in values]
    costs = [row(f"CPU of a cycle, all processes: {name or 'ours'}", cpu[name], "µs") for name in cpu] if first else []
    return [ours, *peers, *costs]


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
