"""The system calls that a program in the sandbox may not make, as a filter for the kernel (classic BPF, seccomp(2)).

Namespaces contain none of these: keys of the user, sockets to the host (AF_VSOCK), and memory that no limit of a
process counts (System V shared memory, memfd, a tmpfs in a user namespace of the program's own). The rest of the list
are large parts of the kernel that no ordinary program uses. A call that is newer than the list fails as on an older
kernel, so that libraries take their older way. libseccomp would need a library of the system for these few lines.
"""

from __future__ import annotations

import errno
import socket
import struct

# Numbers on x86_64 and on aarch64.
_FORBIDDEN = {
    # keys
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # memory that RLIMIT_AS does not count
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    # namespaces and file systems
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    # other processes and their memory
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    # large parts of the kernel, and the kernel itself
    "bpf": (321, 280),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "fanotify_init": (300, 262),
    "vmsplice": (278, 75),
    "syslog": (103, 116),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
}
_CLONE, _CLONE3 = (56, 220), (435, 435)
_SOCKET, _SOCKETPAIR = (41, 198), (53, 199)
_LAST = 450  # set_mempolicy_home_node; x86_64's second set of numbers (x32) is above it
_NEW_NAMESPACE = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH_…

_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000


def forbidden(machine: str) -> dict[str, int]:
    """Name and number of each call that fails with EPERM.

    Raises:
        ValueError: the numbers of this machine's system calls are not known.
    """
    if machine not in _MACHINES:
        raise ValueError(f"there is no list of system calls for {machine}, only for {', '.join(_MACHINES)}")
    column, _ = _MACHINES[machine]
    return {name: numbers[column] for name, numbers in _FORBIDDEN.items()}


def filter_program(machine: str) -> bytes:
    """The filter, as an array of `struct sock_filter`.

    Raises:
        ValueError: the numbers of this machine's system calls are not known.
    """
    numbers = forbidden(machine).values()
    column, architecture = _MACHINES[machine]
    steps = [
        _step(_LOAD, _ARCHITECTURE),
        *_if(_EQUAL, architecture, otherwise=errno.ENOSYS),
        _step(_LOAD, _NUMBER),
        *_fail_if(_AT_LEAST, _LAST + 1, errno.ENOSYS),
        *_fail_if(_EQUAL, _CLONE3[column], errno.ENOSYS),  # its flags lie in memory; libraries take clone instead
    ]
    for number in numbers:
        steps += _fail_if(_EQUAL, number, errno.EPERM)
    for number in (_SOCKET[column], _SOCKETPAIR[column]):
        check = [_step(_LOAD, _FIRST_ARGUMENT), *_if(_EQUAL, socket.AF_UNIX, otherwise=errno.EAFNOSUPPORT)]
        steps += [_step(_EQUAL, number, no=len(check) + 1), *check, _step(_RETURN, _ALLOW)]
    check = [_step(_LOAD, _FIRST_ARGUMENT), *_fail_if(_ANY_BIT, _NEW_NAMESPACE, errno.EPERM)]
    steps += [_step(_EQUAL, _CLONE[column], no=len(check)), *check, _step(_RETURN, _ALLOW)]
    return b"".join(steps)


def _fail_if(test: int, value: int, error: int) -> list[bytes]:
    return [_step(test, value, no=1), _step(_RETURN, _FAIL | error)]


def _if(test: int, value: int, *, otherwise: int) -> list[bytes]:
    return [_step(test, value, yes=1), _step(_RETURN, _FAIL | otherwise)]


def _step(code: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    """`yes` and `no`: how many steps to skip after a test."""
    return struct.pack("=HBBI", code, yes, no, value)
