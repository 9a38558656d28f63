"""Weights from a trainer to its workers: how fast, beside a raw copy of the same bytes and four other ways.

    python benchmarks/weights.py [--quick] [--device cpu|cuda] [--json FILE]

Every ratio is of two measurements that follow each other, so that a busy machine slows both. "flat" is after
`flatten_parameters`, "scattered" is a model as PyTorch makes it. The models have 400 tensors: 200 matrices and 200
biases.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

# A script's own folder is first on the path, and torch must not take this one's `queue.py` for Python's: it goes last.
sys.path.sort(key=lambda folder: Path(folder).resolve() == Path(__file__).resolve().parent)

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from async_grpo_ipc import WeightExporter, flatten_parameters, open_remote_memory

LAYERS = 200
BIAS = 64
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SMALL_BYTES = {"cpu": 20_000_000, "cuda": 2_000_000_000}  # up to here what surrounds a copy takes too much of it
SIZES = {"10M": 10_000_000, "100M": 100_000_000, "1B": 1_000_000_000}
PULLS = 12  # of a reader in another process
RAW_SAMPLE_BYTES = {"cpu": 1 << 29, "cuda": 1 << 33}  # a raw copy covers at most this much


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    name: str
    value: float
    unit: str
    target: str
    ok: bool | None
    spread: tuple[float, float, float]


def build_model(parameters: int, dtype: torch.dtype, device: str) -> nn.Module:
    """200 layers with a matrix and a bias each."""
    matrix = parameters // LAYERS - BIAS
    model = nn.Module()
    for layer in range(LAYERS):
        for name, numel in (("weight", matrix), ("bias", BIAS)):
            values = torch.full((numel,), float(layer), dtype=dtype, device=device)
            model.register_parameter(f"layer{layer}_{name}", nn.Parameter(values))
    return model


def seconds(work: Callable[[], object], device: str) -> float:
    synchronize(device)
    started = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - started


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def row(name: str, values: list[float], unit: str, target: str = "", ok: Callable[[float], bool] | None = None) -> Row:
    middle = statistics.median(values)
    met = ok(middle) if ok is not None and target else None
    return Row(name=name, value=middle, unit=unit, target=target, ok=met, spread=(min(values), middle, max(values)))


class Sharing:
    """An exporter, a reader and two models, with warm memory."""

    def __init__(self, size: str, dtype: str, device: str, *, flat: bool, folder: Path) -> None:
        self.size, self.dtype, self.flat = size, DTYPES[dtype], flat
        self.label = f"{size} {dtype}, {'flat' if flat else 'scattered'}"
        self.device = device
        self.trainer = build_model(SIZES[size], self.dtype, device)
        self.worker = build_model(SIZES[size], self.dtype, device)
        if flat:
            flatten_parameters(self.trainer)
            flatten_parameters(self.worker)
        self.nbytes = sum(parameter.nbytes for parameter in self.trainer.parameters())
        self.handle = folder / "handle.json"
        self.exporter = WeightExporter.from_model(self.trainer, self.handle)
        self.version = 0
        self.publish()
        self.remote = open_remote_memory(self.handle)

    def publish(self) -> None:
        self.version += 1
        if not self.exporter.publish(self.version):
            raise RuntimeError("a slot is held that should be free")

    def pull(self) -> None:
        self.remote.pull(self.worker)

    def close(self) -> None:
        self.remote.close()
        self.exporter.close()


class RawCopy:
    """`copy_` between warm tensors, in turn over as many buffers as there are slots: caches see the same."""

    def __init__(self, sharing: Sharing) -> None:
        numel = min(SIZES[sharing.size], RAW_SAMPLE_BYTES[sharing.device] // sharing.dtype.itemsize)
        self._device = sharing.device
        buffers = [torch.ones(numel, dtype=sharing.dtype, device=self._device) for _ in range(4)]
        self._trainer, self._worker, *self._slots = buffers
        self._turn = 0

    def publish(self) -> float:
        """Seconds per byte into the next buffer."""
        self._turn += 1
        return seconds(lambda: self._slots[self._turn % 2].copy_(self._trainer), self._device) / self._trainer.nbytes

    def pull(self) -> float:
        """Seconds per byte out of the buffer that was filled last."""
        return seconds(lambda: self._worker.copy_(self._slots[self._turn % 2]), self._device) / self._worker.nbytes


def measure_copies(sharing: Sharing, repeats: int) -> Iterator[Row]:
    """publish and pull as a share of the raw copy's bandwidth, and their own bandwidth."""
    raw = RawCopy(sharing)
    took: dict[str, list[tuple[float, float]]] = {"publish": [], "pull": []}
    for _ in range(repeats + 2):
        for name, ours, theirs in (
            ("publish", sharing.publish, raw.publish),
            ("pull", sharing.pull, raw.pull),
        ):
            took[name].append((seconds(ours, sharing.device) / sharing.nbytes, theirs()))
    target = ">= 0.85" if sharing.flat else ""  # scattered models are shown for comparison
    for name, pairs in took.items():
        warm = pairs[2:]
        if sharing.nbytes <= SMALL_BYTES[sharing.device]:
            yield row(f"{name}, {sharing.label}", [ours * sharing.nbytes * 1e3 for ours, _ in warm], "ms")
            continue
        ratios = [theirs / ours for ours, theirs in warm]
        yield row(f"{name}, {sharing.label}", ratios, "of raw copy", target, lambda v: v >= 0.85)
        yield row(f"{name} bandwidth, {sharing.label}", [1 / ours / 1e9 for ours, _ in warm], "GB/s")


def measure_adoption(sharing: Sharing, repeats: int) -> Iterator[Row]:
    aliased = build_model(SIZES[sharing.size], sharing.dtype, "meta")
    sharing.remote.alias(aliased)
    took = []
    for _ in range(repeats):
        sharing.publish()
        took.append(seconds(sharing.remote.refresh, sharing.device) * 1e3)
    sharing.remote.detach(keep_weights=False)
    yield row(f"adopt a version, aliased, {sharing.label}", took, "ms")


def measure_workers(sharing: Sharing, size: str, dtype: str, count: int) -> Iterator[Row]:
    """Processes that attach, alias and read every page; beside them one that only imports what they import."""
    plain = probe("plain", sharing.handle, size, dtype, sharing.device)
    probes = [probe("alias", sharing.handle, size, dtype, sharing.device) for _ in range(count)]
    attach = [one["attach_ms"] for one in probes]
    yield row(f"attach, in a new process, {size} {dtype}", attach, "ms")
    if SIZES[size] >= SIZES["100M"]:
        added = [100 * (one["private_bytes"] - plain["private_bytes"]) / sharing.nbytes for one in probes]
        target = "<= 3" if sharing.device == "cpu" or size == "1B" else ""  # CUDA's own pages weigh on a small one
        yield row(f"memory of an aliasing worker, {size} {dtype}", added, "% of model", target, lambda v: v <= 3)


def probe(way: str, handle: Path, size: str, dtype: str, device: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--probe", way, str(handle), size, dtype, "--device", device]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    answer: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return answer


def run_probe(way: str, handle: str, size: str, dtype: str, device: str) -> None:
    """In a process of its own: attach, alias a model, touch every page, report.

    On a GPU the model is loaded first, as a worker's is; on a CPU it has no memory yet.
    """
    if device == "cuda":
        import cupy  # noqa: F401  # a worker imports it once, while it loads its model

        _read_a_page(torch.zeros(1024, device="cuda"))  # CUDA loads a kernel when it runs for the first time
    free_before = torch.cuda.mem_get_info()[0] if device == "cuda" else 0
    model = build_model(SIZES[size], DTYPES[dtype], "cuda" if device == "cuda" and way == "alias" else "meta")
    started = time.perf_counter()
    remote = open_remote_memory(handle) if way == "alias" else None
    attach_ms = (time.perf_counter() - started) * 1e3
    if remote is not None:
        remote.alias(model)
        torch.cuda.empty_cache()
        for parameter in model.parameters():
            _read_a_page(parameter.detach())
    private = free_before - torch.cuda.mem_get_info()[0] if device == "cuda" else private_bytes()
    print(json.dumps({"attach_ms": attach_ms, "private_bytes": private}))
    if remote is not None:
        remote.close()


def _read_a_page(tensor: Tensor) -> None:
    tensor.view(torch.uint8)[::1024].max().item()


def pull_when_told(handle: str, size: str, dtype: str, device: str) -> None:
    """Pull the newest version at each line of input, and answer with the seconds that it took."""
    own = build_model(SIZES[size], DTYPES[dtype], device)
    with open_remote_memory(handle) as remote:
        for _ in sys.stdin:
            print(seconds(lambda: remote.pull(own), device), flush=True)


def measure_between(sharing: Sharing, size: str, dtype: str) -> Iterator[Row]:
    """The same two copies, in turn with a raw one, where the reader is a process of its own."""
    raw, took = RawCopy(sharing), []
    command = [sys.executable, __file__, "--probe", "pull", str(sharing.handle), size, dtype, "--device"]
    with subprocess.Popen(
        [*command, sharing.device], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdin is not None and reader.stdout is not None
        for _ in range(PULLS):
            published_s, raw_publish_s = seconds(sharing.publish, sharing.device), raw.publish()
            print("pull", file=reader.stdin, flush=True)
            pulled_s, raw_pull_s = float(reader.stdout.readline()), raw.pull()
            took.append(((published_s, raw_publish_s), (pulled_s, raw_pull_s)))
        reader.stdin.close()
    for name, pairs in zip(("publish", "pull"), zip(*took[2:], strict=True), strict=True):
        label = f"{name}, between processes, {sharing.label}"
        if sharing.nbytes <= SMALL_BYTES[sharing.device]:
            yield row(label, [ours * 1e3 for ours, _ in pairs], "ms")
            continue
        shares = [theirs * sharing.nbytes / ours for ours, theirs in pairs]
        yield row(label, shares, "of raw copy", ">= 0.85", lambda v: v >= 0.85)


def private_bytes() -> int:
    """What this process alone has in memory (its unique set size)."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))


# The same job by other means: a version of the trainer's weights comes into a worker's own model.


def measure_others(size: str, dtype: str, folder: Path, repeats: int) -> Iterator[Row]:
    trainer, worker = (build_model(SIZES[size], DTYPES[dtype], "cpu") for _ in range(2))
    state = {name: parameter.detach() for name, parameter in trainer.named_parameters()}
    own = {name: parameter.detach() for name, parameter in worker.named_parameters()}

    def by_torch_save() -> None:
        torch.save(state, folder / "weights.pt")
        adopt(own, torch.load(folder / "weights.pt", weights_only=True))
        (folder / "weights.pt").unlink()

    def by_safetensors() -> None:
        save_file(state, folder / "weights.safetensors")
        adopt(own, load_file(folder / "weights.safetensors"))
        (folder / "weights.safetensors").unlink()

    with WeightExporter.from_model(trainer, folder / "other.json") as exporter:
        with open_remote_memory(folder / "other.json") as remote:
            versions = iter(range(1, 1000))

            def by_sharing() -> None:
                exporter.publish(next(versions))
                remote.pull(worker)

            ways = {
                "publish + pull": by_sharing,
                "torch.save + load": by_torch_save,
                "safetensors file": by_safetensors,
            }
            for name, way in ways.items():
                way()
                yield row(f"{name}, {size} {dtype}", [seconds(way, "cpu") * 1e3 for _ in range(repeats)], "ms")
    for name, child in (("torch.multiprocessing queue", queue_child), ("gloo broadcast", gloo_child)):
        yield row(f"{name}, {size} {dtype}", with_child(child, state, size, dtype, folder, repeats), "ms")


def adopt(own: dict[str, Tensor], loaded: dict[str, Tensor]) -> None:
    for name, tensor in own.items():
        tensor.copy_(loaded[name])


def with_child(
    child: Callable[..., None], state: dict[str, Tensor], size: str, dtype: str, folder: Path, repeats: int
) -> list[float]:
    """Milliseconds from here into a child's model, the child's word that it has them included."""
    context = mp.get_context("spawn")
    weights, done = context.Queue(), context.Queue()
    meeting = folder / f"meeting-{time.monotonic_ns()}"
    process = context.Process(target=child, args=(weights, done, size, dtype, str(meeting), repeats + 1), daemon=True)
    process.start()
    over_gloo = child is gloo_child
    if over_gloo:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=2)
    done.get(timeout=120)
    took = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        if over_gloo:
            for tensor in state.values():
                dist.broadcast(tensor, src=0)
        else:
            weights.put({name: tensor.clone() for name, tensor in state.items()})
        done.get(timeout=120)
        took.append((time.perf_counter() - started) * 1e3)
    if over_gloo:
        dist.destroy_process_group()
    process.join(timeout=60)
    return took[1:]


def queue_child(weights: Any, done: Any, size: str, dtype: str, meeting: str, rounds: int) -> None:
    own = {
        name: parameter.detach()
        for name, parameter in build_model(SIZES[size], DTYPES[dtype], "cpu").named_parameters()
    }
    done.put("ready")
    for _ in range(rounds):
        adopt(own, weights.get(timeout=120))
        done.put("has it")


def gloo_child(weights: Any, done: Any, size: str, dtype: str, meeting: str, rounds: int) -> None:
    own = [parameter.detach() for parameter in build_model(SIZES[size], DTYPES[dtype], "cpu").parameters()]
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=1, world_size=2)
    done.put("ready")
    for _ in range(rounds):
        for tensor in own:
            dist.broadcast(tensor, src=0)
        done.put("has it")
    dist.destroy_process_group()


def describe_machine(device: str) -> dict[str, Any]:
    models = [line for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if "model name" in line]
    return {
        "cpu": models[0].split(":")[1].strip() if models else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
    }


def measure(sizes: list[str], device: str, folder: Path, *, quick: bool) -> Iterator[Row]:
    for size in sizes:
        repeats = 5 if size == "1B" else 9 if quick else 25
        for dtype in DTYPES:
            for flat in (True, False):
                sharing = Sharing(size, dtype, device, flat=flat, folder=folder)
                yield from measure_copies(sharing, repeats)
                if flat:
                    yield from measure_adoption(sharing, repeats)
                    if device == "cuda":  # two processes that copy by turns on a CPU of few cores measure its caches
                        yield from measure_between(sharing, size, dtype)
                    yield from measure_workers(sharing, size, dtype, count=1 if quick else 2)
                sharing.close()
                del sharing
                gc.collect()
        if device == "cpu":
            yield from measure_others(size, "bf16", folder, repeats=3)


def show(one: Row) -> str:
    verdict = "" if one.ok is None else "ok" if one.ok else "NOT MET"
    low, _, high = one.spread
    shown = f"{one.name:<58} {one.value:>10.3f} {one.unit:<12} {one.target:<8} {verdict:<8}"
    return f"{shown} [{low:.3f} .. {high:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="10 M and 100 M parameters only, few repeats: a minute")
    parser.add_argument("--sizes", default="/".join(SIZES), help="of models, with a / between them")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", type=Path, help="write the rows to this file, too")
    parser.add_argument("--probe", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.probe:
        way, handle, size, dtype = args.probe
        run = pull_when_told if way == "pull" else partial(run_probe, way)
        run(handle, size, dtype, args.device)
        return
    rows = []
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.exists() else None) as folder:
        for one in measure(
            args.sizes.split("/")[: 2 if args.quick else None], args.device, Path(folder), quick=args.quick
        ):
            print(show(one), flush=True)
            rows.append(one)
            if args.json:  # after each row: a machine may be taken away in the middle
                found = {"machine": describe_machine(args.device), "rows": [asdict(r) for r in rows]}
                args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
