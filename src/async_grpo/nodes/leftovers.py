"""A program that deletes a node's run directory when the actor has been killed, and its workers have ended.

Its standard input is a pipe that the actor holds open: the kernel closes it with the actor, however that died. It
imports nothing of the package, so that it costs a node a few megabytes.
"""

import fcntl
import os
import shutil
import sys
import time
from pathlib import Path

END_S = 60.0  # for the workers, which the kernel has told to end
POLL_S = 0.1


def held(lock: Path) -> bool:
    """Whether a process has this lock of `rundir.locks`."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def main(root: Path) -> None:
    """Wait for the end of standard input, then for that of the workers."""
    sys.stdin.buffer.read()
    deadline = time.monotonic() + END_S
    while root.exists() and time.monotonic() < deadline:
        if not any(map(held, [*root.glob("alive/*.lock"), *root.glob("server.lock")])):
            shutil.rmtree(root, ignore_errors=True)
        time.sleep(POLL_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
