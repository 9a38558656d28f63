"""A program that deletes a node's run directory when the actor has been killed, and ends what is left of its workers.

Its standard input is a pipe that the actor holds open: the kernel closes it with the actor, however that died. It goes
on in a child of its own, as Ray kills the children of an actor that it ends. It imports nothing of the package, so that
it costs a node a few megabytes.
"""

import fcntl
import os
import shutil
import signal
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path

END_S = 20.0  # for the workers, which the kernel has told to end; then they are killed
GIVE_UP_S = 60.0
POLL_S = 0.1
FLOCK = struct.Struct("@hhqqi4x")  # as in `rundir.locks`


def holder(lock: Path) -> int:
    """The process that has this lock of `rundir.locks`; 0 if none has."""
    descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    try:
        asked = fcntl.fcntl(descriptor, fcntl.F_GETLK, FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    finally:
        os.close(descriptor)
    kind, _, _, _, pid = FLOCK.unpack(asked)
    return 0 if kind == fcntl.F_UNLCK else int(pid)


def main(root: Path) -> None:
    """Wait for the end of standard input, then for that of the workers."""
    sys.stdin.buffer.read()
    began = time.monotonic()
    while root.exists() and time.monotonic() - began < GIVE_UP_S:
        alive = {pid for lock in (*root.glob("alive/*.lock"), *root.glob("server.lock")) if (pid := holder(lock))}
        if not alive:
            shutil.rmtree(root, ignore_errors=True)
        for pid in alive if time.monotonic() - began > END_S else ():
            with suppress(ProcessLookupError):  # it holds a lock of this node's run: it is one of its workers
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)


if __name__ == "__main__":
    if not os.fork():
        main(Path(sys.argv[1]))
