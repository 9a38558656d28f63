"""A trainer's two ranks on two machines against two on one: a step, a published version, and what a gather takes.

    sudo .venv/bin/python benchmarks/machines.py [--rounds 40] [--json FILE]      5 minutes on a quiet machine

A machine is a network namespace, and a link with a delay of some .1 ms each way leads to the other one. Each rank has a
core of its own, computes steps of a small random model, and says what the ranks of a run say to each other. All ranks
live at the same time, and those of one machine and of two take turns, step by step, so that what else the machine does
meets both; where the medians of three thirds of the steps on one machine differ by more than a tenth, the ratio is not
measurable.
The delay is that of two relays between TUN devices, one for each direction, of real-time priority. They need no module
of the kernel, and their CPU time counts against the two machines.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # a forked process has no threads of its parent
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from benchmarks.table import Row, as_text, row, write_json
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen3Config, Qwen3ForCausalLM

from async_grpo.setup.process import end_with_parent
from async_grpo.training.distributed import Message, Ranks
from async_grpo.training.sharding import BUCKET_BYTES, Fsdp2
from async_grpo_ipc import Blueprint, WeightExporter

LIBC = ctypes.CDLL(None, use_errno=True)
RESULTS = Path(__file__).with_name("results") / "machines.json"
DELAY_S = 0.00005  # in the relay, whose waking up takes as long
LOCAL, FAR = "127.0.0.1", "10.43.0.1"  # where rank 0 is
PACKET = 65_000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
CLONE_NEWNET, M_MMAP_THRESHOLD = 0x40000000, -3
DDP, FSDP2, EMBEDDING = "DDP", "FSDP2", "a large embedding, FSDP2"
ROWS, TOKENS = 8, 256  # of a rank's micro-batch
GROUP = os.urandom(200_000)  # of 16 completions of 512 tokens
PINGS = 20
ANSWER_S = 600.0
FORK = get_context("fork")  # torch is imported once
CPU = torch.device("cpu")
Answer = list[float]


# --- two machines


def enter(namespace: str) -> None:
    """Put this thread into a network namespace."""
    with Path(f"/run/netns/{namespace}").open() as file:
        if LIBC.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")


@contextmanager
def two_machines() -> Iterator[tuple[str, str]]:
    """Names of two namespaces, with relays between them."""
    names = (f"bench0-{os.getpid()}", f"bench1-{os.getpid()}")
    started: list[Any] = []
    try:
        with ThreadPoolExecutor(1) as elsewhere:  # a thread that ends: this one stays where it is
            ends = [elsewhere.submit(end_of_link, name, number).result() for number, name in enumerate(names, start=1)]
        for way in (ends, ends[::-1]):
            started.append(FORK.Process(target=forward, args=way, daemon=True))
            started[-1].start()
        yield names
    finally:
        for relay in started:
            relay.kill()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def end_of_link(name: str, number: int) -> int:
    """A new namespace, and the descriptor of what goes over its eth0."""
    subprocess.run(["ip", "netns", "add", name], check=True)
    enter(name)
    tun = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH", b"eth0", IFF_TUN | IFF_NO_PI))
    for command in (f"addr add 10.43.0.{number}/24 dev eth0", f"link set eth0 mtu {PACKET} up", "link set lo up"):
        subprocess.run(["ip", *command.split()], check=True)
    return tun


def forward(source: int, target: int) -> None:
    """The link in one direction: each packet arrives on the other side after the delay."""
    end_with_parent(os.getppid())
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))
    waiting = deque[tuple[float, bytes]]()
    while True:
        left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        if select.select([source], [], [], left)[0]:
            waiting.append((time.monotonic() + DELAY_S, os.read(source, PACKET + 1)))
        while waiting and waiting[0][0] <= time.monotonic():
            os.write(target, waiting.popleft()[1])


# --- ranks


class Pair:
    """Two ranks of one kind, on one machine or two, which do together what they are asked."""

    def __init__(self, kind: str, address: str, port: int, namespaces: Sequence[str | None]) -> None:
        self._pipes = []
        for rank, namespace in enumerate(namespaces):
            ours, theirs = FORK.Pipe()
            about = (kind, rank, f"tcp://{address}:{port}", namespace, theirs)
            FORK.Process(target=work, args=about, daemon=True).start()
            self._pipes.append(ours)
        self.ask("ready")

    def ask(self, what: str) -> Answer:
        """What rank 0 has measured."""
        for pipe in self._pipes:
            pipe.send(what)
        for pipe in self._pipes:
            if not pipe.poll(ANSWER_S):
                raise TimeoutError(f"a rank has not answered to {what!r} within {ANSWER_S:g} s")
        first, _ = [pipe.recv() for pipe in self._pipes]
        return list(first)


def work(kind: str, rank: int, address: str, namespace: str | None, pipe: Any) -> None:
    """A rank: answers until the parent ends."""
    end_with_parent(os.getppid())
    if namespace is not None:
        enter(namespace)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0" if namespace else "lo"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    actions = actions_of(kind, rank)
    while True:
        pipe.send(actions[pipe.recv()]())


def actions_of(kind: str, rank: int) -> dict[str, Callable[[], Answer]]:
    torch.manual_seed(0)
    model: Any = Embedding() if kind == EMBEDDING else small_model()
    whole: nn.Module = model
    publish: Callable[[], object] = list
    if kind == DDP:
        whole = DistributedDataParallel(model)
    else:
        blueprint, mesh = Fsdp2().blueprint(model), init_device_mesh("cpu", (2,))
        for layer in model.model.layers if kind == FSDP2 else ():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        publish = publisher(model, blueprint, rank)

    def memory() -> Answer:
        LIBC.mallopt(M_MMAP_THRESHOLD, 1 << 20)  # what is freed goes back at once, and is not there before
        before = memory_of_this("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # sets the peak to what is there now
        publish()
        return [memory_of_this("VmHWM") - before]

    step = partial(train, whole, torch.optim.AdamW(model.parameters(), lr=1e-6), Ranks())
    timed_ones = {"step": partial(timed, step), "publish": partial(timed, publish)}
    return {"ready": list, "memory": memory, "ping": partial(ping, rank), **timed_ones}


def publisher(model: nn.Module, blueprint: Blueprint, rank: int) -> Callable[[], object]:
    """Publishes the next version, as rank 0 or another."""

    def gather(into: Any) -> None:
        Fsdp2().gather(model, into.keys(), CPU, into)

    if rank > 0:
        return lambda: Fsdp2().gather(model, blueprint.changing.keys(), CPU)
    handle = Path(tempfile.mkdtemp(prefix="async-grpo-bench-")) / "weights.json"
    exporter, versions = WeightExporter.from_blueprint(blueprint, gather, handle, device=CPU), count(1)
    return lambda: exporter.publish(next(versions))


def small_model() -> Any:
    shape = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
    return Qwen3ForCausalLM(Qwen3Config(**shape, **heads, pad_token_id=0, eos_token_id=1))


class Embedding(nn.Module):
    """Half of it is one parameter, whose rows do not divide by two."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50_001, 512)
        self.others = nn.ModuleList(nn.Linear(1024, 2048, bias=False) for _ in range(12))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
    """A step as of a run: rank 0 hands out a group, both compute, rank 0 says that all continue."""
    order(ranks, Message.GROUPS)
    if ranks.rank == 0:
        ranks.give(1, GROUP)
    else:
        ranks.take()
    tokens = torch.randint(512, (ROWS, TOKENS), dtype=torch.int64, device="cpu")
    logprobs = model(input_ids=tokens, use_cache=False).logits[:, :-1].log_softmax(-1)
    (-logprobs.gather(2, tokens[:, 1:, None]).mean()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    order(ranks, Message.GO)


def order(ranks: Ranks, message: Message) -> None:
    """Rank 0 sends it, the other waits for it."""
    if ranks.rank == 0:
        ranks.send(message)
    else:
        ranks.receive()


def ping(rank: int) -> Answer:
    """Seconds of a number there and back, the median of some."""
    number, taken = torch.zeros(1, dtype=torch.float32, device="cpu"), []
    for _ in range(PINGS):
        began = time.perf_counter()
        for sender in (0, 1):
            (dist.send if rank == sender else dist.recv)(number, 1 - rank)
        taken.append(time.perf_counter() - began)
    return [statistics.median(taken)]


def timed(action: Callable[[], object]) -> Answer:
    """Seconds until both ranks have done it."""
    dist.barrier()
    began = time.perf_counter()
    action()
    dist.barrier()
    return [time.perf_counter() - began]


def memory_of_this(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{what}:")).split()[1])


# --- figures


def figures(rounds: int) -> Iterator[Row]:
    with two_machines() as names:
        port = count(29_700)
        near = {kind: Pair(kind, LOCAL, next(port), (None, None)) for kind in (DDP, FSDP2)}
        far = {kind: Pair(kind, FAR, next(port), names) for kind in (DDP, FSDP2)}
        for where, pairs in (("one machine", near), ("two machines", far)):
            taken = [1000 * pairs[DDP].ask("ping")[0] for _ in range(rounds)]
            yield row(f"a number there and back, {where}", taken, "ms")
        for kind in (DDP, FSDP2):
            yield from compared(f"{kind}: a step", "step", near[kind], far[kind], rounds, ">= 0.9")
        yield from compared("FSDP2: a publication", "publish", near[FSDP2], far[FSDP2], rounds, "")
        large = Pair(EMBEDDING, LOCAL, next(port), (None, None))
        for _ in range(3):  # then all slots are in memory
            large.ask("publish")
        taken = [large.ask("memory")[0] / BUCKET_BYTES for _ in range(rounds)]
        name = "memory of rank 0 beyond the published copy, 203 MB of which 102 MB are one parameter"
        yield row(f"FSDP2: {name}", taken, "buckets of 64 MiB", target="<= 1.1")


def compared(name: str, what: str, near: Pair, far: Pair, rounds: int, target: str) -> Iterator[Row]:
    """Both take turns. The ratio is over 1 where two machines are faster."""
    for pair in (near, far):
        pair.ask(what)  # first kernels, first connections
    seconds: dict[Pair, list[float]] = {near: [], far: []}
    for number in range(rounds):
        for pair in (near, far) if number % 2 else (far, near):
            seconds[pair] += pair.ask(what)
    yield row(f"{name}, two ranks of one machine", [1000 * value for value in seconds[near]], "ms")
    yield row(f"{name}, two machines", [1000 * value for value in seconds[far]], "ms")
    ratios = [one / two for one, two in zip(seconds[near], seconds[far], strict=True)]
    steady = [statistics.median(seconds[near][first::3]) for first in range(3)]  # a median as well, of the same work
    yield row(f"{name}, speed of two machines over one", ratios, "x", target=target, controls=steady)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args()
    load = os.getloadavg()
    rows = []
    for one in figures(args.rounds):
        rows.append(one)
        print(as_text([one]), flush=True)
    write_json(args.json, rows, load_before=load)


if __name__ == "__main__":
    main()
