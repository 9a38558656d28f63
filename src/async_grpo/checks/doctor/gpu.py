"""GPUs: driver, CUDA and cupy, which must fit each other, and peer access between GPUs."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from async_grpo.checks import probe
from async_grpo.checks.doctor import packages
from async_grpo.checks.doctor.finding import Finding, error, ok, warning
from async_grpo.checks.doctor.gpu_probe import GpuFacts
from async_grpo.formatting import size
from async_grpo.setup.devices import compute_modes, physical_gpus

FACTS_TIMEOUT_S = 120.0  # the first CUDA context on a large machine takes its time
NEARLY_FULL = 0.5
PROHIBITED, EXCLUSIVE = 2, 3  # CU_COMPUTEMODE_*
CUPY = {12: "cupy-cuda12x", 13: "cupy-cuda13x"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """What the kernel and libcuda say, without torch."""

    version: str  # "580.65.06"; empty without the kernel module
    cuda: int  # the newest CUDA that it runs, e.g. 13000; 0 without a driver
    visible: int  # GPUs under CUDA_VISIBLE_DEVICES
    compute_modes: tuple[int, ...] = ()  # of each of them: EXCLUSIVE, PROHIBITED, or any number of processes


def driver(module: Path = Path("/proc/driver/nvidia/version")) -> Driver:
    try:
        found = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", module.read_text())
    except OSError:
        found = None
    modes = tuple(compute_modes())
    version = found[1] if found else ""
    return Driver(version=version, cuda=_cuda_of_driver(), visible=len(modes), compute_modes=modes)


def _cuda_of_driver() -> int:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    number = ctypes.c_int(0)
    return number.value if cuda.cuDriverGetVersion(ctypes.byref(number)) == 0 else 0


def presence(found: Driver, env: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Whether there are GPUs to be seen; torch-free."""
    hidden = env.get("CUDA_VISIBLE_DEVICES")
    if found.visible:
        shown = f", CUDA_VISIBLE_DEVICES={hidden}" if hidden is not None else ""
        yield ok(
            "GPU", f"{found.visible} visible; driver {found.version or '?'} runs CUDA up to {_cuda(found.cuda)}{shown}"
        )
    elif hidden is not None and found.version:
        yield warning("GPU", f"none visible: CUDA_VISIBLE_DEVICES={hidden!r} hides them", "unset CUDA_VISIBLE_DEVICES")
    elif found.version or found.cuda:
        yield error(
            "GPU",
            f"driver {found.version or 'library'} is here, but it shows no GPU",
            "nvidia-smi says why. In Docker: --gpus all. After an update of the driver: restart the machine.",
        )
    else:
        yield ok("GPU", "none, and no NVIDIA driver: everything runs on the CPU")


def modes(found: Driver, env: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """GPUs that do not admit several processes; torch-free. `nvidia-smi` does not count within CUDA_VISIBLE_DEVICES."""
    for index, mode in enumerate(found.compute_modes):
        (name,) = physical_gpus([str(index)], env)
        if mode == EXCLUSIVE:
            yield warning(
                f"GPU {index}",
                "is in exclusive-process mode: one process can use it, so a worker cannot share it with the server",
                f"nvidia-smi -i {name} -c DEFAULT (as root), or give the server and each worker a GPU of its own.",
            )
        elif mode == PROHIBITED:
            yield error(
                f"GPU {index}", "is in prohibited mode: no process can use it", f"nvidia-smi -i {name} -c DEFAULT"
            )


def look() -> GpuFacts:
    """Raises `ChildFailed`."""
    return GpuFacts.from_json(probe.ask("async_grpo.checks.doctor.gpu_probe", {}, timeout_s=FACTS_TIMEOUT_S))


def fit(found: Driver, facts: GpuFacts, version_of: packages.Installed = packages.installed) -> Iterator[Finding]:
    """Driver, torch's CUDA and cupy's."""
    yield _torch(found, facts)
    yield from _cupy(found, facts, version_of)


def _torch(found: Driver, facts: GpuFacts) -> Finding:
    if facts.torch_cuda is None:
        return error(
            "torch",
            f"{facts.torch} is a build without CUDA",
            f"Install a build for CUDA {_cuda(found.cuda)} or older: pytorch.org/get-started has the command.",
        )
    major = int(facts.torch_cuda.split(".")[0])
    if major > found.cuda // 1000:
        return error(
            "torch",
            f"{facts.torch} is built for CUDA {facts.torch_cuda}, the driver runs CUDA up to {_cuda(found.cuda)}",
            f"Update the driver, or install a build of torch for CUDA {found.cuda // 1000}.",
        )
    if not facts.usable:
        return error(
            "torch", f"{facts.torch} cannot use the GPU: {facts.error}", "nvidia-smi says whether the driver works."
        )
    return ok("torch", f"{facts.torch}, CUDA {facts.torch_cuda}; the driver runs up to {_cuda(found.cuda)}")


def _cupy(found: Driver, facts: GpuFacts, version_of: packages.Installed) -> Iterator[Finding]:
    wheels = {major: name for major, name in CUPY.items() if version_of(name)}
    wanted = int((facts.torch_cuda or f"{found.cuda // 1000}").split(".")[0])
    command = f"pip install 'async-grpo[cuda{wanted}]'"
    if len(wheels) > 1:
        yield error(
            "cupy", f"{' and '.join(wheels.values())} overwrite each other", f"pip uninstall both, then {command}"
        )
    elif not facts.cupy:
        yield warning(
            "cupy",
            f"cannot be imported ({facts.cupy_error}): weights go through host memory, which is slower",
            command,
        )
    elif facts.cupy_cuda // 1000 > found.cuda // 1000:
        yield error(
            "cupy",
            f"{facts.cupy} is for CUDA {_cuda(facts.cupy_cuda)}, the driver runs up to {_cuda(found.cuda)}",
            command,
        )
    elif facts.cupy_cuda // 1000 != wanted:
        yield warning(
            "cupy",
            f"{facts.cupy} is for CUDA {_cuda(facts.cupy_cuda)}, torch for {facts.torch_cuda}: two CUDAs in a process",
            f"pip uninstall {' '.join(wheels.values()) or 'cupy'}; {command}",
        )
    else:
        yield ok("cupy", f"{facts.cupy}, CUDA {_cuda(facts.cupy_cuda)}, as torch")


def devices(facts: GpuFacts) -> Iterator[Finding]:
    """Each GPU, and which of them have access to each other's memory."""
    for index, gpu in enumerate(facts.gpus):
        subject, about = f"GPU {index}", f"{gpu.name}, {size(gpu.free)} of {size(gpu.total)} free"
        if not gpu.supported:
            yield error(
                subject,
                f"{about}: torch has no kernels for compute capability {gpu.capability}",
                "Install another build of torch.",
            )
        elif gpu.free < NEARLY_FULL * gpu.total:
            yield warning(
                subject,
                f"{about}: other processes are using it",
                "nvidia-smi lists them; end them, or choose other GPUs.",
            )
        elif gpu.why_no_ipc is not None and facts.cupy:
            yield warning(
                subject,
                f"{about}: {gpu.why_no_ipc}, so weights go through host memory",
                "Use a whole GPU under Linux for the fast way; slower it works as it is.",
            )
        else:
            yield ok(subject, about)
    yield from _peers(facts)


def _peers(facts: GpuFacts) -> Iterator[Finding]:
    count = len(facts.gpus)
    if count < 2:
        return
    apart = [f"{a}-{b}" for a in range(count) for b in range(a) if not (facts.peers[a][b] and facts.peers[b][a])]
    matrix = "  ".join(
        f"{a}:[{' '.join('x' if reaches else '.' for reaches in row)}]" for a, row in enumerate(facts.peers)
    )
    if apart:
        yield warning(
            "peer access",
            f"{matrix}: GPUs {', '.join(apart)} do not reach each other's memory; their weights go through the host",
            "Usual for consumer cards. Put server and workers on GPUs that reach each other (nvidia-smi topo -m).",
        )
    else:
        yield ok("peer access", f"{matrix}: every GPU reads every other's memory")


def _cuda(number: int) -> str:
    """13000 -> 13.0."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else "none"
