"""`python -I -S held.py PARENT_PID CORES COMMAND…`: become COMMAND, which gets SIGTERM when the parent dies.

The kernel keeps the wish across `exec`, and sends the signal even where the parent was killed by SIGKILL. CORES is a
list of the cores that the command may use (`0,1`), or `all`. This file is run by its path and imports nothing of the
project, so that it costs a few milliseconds.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent_pid: int, cores: str, command: list[str]) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:  # it died before we asked
        sys.exit(128 + signal.SIGTERM)
    if cores != "all":
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"error: {command[0]} cannot be started: {error.strerror}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
