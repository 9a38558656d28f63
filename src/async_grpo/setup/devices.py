"""Which devices there are, and how a process is held to one of them. Needs no torch."""

from __future__ import annotations

import functools
import json
import os
import select
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from async_grpo.errors import UsageError
from async_grpo.settings import CPU as CPU

DRIVER_WAIT_S = 60.0  # the first process of a large machine that uses CUDA takes its time


def visible_gpus() -> int:
    """How many GPUs the CUDA driver shows under the current `CUDA_VISIBLE_DEVICES`; 0 without a driver."""
    return len(compute_modes())


def compute_modes() -> list[int]:
    """The compute mode of each visible GPU: 0 default, 2 prohibited, 3 exclusive process."""
    return _compute_modes(os.environ.get("CUDA_VISIBLE_DEVICES"))


@functools.cache  # asked for several times by one command, and a driver takes up to a second to start
def _compute_modes(visible: str | None) -> list[int]:
    """Ask in a process of its own: `cuInit` here would settle for good which GPUs this process sees."""
    try:
        ran = subprocess.run(_ask_driver("count"), capture_output=True, text=True, timeout=DRIVER_WAIT_S, check=True)
        return list(json.loads(ran.stdout)["compute_modes"])
    except (subprocess.SubprocessError, ValueError, KeyError) as error:
        print(f"warning: the CUDA driver could not be asked for its GPUs, so none is used: {error}", file=sys.stderr)
        return []


def _ask_driver(*arguments: str) -> list[str]:
    return [sys.executable, "-I", "-S", str(Path(__file__).with_name("gpu_driver.py")), *arguments]


def why_unreachable(
    server: str, workers: Collection[str], env: Mapping[str, str], *, served: Collection[str] = ()
) -> str | None:
    """Why a GPU that reads weights cannot map memory of the server's, None where all of them can.

    Each GPU is tried by a process that sees what the role on it will see, and nothing else: without peer access the
    driver lets a process map only memory of GPUs that it sees itself. The server's own GPU is tried as well where a
    worker is on it: in some containers a handle can be had, and no other process can open it.

    Args:
        served: the GPUs of a vLLM server that a worker starts, as CUDA_VISIBLE_DEVICES names them.
    """
    readers = {
        f"another process on GPU {device}" if device == server else f"GPU {device}": _held(device, env)
        for device in sorted(set(workers) - {CPU}, key=int)
    }
    readers |= {f"the vLLM server's GPU {name}": {**env, "CUDA_VISIBLE_DEVICES": name} for name in served}
    if server == CPU or not readers:
        return None
    answers = _try_to_open(_held(server, env), readers)
    failed = [f"{reader} cannot map memory of GPU {server} ({answer})" for reader, answer in answers.items() if answer]
    return "; ".join(failed) or None


def _try_to_open(exporting: Mapping[str, str], reading: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Each reader, and why it could not open the exporter's handle (empty: it could); the environments of all.

    All start at once, because the driver takes a second or two to start.
    """
    with ExitStack() as ends:
        exporter = ends.enter_context(_asked("export", exporting))
        readers = {name: ends.enter_context(_asked("open", env)) for name, env in reading.items()}
        offered = _answer_of(exporter)
        if "handle" not in offered:
            return dict.fromkeys(reading, offered["error"])
        for child in readers.values():
            _tell(child, offered["handle"])
        return {name: _answer_of(child).get("error", "") for name, child in readers.items()}


@contextmanager
def _asked(question: str, env: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process that asks the driver, killed at the end."""
    child = subprocess.Popen(
        _ask_driver(question), env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def _tell(child: subprocess.Popen[str], line: str) -> None:
    assert child.stdin is not None
    with suppress(BrokenPipeError):  # it has ended with an answer
        print(line, file=child.stdin, flush=True)


def _answer_of(child: subprocess.Popen[str]) -> dict[str, str]:
    """The line that the child prints, within `DRIVER_WAIT_S`."""
    assert child.stdout is not None
    ready, _, _ = select.select([child.stdout], [], [], DRIVER_WAIT_S)
    line = child.stdout.readline() if ready else ""
    if not line:
        return {"error": "the driver gave no answer" if ready else f"no answer in {DRIVER_WAIT_S:g} s"}
    return dict(json.loads(line))


def _held(device: str, env: Mapping[str, str]) -> dict[str, str]:
    held = dict(env)
    hold_to_device(device, held)
    return held


def parse_device(text: str, gpus: int) -> str:
    """`"cpu"` or the index of a visible GPU, as text.

    Raises:
        UsageError: the text is neither, or there is no such GPU.
    """
    if text == CPU:
        return CPU
    if not text.isdecimal():
        raise UsageError(f"--device must be a GPU index or 'cpu', got {text!r}.")
    if gpus == 0:
        raise UsageError(f"GPU {text} was asked for, but no CUDA GPU is visible here. Use --device cpu.")
    if int(text) >= gpus:
        raise UsageError(f"There is no GPU {text}: {gpus} visible, so the indices are 0 to {gpus - 1}.")
    return str(int(text))


def choose_device(text: str | None, *, default_gpu: int = 0) -> str:
    """The device that `text` names; without one, GPU `default_gpu` where there is a GPU, else the CPU."""
    if text == CPU:
        return CPU
    gpus = visible_gpus()
    if text is not None:
        return parse_device(text, gpus)
    return str(min(default_gpu, gpus - 1)) if gpus else CPU


def check_weights(way: str, server: str) -> None:
    """Refuse `--weights ipc` for a server on the CPU.

    Raises:
        UsageError: says what to do instead.
    """
    if way == "ipc" and server == CPU:
        raise UsageError(
            "--weights ipc shares memory of a GPU, and the server is on the CPU: its weights are in host memory, which "
            "every worker reads. Leave the option out."
        )


def hold_to_device(device: str, env: MutableMapping[str, str]) -> None:
    """Make `device` the only one that a process with this environment sees (call it before torch is imported).

    An index counts within the `CUDA_VISIBLE_DEVICES` that is already set, as CUDA itself counts.
    """
    if device == CPU:
        env["CUDA_VISIBLE_DEVICES"] = ""
        return
    (env["CUDA_VISIBLE_DEVICES"],) = physical_gpus([device], env)


def physical_gpus(indices: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """What `CUDA_VISIBLE_DEVICES` has to name for these GPUs, which count within what it names already.

    Raises:
        UsageError: it names fewer.
    """
    given = [name.strip() for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    beyond = [index for index in indices if given and int(index) >= len(given)]
    if beyond:
        raise UsageError(
            f"GPU {beyond[0]} was asked for, but CUDA_VISIBLE_DEVICES={','.join(given)} leaves {len(given)}, which "
            f"count from 0 to {len(given) - 1}."
        )
    return [given[int(index)] for index in indices] if given else list(indices)


def check_torch_sees(device: str) -> None:
    """Raise `UsageError` when a GPU is meant but torch cannot use one (a CPU build, a driver too old)."""
    if device == CPU:
        return
    import torch

    if not torch.cuda.is_available():
        raise UsageError(
            f"GPU {device} was asked for, but torch {torch.__version__} cannot use it. Install a CUDA build of "
            "torch that fits the driver, or use --device cpu."
        )


def threads_per_process(processes: int) -> int:
    """A fair share of the cores for each of `processes`, at least one thread."""
    return max(1, len(os.sched_getaffinity(0)) // processes)
