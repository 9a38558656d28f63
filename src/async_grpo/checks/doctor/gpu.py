"""GPUs: driver, CUDA and cupy, which must fit each other; and weights from one process to another.

`python -m async_grpo.checks.doctor.gpu` makes the checks that need torch and cupy: a process of its own, because a
driver that does not match can end the process that asks. Weights make a real round trip through `async_grpo_ipc`, every
value compared: the process that publishes asks one that reads.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from async_grpo.checks import probe
from async_grpo.checks.doctor.finding import Asked, Finding, Level, error, ok, warning
from async_grpo.checks.doctor.machine import Installed
from async_grpo.formatting import size
from async_grpo.rundir.folders import nearest_existing
from async_grpo.setup.devices import compute_modes, hold_to_device, physical_gpus, why_unreachable
from async_grpo.setup.fingerprints import installed
from async_grpo.setup.process import end_with_parent

if TYPE_CHECKING:
    from torch import Tensor

TIMEOUT_S = 120.0  # the first CUDA context on a large machine takes its time
NEARLY_FULL = 0.5
PROHIBITED, EXCLUSIVE = 2, 3  # CU_COMPUTEMODE_*
CUPY = {12: "cupy-cuda12x", 13: "cupy-cuda13x"}
NUMBERS = {"cpu": 16 << 20, "cuda": 64 << 20}  # of four bytes: more than caches hold
REPEATS = 5
_MODULE = "async_grpo.checks.doctor.gpu"
_SUBJECT = "weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverReport:
    """Facts from the kernel and libcuda, without torch."""

    version: str  # "580.65.06"; empty without the kernel module
    cuda: int  # the newest CUDA that it runs, e.g. 13000; 0 without a driver
    compute_modes: tuple[int, ...] = ()  # of each visible GPU: EXCLUSIVE, PROHIBITED, or any number of processes

    @property
    def visible(self) -> int:
        """How many GPUs there are under CUDA_VISIBLE_DEVICES."""
        return len(self.compute_modes)


def driver(module: Path = Path("/proc/driver/nvidia/version")) -> DriverReport:
    try:
        found = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", module.read_text())
    except OSError:
        found = None
    version = found[1] if found else ""
    return DriverReport(version=version, cuda=_cuda_of_driver(), compute_modes=tuple(compute_modes()))


def gpus(asked: Asked) -> Iterator[Finding]:
    """Judge whether there are GPUs to be seen, and whether they admit several processes."""
    found = driver()
    yield presence(found)
    yield from modes(found)
    if found.visible:
        yield mps(found)


def torch_and_weights(asked: Asked) -> Iterator[Finding]:
    """Judge what needs torch: the GPUs, and weights between two processes."""
    found: list[Finding] = []
    if driver().visible:
        try:
            said = probe.ask(_MODULE, {}, timeout_s=TIMEOUT_S)
        except probe.ChildFailed as failure:
            yield error("GPU", f"a process that used it failed: {failure}", "nvidia-smi says whether the driver works.")
            return
        found = [Finding(**{**each, "level": Level(each["level"])}) for each in said]
        yield from found
    subjects = {finding.subject for finding in found}
    yield from weight_sharing([f"cuda:{n}" for n in range(2) if f"GPU {n}" in subjects] or ["cpu"])


def _cuda_of_driver() -> int:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    number = ctypes.c_int(0)
    return number.value if cuda.cuDriverGetVersion(ctypes.byref(number)) == 0 else 0


def presence(found: DriverReport, env: Mapping[str, str] = os.environ) -> Finding:
    hidden = env.get("CUDA_VISIBLE_DEVICES")
    if found.visible:
        shown = f", CUDA_VISIBLE_DEVICES={hidden}" if hidden is not None else ""
        runs = f"driver {found.version or '?'} runs CUDA up to {_cuda(found.cuda)}"
        return ok("GPU", f"{found.visible} visible; {runs}{shown}")
    if hidden is not None and found.version:
        return warning("GPU", f"none visible: CUDA_VISIBLE_DEVICES={hidden!r} hides them", "unset CUDA_VISIBLE_DEVICES")
    if found.version or found.cuda:
        fix = "nvidia-smi says why. In Docker: --gpus all. After an update of the driver: restart the machine."
        return error("GPU", f"driver {found.version or 'library'} is here, but it shows no GPU", fix)
    return ok("GPU", "none, and no NVIDIA driver: everything runs on the CPU")


def modes(found: DriverReport, env: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Name GPUs that do not admit several processes. `nvidia-smi` does not count within CUDA_VISIBLE_DEVICES."""
    for index, mode in enumerate(found.compute_modes):
        command = f"nvidia-smi -i {physical_gpus([str(index)], env)[0]} -c DEFAULT"
        if mode == EXCLUSIVE:
            yield warning(
                f"GPU {index}",
                "is in exclusive-process mode: without MPS one process can use it, not a server and its workers",
                f"{command} (as root), or give the server and each worker a GPU of its own.",
            )
        elif mode == PROHIBITED:
            yield error(f"GPU {index}", "is in prohibited mode: no process can use it", command)


def mps(found: DriverReport, env: Mapping[str, str] = os.environ, root: Path = Path("/")) -> Finding:
    """Say whether NVIDIA's MPS can let processes compute on a GPU at the same time. No option of a run starts it."""
    defaults = {"CUDA_MPS_PIPE_DIRECTORY": "tmp/nvidia-mps", "CUDA_MPS_LOG_DIRECTORY": "var/log/nvidia-mps"}
    pipe, log = (Path(env.get(name, root / default)) for name, default in defaults.items())
    closed = " and ".join(str(it) for it in (pipe, log) if not os.access(nearest_existing(it), os.W_OK))
    if mps_processes():
        said = "a daemon runs already, and lets processes that find it compute at the same time"
    elif (pipe / "control").exists():
        said = f"{pipe} is a daemon's, which runs in another container or has died"
    elif shutil.which("nvidia-cuda-mps-control") is None:
        said = "not possible: nvidia-cuda-mps-control is not installed"
    elif PROHIBITED in found.compute_modes:
        said = "not possible on a GPU in prohibited mode"
    else:
        rights = f"; without the right to write to {closed}, set {' and '.join(defaults)}" if closed else ""
        contained = (root / ".dockerenv").exists() or (root / "run/.containerenv").exists()
        said = f"possible{' for processes of this container' if contained else ''}, no daemon runs{rights}"
    return ok("MPS", said)


def mps_processes() -> list[psutil.Process]:
    """Find the daemons of NVIDIA's MPS and their servers; one that died, and that nobody waited for, is none."""
    alive = (it for it in psutil.process_iter(["name", "status"]) if it.info["status"] != psutil.STATUS_ZOMBIE)
    return [it for it in alive if (it.info["name"] or "").startswith("nvidia-cuda-mps")]


def weight_sharing(devices: Sequence[str]) -> Iterator[Finding]:
    """One process publishes on the first device (e.g. `"cuda:0"` or `"cpu"`), one for each device reads."""
    writer = devices[0]
    for reader in devices:
        indices = [device.partition(":")[2] for device in (writer, reader)]
        apart = why_unreachable(indices[0], indices[1:], os.environ) if reader.startswith("cuda") else None
        try:
            yield _judge(_measure(writer, reader, "host" if apart else "auto"), writer, reader, apart)
        except probe.ChildFailed as failure:
            yield error(
                _SUBJECT,
                f"from {writer} to {reader}, between two processes: {failure}",
                "Without this no worker gets weights. Containers: one container for all processes, or --ipc=host "
                "--pid=host. GPUs: see the lines on driver and cupy; WSL has no CUDA IPC.",
            )


def _measure(writer: str, reader: str, way: str) -> dict[str, Any]:
    """Ask two processes, each of which sees its own GPU alone, as a server and a worker do."""
    seen = ["cuda:0" if device.startswith("cuda") else device for device in (writer, reader)]
    question = {"way": way, "writer": seen[0], "reader": seen[1], "reader_sees": _sees(reader)}
    return probe.ask(_MODULE, question, timeout_s=TIMEOUT_S, env={**os.environ, **_sees(writer)})


def _sees(device: str) -> dict[str, str]:
    kind, _, index = device.partition(":")
    held = dict(os.environ)
    if kind == "cuda":
        hold_to_device(index, held)
    return {name: held[name] for name in ("CUDA_VISIBLE_DEVICES",) if name in held}


def _judge(facts: dict[str, Any], writer: str, reader: str, apart: str | None) -> Finding:
    way = f"{writer} to {reader}" if writer != reader else writer
    if not facts["equal"]:
        return error(_SUBJECT, f"{way}: values arrived that were not published", "Please report this.")
    kind = {"cuda": "CUDA IPC", "posix": "shared host memory"}[facts["memory"]]
    found = f"{way}, between two processes, by {kind}: every value arrived; read at {facts['read_gbps']:.1f} GB/s"
    if apart:
        fix = (
            "Usual for consumer cards. Put server and workers on GPUs that reach each other (nvidia-smi topo -m)."
            if reader != writer
            else "Usual in containers that share neither the pid nor the ipc namespace, and in sandboxes."
        )
        return warning(_SUBJECT, f"{found}, as a run does it here: {apart}", fix)
    if writer.startswith("cuda") and facts["memory"] != "cuda":
        fix = "Install cupy (see its line); WSL has no CUDA IPC."
        return warning(_SUBJECT, f"{found}. GPU memory cannot be shared here, so weights go through host memory", fix)
    return ok(_SUBJECT, found)


# --- in the processes that are asked


def answer(question: dict[str, Any]) -> Any:
    if not question:
        return [asdict(finding) for finding in judged(driver().cuda)]
    return _export(**question) if "writer" in question else _read(**question)


def judged(cuda: int) -> Iterator[Finding]:
    """Judge torch's CUDA, cupy's, and each GPU; `cuda` is the newest that the driver runs, e.g. 13000."""
    import torch

    of_torch = torch_fits(cuda, torch)
    yield of_torch
    yield cupy_fits(cuda, torch.version.cuda)
    for index in range(torch.cuda.device_count() if of_torch.level is Level.OK else 0):
        yield device(index)


def torch_fits(cuda: int, torch: Any) -> Finding:
    runs, built_for = f"the driver runs CUDA up to {_cuda(cuda)}", torch.version.cuda
    if built_for is None:
        fix = f"Install a build for CUDA {_cuda(cuda)} or older: pytorch.org/get-started has the command."
        return error("torch", f"{torch.__version__} is a build without CUDA", fix)
    if int(built_for.split(".")[0]) > cuda // 1000:
        fix = f"Update the driver, or install a build of torch for CUDA {cuda // 1000}."
        return error("torch", f"{torch.__version__} is built for CUDA {built_for}, {runs}", fix)
    try:
        torch.cuda.init()
    except RuntimeError as failure:
        why = str(failure).splitlines()[0]
        fix = "nvidia-smi says whether the driver works."
        return error("torch", f"{torch.__version__} cannot use the GPU: {why}", fix)
    return ok("torch", f"{torch.__version__}, CUDA {built_for}; {runs}")


def cupy_fits(cuda: int, of_torch: str | None, version_of: Installed = installed) -> Finding:
    wheels = [name for name in CUPY.values() if version_of(name)]
    wanted = int((of_torch or f"{cuda // 1000}").split(".")[0])
    command = f"pip install 'async-grpo[cuda{wanted}]'"
    if len(wheels) > 1:
        return error("cupy", f"{' and '.join(wheels)} overwrite each other", f"pip uninstall both, then {command}")
    try:
        import cupy

        own = int(cupy.cuda.runtime.runtimeGetVersion())
    except Exception as failure:  # noqa: BLE001  # cupy raises its own errors for a driver that does not fit
        why = f"cannot be imported ({type(failure).__name__}: {failure})".splitlines()[0]
        return warning("cupy", f"{why}: weights go through host memory, which is slower", command)
    about = f"{cupy.__version__} is for CUDA {_cuda(own)}"
    if own // 1000 > cuda // 1000:
        return error("cupy", f"{about}, the driver runs up to {_cuda(cuda)}", command)
    if own // 1000 != wanted:
        fix = f"pip uninstall {' '.join(wheels) or 'cupy'}; {command}"
        return warning("cupy", f"{about}, torch for {of_torch}: two CUDAs in a process", fix)
    return ok("cupy", f"{cupy.__version__}, CUDA {_cuda(own)}, as torch")


def device(index: int) -> Finding:
    import torch

    from async_grpo_ipc.memory.cuda_runtime import why_not

    gpu, (free, total) = torch.cuda.get_device_properties(index), torch.cuda.mem_get_info(index)
    subject, about = f"GPU {index}", f"{gpu.name}, {size(free)} of {size(total)} free"
    if not _runs(index):
        found = f"{about}: torch has no kernels for compute capability {gpu.major}.{gpu.minor}"
        return error(subject, found, "Install another build of torch.")
    if free < NEARLY_FULL * total:
        fix = "nvidia-smi lists them; end them, or choose other GPUs."
        return warning(subject, f"{about}: other processes are using it", fix)
    if find_spec("cupy") and (why := why_not(torch.device("cuda", index))):
        fix = "Use a whole GPU under Linux for the fast way; slower it works as it is."
        return warning(subject, f"{about}: {why}, so weights go through host memory", fix)
    return ok(subject, about)


def _runs(index: int) -> bool:
    """Whether a kernel of torch's runs there: a list of architectures would leave out what is compiled later."""
    import torch

    try:
        return int((torch.ones(2, dtype=torch.float32, device=f"cuda:{index}") * 2).sum().item()) == 4
    except RuntimeError:
        return False


def _cuda(number: int) -> str:
    """13000 -> 13.0."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else "none"


def _export(writer: str, reader: str, reader_sees: dict[str, str], way: Any) -> dict[str, Any]:
    """Publish on `writer`, and ask a process with the environment variables `reader_sees` that reads on `reader`."""
    from async_grpo_ipc import WeightExporter

    with tempfile.TemporaryDirectory(prefix="async-grpo-doctor-") as folder:
        handle = Path(folder) / "handle.json"
        with WeightExporter.from_tensors({"weights": _pattern(writer)}, handle, way=way) as exporter:
            exporter.publish(1)
            question = {"handle": str(handle), "reader": reader, "exporter": os.getpid()}
            measured = probe.ask(_MODULE, question, timeout_s=TIMEOUT_S / 2, env={**os.environ, **reader_sees})
            return {**measured, "memory": json.loads(handle.read_text())["memory"]["kind"]}


def _read(handle: str, reader: str, exporter: int) -> dict[str, Any]:
    """Map what is published at `handle` and copy it to `reader`. Ends with the exporter."""
    end_with_parent(exporter)
    import torch

    from async_grpo_ipc import open_remote_memory

    expected = _pattern(reader)
    own = torch.zeros_like(expected)
    seconds = []
    with open_remote_memory(handle, device=reader) as remote, remote.lease() as view:
        for _ in range(1 + REPEATS):
            started = time.perf_counter()
            own.copy_(view["weights"])
            if own.is_cuda:
                torch.cuda.synchronize(own.device)
            seconds.append(time.perf_counter() - started)
        equal = bool(torch.equal(own, expected))
    return {"equal": equal, "read_gbps": own.nbytes / statistics.median(seconds[1:]) / 1e9}  # the first warms up


def _pattern(device: str) -> Tensor:
    """A different value in each element, so that none can arrive in another one unnoticed."""
    import torch

    return torch.arange(NUMBERS[torch.device(device).type], dtype=torch.int32, device=device)


if __name__ == "__main__":
    probe.answer(answer)
