"""What each process of a run does about signals, its parent's death, its log and its environment."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import io
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import loguru

from async_grpo.formatting import printable
from async_grpo.log import logger
from async_grpo.rundir.folders import check_own, make_folder
from async_grpo.rundir.reading import naming, open_plain
from async_grpo.setup.output import LossyOutput, survive_lost_output

if TYPE_CHECKING:
    import psutil
    from loguru import Record

LOG_FORMAT = "{time:HH:mm:ss} <level>{level: <7}</level> {message}"
_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_KEPT_BYTES = 1 << 30
STACKS_SIGNAL = signal.SIGUSR1
STACKS_THREAD = "stacks are written by thread "
SIGNAL_AGAIN_S = 0.1
LEFT_BEHIND_S = 2.0  # for processes that their parent has left behind, between SIGTERM and SIGKILL


class StopRequest:
    """What SIGTERM and SIGINT do: end the process at once while it starts, set `requested` once it `defers()`."""

    def __init__(self) -> None:
        self.requested = False
        self._deferred = False

    def install(self) -> StopRequest:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        if sys.unraisablehook != self._on_unraisable:
            self._report_unraisable, sys.unraisablehook = sys.unraisablehook, self._on_unraisable
        return self

    def defer(self) -> None:
        """From now on only set the flag: the process checks it and ends in good order."""
        self._deferred = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        if not self._deferred:
            raise SystemExit(0)

    def _on_unraisable(self, found: sys.UnraisableHookArgs) -> None:
        """Send the signal again where Python has dropped our `SystemExit`, as it does in a `__del__`."""
        if found.exc_type is SystemExit and self.requested and not self._deferred:
            again = threading.Timer(SIGNAL_AGAIN_S, os.kill, (os.getpid(), signal.SIGTERM))
            again.daemon = True
            again.start()
        else:
            self._report_unraisable(found)


@contextmanager
def ending_kept() -> Iterator[None]:
    """Put back what a launcher ends this process by, and reads why it ended, where code in this block replaces it."""
    hooks = {name: getattr(sys, name) for name in ("stderr", "excepthook", "unraisablehook")}
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    if not isinstance(getattr(handlers[signal.SIGTERM], "__self__", None), StopRequest):  # the process is the user's
        yield
        return
    try:
        yield
    finally:
        replaced = [f"sys.{name}" for name, hook in hooks.items() if getattr(sys, name) != hook]
        replaced += [number.name for number, ours in handlers.items() if signal.signal(number, ours) != ours]
        vars(sys).update(hooks)
        if replaced:
            logger.warning(
                "the setup file replaces {} in this process: put back, because a launcher ends it by signals and reads "
                "on its standard error why it failed",
                ", ".join(replaced),
            )


def end_with_parent(parent_pid: int, number: signal.Signals = signal.SIGTERM) -> None:
    """Get a signal when the parent dies, even by SIGKILL, so that no child of a launcher is left behind."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:  # it died before we asked
        os.kill(os.getpid(), number)


def ignore_stacks_signal() -> None:
    """Do nothing on SIGUSR1, which by default ends a process, until `write_stacks_on_signal`; children inherit it."""
    signal.signal(STACKS_SIGNAL, signal.SIG_IGN)


def write_stacks_on_signal(path: Path) -> None:
    """From now on SIGUSR1 appends the stacks of all threads to `path`, however busy or hung the interpreter is.

    They name files, lines and functions, no values. `async-grpo doctor --dump` asks for them: first the thread that
    waits for the signal, which writes while no other runs Python. Where none can run it, because a call of C keeps the
    interpreter's lock, it signals the process, and a handler of C writes. While others run, that handler would read
    frames that are gone, and a segmentation fault would end the process (seen with Python 3.11, 3.12 and 3.13).
    """
    make_folder(path.parent)
    with naming(path):
        descriptor = open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # kept: both write to it
    os.ftruncate(descriptor, 0)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {STACKS_SIGNAL})  # which the thread inherits
    thread = threading.Thread(target=_write_stacks, args=(descriptor,), name="stacks", daemon=True)
    thread.start()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.write(descriptor, f"{STACKS_THREAD}{thread.native_id}\n".encode())
    faulthandler.register(STACKS_SIGNAL, file=descriptor, all_threads=True, chain=False)  # last: from now on it listens


def _write_stacks(descriptor: int) -> None:
    """Write the stacks whenever this thread is sent the signal, which it blocks. The file's first line names it."""
    while True:
        signal.sigwait({STACKS_SIGNAL})
        faulthandler.dump_traceback(descriptor, all_threads=True)


def start_logged(command: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own; what it writes is appended to `log`."""
    with naming(log), os.fdopen(open_plain(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as file:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=env, start_new_session=True
        )


def has_ended(child: subprocess.Popen[bytes]) -> bool:
    """Whether a child has ended. It is not waited for, so that its pid and its group stay its own."""
    try:
        return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def within(timeout_s: float, holds: Callable[[], bool], poll_s: float = 0.1) -> bool:
    """Whether it holds in time; it is asked again and again."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() >= deadline:
            return False
        time.sleep(poll_s)
    return True


def is_alive(process: psutil.Process) -> bool:
    """Whether it has not ended. A zombie has: in a container there may be nobody who reaps it."""
    import psutil

    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:  # it went between the two questions
        return False


def end_left_behind(leader: int) -> None:
    """End the other processes of a group whose leader ends or has ended, and is not waited for yet.

    What has called setsid(2) is in another group: it may serve others, and is left alone.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        left, deadline = _others_in_group(leader), time.monotonic() + LEFT_BEHIND_S
        for process in left:
            with suppress(ProcessLookupError, PermissionError):  # it has ended, or become another user's by sudo
                os.kill(process.pid, number)
        while any(map(is_alive, left)) and time.monotonic() < deadline:
            time.sleep(0.01)


def _others_in_group(leader: int) -> list[psutil.Process]:
    import psutil

    others = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError):
            if process.pid != leader and os.getpgid(process.pid) == leader and is_alive(process):
                others.append(process)
    return others


def path_to_us(env: Mapping[str, str]) -> str:
    """`PYTHONPATH` for a child process that is to run this very code, whether it is installed or not.

    Such a child is started by `python -Pm`: without -P it would import what lies in the working directory first.
    """
    return os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), env.get("PYTHONPATH"))))


def rank_of_launch(env: Mapping[str, str]) -> tuple[int, int]:
    """Which process of how many this is, as `accelerate launch` or `torchrun` say: `(0, 1)` without them."""
    return int(env.get("RANK", "0")), int(env.get("WORLD_SIZE", "1"))


def run_as_rank(main: Callable[[], int]) -> NoReturn:
    """Run a rank's program and leave at once: the threads of gloo and DDP may hang or abort an ordinary exit."""
    code = 1
    try:
        code = main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001  # as the interpreter would do it
        traceback.print_exc()
    finally:
        leave_at_once(code)


def leave_at_once(code: int) -> NoReturn:
    """End the process, also while its other threads run; nothing that is registered for its end is called."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def set_up_log(level: str, rank: int = 0) -> None:
    """Log to stderr, one line a message. Ranks other than 0 log warnings only, since rank 0 logs the rest.

    A stderr that cannot be written ends nothing from now on. Messages may quote what a model wrote, which must not
    steer a terminal: only printable characters are logged.
    """
    survive_lost_output()
    level, prefix = ("WARNING", f"[rank {rank}] ") if rank > 0 else (level, "")
    for each in (logger, loguru.logger):  # the user's, until the setup file decides otherwise
        each.remove()
        each.configure(patcher=_make_printable)
        each.add(sys.stderr, level=level, format=f"{prefix}{LOG_FORMAT}")


def _make_printable(record: Record) -> None:
    """Also the traceback of an exception; without the values of variables, among which may be secrets.

    Further lines of a message are indented: a text that it quotes cannot look like a message of its own.
    """
    text = record["message"].replace("\n", "\n  ")
    if (error := record["exception"]) is not None:
        text += "\n" + "".join(traceback.format_exception(error.type, error.value, error.traceback)).rstrip()
        record["exception"] = None
    record["message"] = printable(text)


def log_prints() -> None:
    """Send what the user's code prints through the log, so that a launcher shows it, with time and name."""
    sys.stdout = _PrintLog()


class _PrintLog(io.TextIOBase):
    """A standard output whose every line is a message of the log."""

    def __init__(self) -> None:
        self._line = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            if line.strip():
                logger.info("{}", line.rstrip())
        return len(text)


def log_to(file: Path, level: str) -> None:
    """Log to `file` too (a launcher has redirected stderr there already, so only what is started by hand needs it)."""
    with naming(file):
        stream = os.fdopen(open_plain(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a", encoding="utf-8")
    output = LossyOutput(stream)
    for each in (logger, loguru.logger):
        each.add(output.write_line, level=level, format=LOG_FORMAT, colorize=False)


def keep_freed_memory(env: Mapping[str, str]) -> None:
    """Have glibc's malloc keep what is freed, unless the environment decides about malloc.

    By default it gives large blocks back to the kernel and asks for them again, cleared page by page: for a model that
    trains on a CPU, whose every activation is such a block, that is a tenth of the time or more.
    """
    if any(name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_PRELOAD") for name in env):
        return
    with suppress(AttributeError):  # a C library without it
        mallopt = ctypes.CDLL(None).mallopt
        for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            mallopt(option, _KEPT_BYTES)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Import modules and build a trainer in this block; saves about a second.

    The garbage collector would scan all imported modules again and again, and nearly all of it stays. What was loaded
    is exempt from later scans.
    """
    gc.disable()
    try:
        yield
        gc.collect()  # a model that was dropped on the way must not stay in memory
        gc.freeze()
    finally:
        gc.enable()


def own_compile_cache(name: str, env: MutableMapping[str, str]) -> None:
    """Give each process its own folder for Unsloth's compiled code; two that share one overwrite each other."""
    own = Path(env.get("UNSLOTH_COMPILE_LOCATION") or "unsloth_compiled_cache") / name
    if find_spec("unsloth") is not None:  # it imports what lies there
        check_own(own.parent.resolve())
        check_own(own)
    env["UNSLOTH_COMPILE_LOCATION"] = str(own)


def make_deterministic() -> None:
    """Fix threads and kernels, so that the same input gives the same bits. Call it before the model is built."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
