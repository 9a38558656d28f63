"""The kill loop: one server, four workers, SIGKILL after SIGKILL. Prints a summary as JSON; fails with an assertion.

Workers fork children that outlive them, in every way a library may do so. Their jobs must be free anyway.

python tests/chaos/queue_kill_loop.py --root DIR --jobs 10000 --kills 1000
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from queue_harness import Log, Trainer, arguments, claim_now, execute, leftovers, replay

from async_grpo.queue import WorkerQueue

SERVER_SHARE = 0.05  # of the kills
AHEAD = 64  # jobs admitted ahead of the kills, so that there is always something to interrupt
WORK_S = 0.004  # the longest job
MAX_ATTEMPTS = 60  # a job may be with a worker that is killed this often before it is blamed


def fork_by_python() -> int:
    """As multiprocessing does."""
    return os.fork()


def fork_by_library() -> int:
    """No hook of Python runs in the child."""
    return int(ctypes.PyDLL(None).fork())


def leave_orphan(number: int, end: int) -> None:
    """Start a child that has all descriptors of this worker, and lives until nobody holds the other side of `end`."""
    if number % 3 == 0:
        subprocess.Popen(["cat"], stdin=end, close_fds=False)
    elif (fork_by_python if number % 3 == 1 else fork_by_library)() == 0:
        os.read(end, 1)
        os._exit(0)


def forked(role: Callable[[], None], log: Log) -> int:
    """Run `role` in a child; an exception in it goes into the log."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        role()
        code = 0
    except BaseException:  # noqa: BLE001 - nothing of the parent may run on in the child
        log.write("crashed", traceback=traceback.format_exc())
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    options = arguments(jobs=10_000, kills=1_000, workers=4, gap=0.010, deadline=600.0)
    root: Path = options.root / "q"
    log_path = options.root / "log"
    log = Log(log_path)
    dice = random.Random(options.seed)
    admitted = options.root / "admitted"  # as many bytes as jobs may be issued
    orphans_end, mine = os.pipe()  # orphans end when this process does

    def admit(kills_done: int) -> None:
        os.truncate(admitted, AHEAD + (options.jobs - AHEAD) * kills_done // max(1, options.kills))

    def server() -> None:
        os.close(mine)
        trainer = Trainer(root, options.jobs, log, window=32, steps=16, max_attempts=MAX_ATTEMPTS)
        while not trainer.done:
            trainer.submit(below=admitted.stat().st_size)
            if not trainer.collect():
                trainer.queue.wait(0.02)
            if dice.random() < 0.02:
                trainer.trim(500)
        trainer.checkpoint()
        trainer.queue.close()

    def worker(number: int, life: int) -> None:
        os.close(mine)
        queue = WorkerQueue.open(root, number, "cpu")
        dice = random.Random(f"{options.seed} {number} {life}")
        if life == 0:
            leave_orphan(number, orphans_end)
        while True:
            for claim in claim_now(queue, dice.randint(1, 3)):
                if dice.random() < 0.02:
                    queue.hand_back(claim)
                else:
                    execute(queue, claim, log, work_s=dice.uniform(0, WORK_S))
            queue.wait(0.1)

    def spawn(number: int, life: int) -> int:
        return forked(server if number == 0 else lambda: worker(number, life), log)

    started = time.monotonic()
    admitted.touch()
    admit(0)
    children = {number: spawn(number, 0) for number in range(options.workers + 1)}
    try:
        for kill in range(options.kills):
            time.sleep(dice.uniform(0, 2 * options.gap))
            victim = 0 if dice.random() < SERVER_SHARE else dice.randint(1, options.workers)
            os.kill(children[victim], signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(children.pop(victim), 0)[1])
            assert code == -signal.SIGKILL, f"{victim or 'server'} had ended with {code} before it was killed"
            children[victim] = spawn(victim, kill + 1)
            admit(kill + 1)
        deadline = time.monotonic() + options.deadline
        while os.waitpid(children[0], os.WNOHANG)[0] == 0:
            left = sorted(path.name for path in (root / "queue").iterdir())[:20]
            assert time.monotonic() < deadline, f"not drained after {options.deadline:.0f} s: {left}"
            time.sleep(0.02)
        del children[0]
    finally:
        for pid in children.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    check(root, log_path, options.jobs, options.kills, options.workers, time.monotonic() - started)


def check(root: Path, log_path: Path, jobs: int, kills: int, workers: int, seconds: float) -> None:
    told = replay(log_path, jobs)
    for number in range(1, workers + 1):
        WorkerQueue.open(root, number, "cpu").close()  # what a restart tidies up
    assert len(told.applied) == jobs, f"only {len(told.applied)} of {jobs} jobs were applied"
    assert told.executions <= jobs + kills, f"{told.executions} executions"
    assert not told.regenerated, f"groups that had been used were generated again: {told.regenerated}"
    assert not told.healing, f"something was mended though nobody damaged a file: {told.healing}"
    assert not leftovers(root), leftovers(root)
    counts = {"executions": told.executions, "servers": told.servers, "jobs": jobs, "kills": kills}
    print(json.dumps({**counts, "seconds": round(seconds, 1)}))


if __name__ == "__main__":
    try:
        main()
    except AssertionError as error:
        traceback.print_exception(error)
        sys.exit(1)
