"""Process 1 of a sandbox: starts the program with no rights, and waits for it. bubblewrap has made what both see.

Run as `python -I -S -c` with the code of this file and a call of `main`, so it imports nothing of Async-GRPO, and
nothing that takes long. Writes one word to the status pipe that the program is about to start; anything else there is
the reason why it is not.
"""

# ruff: noqa: PTH123 (imports that take longer than the rest)
from __future__ import annotations

import ctypes
import os
import resource

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing itself takes longer to import than all else here
    from typing import Any

WORK = "/program"  # the program's directory, the only folder where it can write
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38
_SECCOMP_MODE_FILTER = 2
_SYS_KEYCTL = {"x86_64": 250, "aarch64": 219}
_KEYCTL_JOIN_SESSION_KEYRING = 1
_SIGKILL = 9

_libc = ctypes.CDLL(None, use_errno=True)


class _Filter(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))


def main(settings: dict[str, Any]) -> None:
    status: int = settings["status_fd"]
    try:
        os.umask(0o022)  # the program is another user, who has to find its files
        os.set_inheritable(status, False)  # so that the start of the program closes it
        _leave_keyrings()
        source = _read_exactly(settings["source_bytes"])
        if os.getpid() != 1:
            raise PermissionError("the namespaces were not made")
        with open(f"{WORK}/main.py", "wb") as file:
            file.write(source)
        program = os.fork()
        if program == 0:
            _become_program(settings, status)
        os.close(status)
    except BaseException as error:  # noqa: BLE001 - reported to the process outside
        os.write(status, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    _, ending = os.waitpid(program, 0)
    os._exit(ending >> 8 if os.WIFEXITED(ending) else 128 + os.WTERMSIG(ending))


def _leave_keyrings() -> None:
    """Take a new session keyring; the program cannot use keys at all, but what the kernel does for it could."""
    number = _SYS_KEYCTL[os.uname().machine]
    _libc.syscall(number, _KEYCTL_JOIN_SESSION_KEYRING, None)  # a kernel or a container without keys has none to leave


def _read_exactly(size: int) -> bytes:
    """The program's source; what is left in standard input is the program's."""
    data = b""
    while len(data) < size:
        more = os.read(0, size - len(data))
        if not more:
            raise ValueError("the source is incomplete")
        data += more
    return data


def _become_program(settings: dict[str, Any], status: int) -> None:
    """Give up every right, take on the limits, and be the program. Never returns."""
    try:
        _give_up_rights(settings["uid"])
        _take_on_limits(settings["rlimits"])
        os.chdir(WORK)
        _filter_calls(settings["filter"])
        os.write(status, b"ready")
        python = settings["python"]
        os.execve(python, [python, "-I", "-S", "-X", "utf8", f"{WORK}/main.py"], {})
    except BaseException as error:  # noqa: BLE001 - reported to the process outside
        os.write(status, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(1)


def _give_up_rights(uid: int | None) -> None:
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    for capability in range(64):
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # of those that there are, and that we have
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    _prctl(_PR_SET_PDEATHSIG, _SIGKILL)


def _take_on_limits(limits: dict[str, int]) -> None:
    resource.setrlimit(resource.RLIMIT_NPROC, (0, resource.getrlimit(resource.RLIMIT_NPROC)[1]))
    try:
        if os.fork() == 0:
            os._exit(0)
    except OSError:
        pass
    else:
        raise PermissionError("the kernel does not limit the number of processes of this user")
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, name), (value, value))


def _filter_calls(steps: bytes) -> None:
    program = _Filter(len(steps) // 8, steps)
    _check(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0), "seccomp")


def _prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, value, 0, 0, 0), "prctl")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
