"""Process 1 of a sandbox: makes the file system that the program sees, starts it with no rights, waits for it.

Run as `python -I -S -c` with the code of this file and a call of `main`, so it imports nothing of Async-GRPO, and
nothing that takes long. Writes one word to the status pipe that the program is about to start; anything else there is
the reason why it is not.
"""

# ruff: noqa: PTH102, PTH103, PTH112, PTH114, PTH115, PTH116, PTH120, PTH123, PTH211, SIM105 (imports that take longer than the rest)
from __future__ import annotations

import ctypes
import os
import resource

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing itself takes longer to import than all else here
    from typing import Any

WORK = "/program"  # the program's directory, the only place where it can write
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_MNT_DETACH, _AT_RECURSIVE, _AT_FDCWD = 2, 0x8000, -100
_SYS_MOUNT_SETATTR = 442  # the same number on every architecture
_READ_ONLY, _NO_SUID = 1, 2
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38
_SECCOMP_MODE_FILTER = 2
_SYS_KEYCTL = {"x86_64": 250, "aarch64": 219}
_KEYCTL_JOIN_SESSION_KEYRING = 1
_FIRST_NAMESPACE = 0xF0000000  # namespaces have numbers from here, unique on the machine
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
        _enter_group(settings["group_fd"])
        _leave_keyrings()
        uid = _own_uid(settings["first_uid"])
        source = _read_exactly(settings["source_bytes"])
        if settings["build_root"]:
            if os.getpid() != 1:  # in the namespaces of the machine the next lines would be a disaster
                raise PermissionError("the namespaces were not made")
            _build_root(settings)
        with open(f"{WORK}/main.py", "wb") as file:
            file.write(source)
        program = os.fork()
        if program == 0:
            _become_program(settings, uid, status)
        os.close(status)
    except BaseException as error:  # noqa: BLE001 - reported to the process outside
        os.write(status, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    _, ending = os.waitpid(program, 0)
    os._exit(ending >> 8 if os.WIFEXITED(ending) else 128 + os.WTERMSIG(ending))


def _enter_group(door: int | None) -> None:
    if door is not None:
        try:
            os.write(door, b"0")
        except OSError:
            pass  # the group is one limit more, where the machine has it
        os.close(door)


def _leave_keyrings() -> None:
    """Take a new session keyring; the program cannot use keys at all, but what the kernel does for it could."""
    number = _SYS_KEYCTL[os.uname().machine]
    _libc.syscall(number, _KEYCTL_JOIN_SESSION_KEYRING, None)  # a kernel or a container without keys has none to leave


def _own_uid(first_uid: int | None) -> int | None:
    """A user who runs nothing else on this machine, so that its processes are counted by themselves."""
    return None if first_uid is None else first_uid + (os.stat("/proc/self/ns/pid").st_ino - _FIRST_NAMESPACE)


def _read_exactly(size: int) -> bytes:
    """The program's source; what is left in standard input is the program's."""
    data = b""
    while len(data) < size:
        more = os.read(0, size - len(data))
        if not more:
            raise ValueError("the source is incomplete")
        data += more
    return data


def _build_root(settings: dict[str, Any]) -> None:
    """A root with Python and the system's libraries, read-only, and one small writable directory. No home, no data.

    The way of bubblewrap: become the root of an empty file system first, so that no source is hidden by it.
    """
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    os.chdir("/tmp")
    os.mkdir("old")
    os.mkdir("new")
    _check(_libc.pivot_root(b".", b"old"), "pivot_root")
    os.chdir("/")
    _mount("tmpfs", "/new", "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    for path in settings["visible"]:
        _show(path)
    os.mkdir("/new" + WORK)
    _set_read_only("/new")
    size = settings["work_bytes"]
    _mount("tmpfs", "/new" + WORK, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={size},nr_inodes=1024,mode=1777")
    os.chdir("/new")
    _check(_libc.pivot_root(b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _MNT_DETACH), "umount2")
    os.chdir(WORK)


def _show(path: str) -> None:
    """Make a file, a directory or a link of the old root appear in the new one."""
    old, new = "/old" + path, "/new" + path
    if not os.path.lexists(old) or os.path.lexists(new):
        return
    os.makedirs(os.path.dirname(new), exist_ok=True)
    if os.path.islink(old):
        os.symlink(os.readlink(old), new)
        return
    if os.path.isdir(old):
        os.mkdir(new)
    else:
        os.close(os.open(new, os.O_CREAT | os.O_WRONLY, 0o600))
    _mount(old, new, None, _MS_BIND | _MS_REC)


def _become_program(settings: dict[str, Any], uid: int | None, status: int) -> None:
    """Give up every right, take on the limits, and be the program. Never returns."""
    try:
        _give_up_rights(uid)
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


def _set_read_only(path: str) -> None:
    attributes = (ctypes.c_uint64 * 4)(_READ_ONLY | _NO_SUID, 0, 0, 0)
    result = _libc.syscall(
        _SYS_MOUNT_SETATTR, _AT_FDCWD, path.encode(), _AT_RECURSIVE, ctypes.byref(attributes), ctypes.sizeof(attributes)
    )
    _check(result, "mount_setattr")


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, options)]
    result = _libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])
    _check(result, f"mount {source} on {target}")


def _prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, value, 0, 0, 0), "prctl")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
