"""What the monkey does to a run: a table of faults, each with the condition under which it can happen."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import NamedTuple

import psutil
from monkey_run import DISK_BYTES, MonkeyRun

Action = Callable[[MonkeyRun, Random], None]
LONG_AGO, FAR_AHEAD = 0, 4_102_444_800  # 1970 and 2100
ENTRIES = (  # of a run directory, in whose place something else can be found at the next start
    *("run.json", "server.lock", "metrics.jsonl", "consumed.jsonl", "evaluations.jsonl", "hyperparameters.json"),
    *("summary.json", "log_parameter_server.txt", "log_worker_1.txt", "log_worker_2.txt", "ps_ipc_handle.json"),
    *("alive/dev1.lock", "alive/dev2.status", "alive/server.status", "alive/server.stacks", "tmp/jobs.pipe"),
)


class Fault(NamedTuple):
    possible: Callable[[MonkeyRun], bool]
    strike: Action


def always(run: MonkeyRun) -> bool:
    return True


def is_alive(run: MonkeyRun) -> bool:
    return bool(run.processes())


# --- signals


def one_process(run: MonkeyRun, random: Random) -> psutil.Process:
    if processes := run.processes():
        return processes[random.choice(sorted(processes))]
    raise psutil.NoSuchProcess(0)  # they have ended meanwhile


def send(number: signal.Signals) -> Action:
    def strike(run: MonkeyRun, random: Random) -> None:
        with suppress(psutil.NoSuchProcess):
            one_process(run, random).send_signal(number)

    return strike


def pause(run: MonkeyRun, random: Random) -> None:
    """Stop one process for a moment."""
    with suppress(psutil.NoSuchProcess):
        stopped = one_process(run, random)
        stopped.suspend()
        time.sleep(random.uniform(0.1, 3.0))
        stopped.resume()


def kill_everything(run: MonkeyRun, random: Random) -> None:
    """As a power cut does to processes."""
    for process in run.processes().values():
        with suppress(psutil.NoSuchProcess):
            process.kill()


# --- disks


def mount_small_disk(folder: Path) -> str:
    """Mount one there, which `unmount` takes away; why not, where that cannot be."""
    if shutil.which("mount") is None:
        return "there is no mount command"
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True, text=True).stderr.strip()


def unmount(folder: Path) -> None:
    if os.path.ismount(folder):
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill_disk(run: MonkeyRun, random: Random) -> None:
    filler = run.folder / "filler"
    try:
        with filler.open("wb", buffering=0) as file:
            for size in (1 << 20, 4096, 1):
                while True:
                    try:
                        file.write(bytes(size))
                    except OSError as error:
                        assert error.errno == errno.ENOSPC
                        break
        time.sleep(random.uniform(0.5, 5.0))
    finally:
        filler.unlink()


# --- files


def plant_of_users(run: MonkeyRun, random: Random) -> None:
    paths = ("worker/notes.txt", "worker/queue/notes.txt", "worker/done/x/0.txt", "worker/alive/me.txt")
    outputs = ("notes.txt", "checkpoint-best/model.safetensors", "checkpoint-8-backup/rollout_state.json")
    path = random.choice((*paths, *(f"checkpoints/{name}" for name in outputs)))
    if (run.home / path).parts[-2] == "worker" or run.run_dir.is_dir():
        run.plant_mine(run.home / path)


def plant_in_queue(run: MonkeyRun, random: Random) -> None:
    """Something under a name that a job or a group of this run might have."""
    seq = random.choice([*(4 * random.randrange(42) + index for index in range(4)), 9_999_999_999])
    state = random.choice(("pending", "complete_from_dev1", "processing_by_dev2", "complete_from_dev77"))
    folder = random.choice(("queue", "queue", "quarantine", "done/0000000"))
    path = run.run_dir / folder / f"{seq:010d}.a{random.randrange(3):02d}_{state}.safetensors"
    if path.parent.is_dir() and not os.path.lexists(path):
        _something(path, run.victim, random)
        if folder != "queue":
            run.may_be_told |= {rf"{folder}/.* is broken", r"No file knows groups"}
        run.may_be_told |= {r"queue/.* is broken", r"No file knows groups"}


def put_in_place(run: MonkeyRun, random: Random) -> None:
    """Something in the place of a file of the run, which has ended."""
    path = run.run_dir / random.choice(ENTRIES)
    _end(run)
    if path.parent.is_dir() and path not in run.obstacles:
        run.put_aside(path)
        _something(path, run.victim, random)


def _something(path: Path, victim: Path, random: Random) -> None:
    kind = random.choice(("pipe", "link", "folder", "sparse", "broken link"))
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        (path / "inside").mkdir(parents=True)
    elif kind == "sparse":
        path.touch(mode=0o600)
        os.truncate(path, 300 << 20)
    else:
        path.symlink_to(victim if kind == "link" else path.with_name("nowhere"))


def truncate(run: MonkeyRun, random: Random) -> None:
    path = _one_of(run, random, "queue/*.safetensors", "done/*/*.safetensors", "metrics.jsonl")
    if path is not None:
        with suppress(FileNotFoundError):
            os.truncate(path, path.stat().st_size * random.randrange(4) // 4)
            run.hit_groups = True
            run.may_be_told |= {r"(queue|done)/.* is broken", r"Group \d+ was used by step \d+, but its file has"}


def rename_in_queue(run: MonkeyRun, random: Random) -> None:
    path = _one_of(run, random, "queue/*.safetensors")
    if path is not None:
        with suppress(FileNotFoundError):
            path.rename(path.with_name(random.choice(("renamed.txt", "0000000001.safetensors", f"{path.name}.bak"))))
            run.hit_groups = True
            run.may_be_told.add(r"Group \d+ is lost")  # until the server notices, or the next one


def delete_in_queue(run: MonkeyRun, random: Random) -> None:
    path = _one_of(run, random, "queue/*.safetensors")
    if path is not None:
        path.unlink(missing_ok=True)
        run.hit_groups = True
        run.may_be_told.add(r"Group \d+ is lost")


def move_clocks(run: MonkeyRun, random: Random) -> None:
    """Set the times of all files."""
    when = random.choice((LONG_AGO, FAR_AHEAD))
    for folder in (run.run_dir, run.outputs):
        for path in folder.rglob("*"):
            with suppress(FileNotFoundError):
                os.utime(path, (when, when), follow_symlinks=False)


def rename_run_directory(run: MonkeyRun, random: Random) -> None:
    """Rename it under the run, and back when that has ended."""
    if not run.run_dir.is_dir():
        return
    moved = run.run_dir.rename(run.home / "renamed")
    run.await_end()
    assert not run.run_dir.exists(), "it was made again"
    moved.rename(run.run_dir)


# --- checkpoints, and where they are looked for


def tear_checkpoint(run: MonkeyRun, random: Random) -> None:
    checkpoint = random.choice(run.checkpoints()).path
    run.torn.add(checkpoint)
    name = random.choice(("model.safetensors", "optimizer.pt", "rollout_state.json", "trainer_state.json"))
    run.may_be_told.add(rf"{checkpoint}/rollout_state\.json cannot be used")
    with suppress(FileNotFoundError):
        path = checkpoint / name
        os.truncate(path, path.stat().st_size // 2) if random.random() < 0.5 else path.unlink()


def resume_from_elsewhere(run: MonkeyRun, random: Random) -> None:
    _end(run)
    run.start(cwd=run.elsewhere)


def _end(run: MonkeyRun) -> None:
    if launcher := run.processes().get("launcher"):
        launcher.terminate()
    run.await_end()


def _one_of(run: MonkeyRun, random: Random, *patterns: str) -> Path | None:
    found = [path for pattern in patterns for path in sorted(run.run_dir.glob(pattern)) if path not in run.mine]
    found = [path for path in found if path.is_file() and not path.is_symlink()]
    return random.choice(found) if found else None


FAULTS = {
    "SIGTERM": Fault(is_alive, send(signal.SIGTERM)),
    "SIGINT": Fault(is_alive, send(signal.SIGINT)),
    "SIGKILL": Fault(is_alive, send(signal.SIGKILL)),
    "SIGSTOP, then SIGCONT": Fault(is_alive, pause),
    "SIGKILL to all": Fault(is_alive, kill_everything),
    "a full disk": Fault(lambda run: os.path.ismount(run.folder), fill_disk),
    "a file of the user's": Fault(always, plant_of_users),
    "something in the queue": Fault(always, plant_in_queue),
    "something in a file's place": Fault(always, put_in_place),
    "a truncated file": Fault(always, truncate),
    "a renamed job or group": Fault(always, rename_in_queue),
    "a deleted job or group": Fault(always, delete_in_queue),
    "file times of 1970 or 2100": Fault(always, move_clocks),
    "the run directory renamed": Fault(is_alive, rename_run_directory),
    "a torn checkpoint": Fault(lambda run: len(run.checkpoints()) >= 2, tear_checkpoint),
    "resume from elsewhere": Fault(always, resume_from_elsewhere),
}
