"""The job queue: claim latency, full cycles beside other queues, codec, recovery, idle cost.

    python benchmarks/job_queue.py [--quick] [--json FILE]

`queue_cycles.py` says what a full cycle is, `queue_peers.py` has the other queues; those that are installed are run. On
tmpfs ours keeps all results, as a run does; on the disk the last 256, because the others delete theirs. There, queues
whose operations survive a power cut ("synced") are compared with each other only. The notes say what becomes of a claim
whose worker is killed.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import signal
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.control import PAIRS, control_s
from benchmarks.processes import running, wait_until
from benchmarks.queue_cycles import RUN, cycles_of_ours, cycles_of_peer, make_group, make_job
from benchmarks.queue_peers import BARE, PEERS, missing
from benchmarks.table import Row, as_text, row, write_json

from async_grpo.formatting import counted
from async_grpo.queue import ServerQueue, WorkerQueue
from async_grpo.queue.codec import decode_group, encode_group
from async_grpo.queue.names import COMPLETE, JobName

OURS_CLAIM = "pending again within milliseconds of its worker's death"


# --- one measurement


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
        decode_group(encode_group(group), JobName(0, 0, COMPLETE, "dev1"), RUN)
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


def idle_percent(root: Path, seconds: float = 4.0) -> float:
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


def restart_s(root: Path, finished: int = 10_000) -> float:
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


# --- repeated, and beside others


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
        self.controls: list[float] = []  # seconds of equal work, around each round

    def enter(self, side: str, measure: Callable[[Path], float], jobs: int) -> None:
        self._sides[side] = measure, jobs
        self.speed[side], self.cpu[side] = [], []

    def run(self, times: int) -> None:
        self.controls.append(control_s())
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
            self.controls.append(control_s())

    def best(self, sides: list[str]) -> float:
        return max((statistics.median(self.speed[side]) for side in sides if side in self.speed), default=0.0)


def cpu_s() -> float:
    """CPU time of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def measure_cycles(quick: bool, memory: Path, disk: Path) -> list[Row]:
    print(missing(), file=sys.stderr)
    names = [name for name, peer in PEERS.items() if peer.is_here]
    rows = cycles_in_memory(memory, 1, names, quick)
    rows += cycles_in_memory(memory, 4, [] if quick else names, quick)
    if not quick:
        rows += [row for workers in (1, 4) for row in cycles_on_disk(disk, workers, names)]
    return rows


def kind_of(records: bool) -> str:
    return "records" if records else "bytes"


def cycles_in_memory(where: Path, workers: int, names: list[str], quick: bool) -> list[Row]:
    """No power cut matters here, so all are compared."""
    about, jobs = f"full cycle, tmpfs, {counted(workers, 'worker')}", 300 if quick else 1000
    contest = Contest(about, where)
    for records in (False, True):
        run = partial(cycles_of_ours, workers=workers, jobs=3 * jobs, records=records)
        contest.enter(f"ours, {kind_of(records)}", run, 3 * jobs)
    for name in names:
        for records in (False, True) if PEERS[name].kept else (False,):
            run = partial(cycles_of_peer, workers=workers, jobs=jobs, name=name, records=records)
            contest.enter(f"{name}, {kind_of(records)}", run, jobs)
    contest.run(2 if quick else PAIRS)
    steady = partial(row, controls=contest.controls)
    rivals = [name for name in names if PEERS[name].kept and name != BARE]
    rows = []
    for records in (True, False):
        ours, kind = contest.speed.pop(f"ours, {kind_of(records)}"), kind_of(records)
        target = f"ahead of every peer that keeps claims, with {kind}" if rivals else ""
        met = statistics.median(ours) >= contest.best([f"{name}, {kind}" for name in rivals]) if rivals else None
        rows.append(steady(f"{about}: ours, {kind}", ours, "1/s", target=target, ok=met, note=OURS_CLAIM))
        if rivals and records:
            fastest = contest.best([f"{name}, bytes" for name in rivals])
            name = f"{about}: ours with records, against the fastest that keeps claims with bytes"
            rows.append(steady(name, [value / fastest for value in ours], "x", target=">= 1"))
    for side, values in contest.speed.items():
        rows.append(steady(f"{about}: {side}", values, "1/s", note=PEERS[side.rpartition(", ")[0]].claim))
    if workers == 1:
        rows += [row(f"CPU of a cycle, all processes: {side}", values, "µs") for side, values in contest.cpu.items()]
    return rows


def cycles_on_disk(where: Path, workers: int, names: list[str]) -> Iterator[Row]:
    """Queues that keep claims, those that survive a power cut apart from those that may lose what they were told."""
    for synced, jobs in ((False, 1000), (True, 200)):
        kind = "synced" if synced else "not synced"
        about = f"full cycle, disk, {counted(workers, 'worker')}, {kind}"
        contest = Contest(about, where)
        ours = "ours, durable" if synced else "ours"
        contest.enter(ours, partial(cycles_of_ours, workers=workers, jobs=jobs, durable=synced, keep=256), jobs)
        rivals = [name for name in names if PEERS[name].kept and PEERS[name].synced is synced]
        for name in rivals:
            run = partial(cycles_of_peer, workers=workers, jobs=jobs, name=name, records=True)
            contest.enter(f"{name}, records", run, jobs)
        contest.run(PAIRS)
        steady = partial(row, controls=contest.controls)
        speed = contest.speed.pop(ours)
        met = statistics.median(speed) >= contest.best([f"{name}, records" for name in rivals if name != BARE])
        target = f"ahead of every {'synced' if synced else 'unsynced'} peer that keeps claims"
        yield steady(f"{about}: {ours}", speed, "1/s", target=target, ok=met)
        for side, values in contest.speed.items():
            yield steady(f"{about}: {side}", values, "1/s")


def measure_claims(quick: bool, where: Path) -> Iterator[Row]:
    for pending in (10, 100, 1000) if quick else (10, 100, 1000, 10_000):
        medians, tails = [], []
        for _ in range(2 if quick else 5):
            with folder(where) as root:
                median, tail = claim_latencies(root, pending)
            medians.append(median)
            tails.append(tail)
        yield row(f"claim p50, {pending} pending", medians, "µs")
        yield row(f"claim p99, {pending} pending", tails, "µs")


def measure_the_rest(quick: bool, where: Path) -> Iterator[Row]:
    times, few = (3, 1) if quick else (10, 3)
    yield row("encode + decode, 16 x 512", [codec_ms() for _ in range(times)], "ms")
    yield row("death of a worker to pending", repeated(times, where, death_to_pending_ms), "ms")
    yield row("idle, server and worker", repeated(few, where, idle_percent), "% of a core", target="< 1")
    yield row("restart with 10,000 in done/", repeated(few, where, restart_s), "s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, peers only in one setting")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    disk = Path(tempfile.gettempdir())
    memory = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else disk
    load = os.getloadavg()
    rows = [*measure_claims(options.quick, memory), *measure_the_rest(options.quick, memory)]
    rows += measure_cycles(options.quick, memory, disk)
    print(as_text(rows))
    if options.json:
        write_json(options.json, rows, load_before=load)


if __name__ == "__main__":
    main()
