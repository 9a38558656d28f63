"""Anonymous shared memory: a memfd of the exporter, mapped by readers through `/proc/PID/fd/N`.

Unlike a file in /dev/shm, it never has to be removed. The kernel frees a memfd when the last process that maps
it has gone, in whatever order and by whatever signal. It is not limited by the size of /dev/shm (64 MB in
Docker), and no other user can guess its name. Readers that have it mapped keep it when the exporter dies; new
ones cannot open it then, and get an error that says so.
"""

import errno
import fcntl
import mmap
import os
import stat

from async_grpo_ipc.errors import AttachError, ExporterDiedError, IPCError
from async_grpo_ipc.locks import OwnedFd

PAGE_BYTES = mmap.PAGESIZE
NAME_PREFIX = "async-grpo-ipc-"
_F_SEAL_FUTURE_WRITE = 0x0010  # linux/fcntl.h; Python 3.11 does not name it


def create(name: str, nbytes: int) -> tuple[OwnedFd, mmap.mmap]:
    """A zeroed, fully backed mapping of `nbytes`, that only this process may write and no process can resize."""
    fd = OwnedFd(os.memfd_create(NAME_PREFIX + name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), f"shared memory {name}")
    try:
        os.posix_fallocate(fd.fileno(), 0, nbytes)  # a page that cannot be had fails here, not as SIGBUS later
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM):
            raise
        raise IPCError(
            f"Not enough memory for {nbytes / 2**30:.2f} GiB of shared memory ({error.strerror}). Publish "
            "with fewer slots, a smaller dtype, or fewer tensors, or raise the memory limit of this "
            "container."
        ) from error
    memory = mmap.mmap(fd.fileno(), nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE
    fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, seals)
    return fd, memory


def attach(pid: int, fd: int, inode: int, nbytes: int) -> mmap.mmap:
    """Map, read-only, the memory that process `pid` has open as `fd`.

    A write through this mapping ends the process with SIGSEGV instead of damaging everyone's weights.
    """
    path = proc_path(pid, fd)
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # whatever the descriptor is of, do not wait
    except (FileNotFoundError, ProcessLookupError) as error:
        raise exporter_gone(pid) from error
    except PermissionError as error:
        raise AttachError(
            f"Process {pid} publishes weights, but this process may not open its memory ({path}). Run both "
            "as the same user, in the same container, and without setuid."
        ) from error
    except OSError as error:
        raise exporter_gone(pid) from error
    try:
        found = os.fstat(opened)
        if not stat.S_ISREG(found.st_mode) or found.st_ino != inode or found.st_size < nbytes:
            raise exporter_gone(pid)
        return mmap.mmap(opened, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    finally:
        os.close(opened)


def exporter_gone(pid: int) -> ExporterDiedError:
    return ExporterDiedError(
        f"The exporter (pid {pid}) has ended, and its memory with it. Start it again: readers attach to the "
        "new one by themselves."
    )


def proc_path(pid: int, fd: int) -> str:
    return f"/proc/{pid}/fd/{fd}"
