"""GPUs: driver, CUDA and cupy, which must fit each other.

`python -m async_grpo.checks.doctor.gpu` answers what torch and cupy say of them: a process of its own, because a driver
that does not match can end the process that asks.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from async_grpo.checks import probe
from async_grpo.checks.doctor import packages
from async_grpo.checks.doctor.finding import Finding, error, ok, warning
from async_grpo.formatting import size
from async_grpo.rundir.shape import shaped
from async_grpo.setup.devices import compute_modes, physical_gpus

FACTS_TIMEOUT_S = 120.0  # the first CUDA context on a large machine takes its time
NEARLY_FULL = 0.5
PROHIBITED, EXCLUSIVE = 2, 3  # CU_COMPUTEMODE_*
CUPY = {12: "cupy-cuda12x", 13: "cupy-cuda13x"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverReport:
    """Facts from the kernel and libcuda, without torch."""

    version: str  # "580.65.06"; empty without the kernel module
    cuda: int  # the newest CUDA that it runs, e.g. 13000; 0 without a driver
    visible: int  # GPUs under CUDA_VISIBLE_DEVICES
    compute_modes: tuple[int, ...] = ()  # of each of them: EXCLUSIVE, PROHIBITED, or any number of processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    name: str
    total: int  # bytes
    free: int
    capability: str  # "9.0"
    supported: bool  # torch has kernels for it
    why_no_ipc: str | None  # None: its memory can be shared by CUDA IPC


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """Facts from torch and cupy, which another process gathers."""

    torch: str
    torch_cuda: str | None  # "12.8"; None: a build without CUDA
    usable: bool
    error: str = ""  # why not
    cupy: str = ""  # version; empty: it cannot be imported
    cupy_cuda: int = 0  # of cupy's runtime, e.g. 12080
    cupy_error: str = ""
    gpus: list[Gpu] = field(default_factory=list)


def driver(module: Path = Path("/proc/driver/nvidia/version")) -> DriverReport:
    try:
        found = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", module.read_text())
    except OSError:
        found = None
    modes = tuple(compute_modes())
    version = found[1] if found else ""
    return DriverReport(version=version, cuda=_cuda_of_driver(), visible=len(modes), compute_modes=modes)


def _cuda_of_driver() -> int:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    number = ctypes.c_int(0)
    return number.value if cuda.cuDriverGetVersion(ctypes.byref(number)) == 0 else 0


def presence(found: DriverReport, env: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Judge whether there are GPUs to be seen; torch-free."""
    hidden = env.get("CUDA_VISIBLE_DEVICES")
    if found.visible:
        shown = f", CUDA_VISIBLE_DEVICES={hidden}" if hidden is not None else ""
        runs = f"driver {found.version or '?'} runs CUDA up to {_cuda(found.cuda)}"
        yield ok("GPU", f"{found.visible} visible; {runs}{shown}")
    elif hidden is not None and found.version:
        yield warning("GPU", f"none visible: CUDA_VISIBLE_DEVICES={hidden!r} hides them", "unset CUDA_VISIBLE_DEVICES")
    elif found.version or found.cuda:
        fix = "nvidia-smi says why. In Docker: --gpus all. After an update of the driver: restart the machine."
        yield error("GPU", f"driver {found.version or 'library'} is here, but it shows no GPU", fix)
    else:
        yield ok("GPU", "none, and no NVIDIA driver: everything runs on the CPU")


def modes(found: DriverReport, env: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Name GPUs that do not admit several processes. `nvidia-smi` does not count within CUDA_VISIBLE_DEVICES."""
    for index, mode in enumerate(found.compute_modes):
        (name,) = physical_gpus([str(index)], env)
        command = f"nvidia-smi -i {name} -c DEFAULT"
        if mode == EXCLUSIVE:
            yield warning(
                f"GPU {index}",
                "is in exclusive-process mode: one process can use it, so a worker cannot share it with the server",
                f"{command} (as root), or give the server and each worker a GPU of its own.",
            )
        elif mode == PROHIBITED:
            yield error(f"GPU {index}", "is in prohibited mode: no process can use it", command)


def look() -> GpuFacts:
    """Ask another process. Raises `ChildFailed`."""
    return shaped(GpuFacts, probe.ask("async_grpo.checks.doctor.gpu", {}, timeout_s=FACTS_TIMEOUT_S))


def fit(found: DriverReport, facts: GpuFacts, version_of: packages.Installed = packages.installed) -> Iterator[Finding]:
    """Judge the driver, torch's CUDA and cupy's."""
    yield _torch(found, facts)
    yield _cupy(found, facts, version_of)


def _torch(found: DriverReport, facts: GpuFacts) -> Finding:
    runs = f"the driver runs CUDA up to {_cuda(found.cuda)}"
    if facts.torch_cuda is None:
        fix = f"Install a build for CUDA {_cuda(found.cuda)} or older: pytorch.org/get-started has the command."
        return error("torch", f"{facts.torch} is a build without CUDA", fix)
    if int(facts.torch_cuda.split(".")[0]) > found.cuda // 1000:
        fix = f"Update the driver, or install a build of torch for CUDA {found.cuda // 1000}."
        return error("torch", f"{facts.torch} is built for CUDA {facts.torch_cuda}, {runs}", fix)
    if not facts.usable:
        fix = "nvidia-smi says whether the driver works."
        return error("torch", f"{facts.torch} cannot use the GPU: {facts.error}", fix)
    return ok("torch", f"{facts.torch}, CUDA {facts.torch_cuda}; {runs}")


def _cupy(found: DriverReport, facts: GpuFacts, version_of: packages.Installed) -> Finding:
    wheels = [name for name in CUPY.values() if version_of(name)]
    wanted = int((facts.torch_cuda or f"{found.cuda // 1000}").split(".")[0])
    command = f"pip install 'async-grpo[cuda{wanted}]'"
    about = f"{facts.cupy} is for CUDA {_cuda(facts.cupy_cuda)}"
    if len(wheels) > 1:
        return error("cupy", f"{' and '.join(wheels)} overwrite each other", f"pip uninstall both, then {command}")
    if not facts.cupy:
        why = f"cannot be imported ({facts.cupy_error})"
        return warning("cupy", f"{why}: weights go through host memory, which is slower", command)
    if facts.cupy_cuda // 1000 > found.cuda // 1000:
        return error("cupy", f"{about}, the driver runs up to {_cuda(found.cuda)}", command)
    if facts.cupy_cuda // 1000 != wanted:
        fix = f"pip uninstall {' '.join(wheels) or 'cupy'}; {command}"
        return warning("cupy", f"{about}, torch for {facts.torch_cuda}: two CUDAs in a process", fix)
    return ok("cupy", f"{facts.cupy}, CUDA {_cuda(facts.cupy_cuda)}, as torch")


def devices(facts: GpuFacts) -> Iterator[Finding]:
    """Judge each GPU."""
    for index, gpu in enumerate(facts.gpus):
        subject, about = f"GPU {index}", f"{gpu.name}, {size(gpu.free)} of {size(gpu.total)} free"
        if not gpu.supported:
            found = f"{about}: torch has no kernels for compute capability {gpu.capability}"
            yield error(subject, found, "Install another build of torch.")
        elif gpu.free < NEARLY_FULL * gpu.total:
            fix = "nvidia-smi lists them; end them, or choose other GPUs."
            yield warning(subject, f"{about}: other processes are using it", fix)
        elif gpu.why_no_ipc is not None and facts.cupy:
            fix = "Use a whole GPU under Linux for the fast way; slower it works as it is."
            yield warning(subject, f"{about}: {gpu.why_no_ipc}, so weights go through host memory", fix)
        else:
            yield ok(subject, about)


def _cuda(number: int) -> str:
    """13000 -> 13.0."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else "none"


# --- in the process that is asked


def gather() -> GpuFacts:
    import torch

    error = ""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch does not annotate it
    except (RuntimeError, AssertionError) as failure:  # AssertionError: a build without CUDA
        error = str(failure).splitlines()[0]
    usable = torch.cuda.is_available() and not error
    return GpuFacts(
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        usable=usable,
        error=error,
        gpus=[_gpu(index) for index in range(torch.cuda.device_count() if usable else 0)],
        **_cupy_here(),
    )


def _gpu(index: int) -> Gpu:
    import torch

    from async_grpo_ipc.memory.cuda_runtime import why_not

    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return Gpu(
        name=properties.name,
        total=total,
        free=free,
        capability=f"{properties.major}.{properties.minor}",
        supported=_runs(index),
        why_no_ipc=why_not(torch.device("cuda", index)),
    )


def _runs(index: int) -> bool:
    """Whether a kernel of torch's runs there: a list of architectures would leave out what is compiled later."""
    import torch

    try:
        return int((torch.ones(2, dtype=torch.float32, device=f"cuda:{index}") * 2).sum().item()) == 4
    except RuntimeError:
        return False


def _cupy_here() -> dict[str, Any]:
    try:
        import cupy

        return {"cupy": cupy.__version__, "cupy_cuda": int(cupy.cuda.runtime.runtimeGetVersion())}
    except Exception as failure:  # noqa: BLE001  # cupy raises its own errors for a driver that does not fit
        return {"cupy_error": f"{type(failure).__name__}: {failure}".splitlines()[0]}


if __name__ == "__main__":
    probe.answer(lambda question: asdict(gather()))
