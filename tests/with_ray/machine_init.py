"""The first process of a "machine": it makes what the machine has of its own, and ends with its standard input.

It runs in new PID, mount, network, UTS, IPC and time namespaces. With it the kernel ends every process of them.
"""

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress

SHM = "size=1g,mode=1777"


def reap(*_: object) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main(name: str, folder: str) -> None:
    socket.sethostname(name)
    for arguments in (
        ("--bind", folder, "/tmp"),
        ("-t", "tmpfs", "-o", SHM, "tmpfs", "/dev/shm"),
        ("-o", "remount,bind,ro", "/"),
    ):
        subprocess.run(["mount", *arguments], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    os.chdir("/tmp")
    signal.signal(signal.SIGCHLD, reap)
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
