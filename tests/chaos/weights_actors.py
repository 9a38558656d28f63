"""Processes for the chaos tests of shared weights: a nursery that forks writers and readers quickly, and
kills them.

Importing torch costs seconds, so that 500 kills in a minute need children that are forked by a process that
has imported it already. The nursery alone kills and reaps its children, so that a pid it kills is always one
it started.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # the kit, for the actors
from kit.waiting import until

TENSORS = 12
ELEMENTS = 4099
DEADLINE_S = 60.0


# The test's side


class Nursery:
    """Starts and ends actors by name. Used as a context manager; whatever still runs at the end is killed.

    Args:
        environment: of the actors: `Knobs.environment()` of fake_cuda.py.
    """

    def __init__(self, **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        )
        self._ask("ping")

    def spawn(self, role: str, **arguments: Any) -> int:
        return self._ask("spawn", role=role, arguments=arguments)

    def kill(self, pid: int) -> int:
        """SIGKILL and reap. Returns the wait status: 9 unless it had ended by itself."""
        return self._ask("kill", pid=pid)

    def wait(self, pid: int) -> int:
        """Reap a child that ends by itself."""
        return self._ask("wait", pid=pid)

    def signal(self, pid: int, number: int) -> None:
        self._ask("signal", pid=pid, number=number)

    def __enter__(self) -> "Nursery":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=DEADLINE_S)

    def _ask(self, verb: str, **arguments: Any) -> Any:
        self._process.stdin.write(json.dumps({"verb": verb, **arguments}) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def read_log(path: Path) -> list[dict[str, Any]]:
    """The events an actor wrote; its last line may be cut off by SIGKILL."""
    events = []
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                events.append(json.loads(line))
    return events


def logged(path: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_log(path) if event["kind"] == kind]


def processes_mapping(generation: str) -> list[int]:
    """Pids that still map, or have open, the memory of this generation."""
    pids = [int(process.name) for process in Path("/proc").iterdir() if process.name.isdigit()]
    return [pid for pid in pids if any(generation in name for name in _in_use(Path(f"/proc/{pid}")))]


def _in_use(process: Path) -> Iterator[str]:
    """What it maps, and the names of what it has open. A descriptor may be gone the moment that it was listed."""
    with contextlib.suppress(OSError):
        yield (process / "maps").read_text()
        for fd in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                yield str(fd.readlink())


# The actors' side: forked from the nursery, where torch is imported


class Log:
    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)

    def __call__(self, kind: str, **values: Any) -> None:
        os.write(self._fd, (json.dumps({"kind": kind, "pid": os.getpid(), **values}) + "\n").encode())


def tensors_of(version: int) -> dict[str, Any]:
    import torch

    return {f"t{i}": torch.full((ELEMENTS,), value(version, i), dtype=torch.int64) for i in range(TENSORS)}


def value(version: int, index: int) -> int:
    return version * 1000 + index


def is_torn(tensors: dict[str, Any], version: int) -> bool:
    return any(bool((tensors[f"t{i}"] != value(version, i)).any()) for i in range(TENSORS))


def model_of(tensors: dict[str, Any]) -> Any:
    from torch import nn

    model = nn.Module()
    for name, tensor in tensors.items():
        model.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return model


def write_forever(path: str, log: str, first: int = 1, pause_s: float = 0.0, way: str = "auto") -> None:
    """Publish version after version, every element of a tensor saying which."""
    from async_grpo_ipc import WeightExporter

    say = Log(log)
    tensors = tensors_of(0)
    exporter = WeightExporter.from_tensors(tensors, path, way=way)
    say("exporter", generation=exporter.generation)
    version = first
    while True:
        for index, tensor in enumerate(tensors.values()):
            tensor.fill_(value(version, index))
        if exporter.publish(version):
            say("published", version=version)
            version += 1
        else:
            say("skipped", version=version, skipped=exporter.skipped)
        time.sleep(pause_s)


STEPS = {
    "claim": "_claim_slot",
    "mark WRITING": "_mark",
    "copy": "_copy",
    "mark READY": "_mark",
    "release": "_release_slot",
    "announce": "_announce",
}


def write_and_die(path: str, log: str, step: str, when: str) -> None:
    """Publish version 1, then be killed before, in the middle of, or after one step of publishing version 2."""
    import torch

    from async_grpo_ipc import WeightExporter

    tensors = tensors_of(1)
    exporter = WeightExporter.from_tensors(tensors, path)
    exporter.publish(1)
    Log(log)("published", version=1, generation=exporter.generation)
    until(Path(log + ".go").exists, "the test to attach")
    for index, tensor in enumerate(tensors.values()):
        tensor.fill_(value(2, index))
    method = getattr(exporter, STEPS[step])

    def die(*arguments: Any) -> None:
        if step.startswith("mark") and not step.endswith(arguments[1].name):
            method(*arguments)
            return
        if when == "after":
            method(*arguments)
        if when == "middle":
            destinations, sources = exporter._plans[arguments[0]]._steps[0].portions[0]
            half = len(destinations) // 2
            torch._foreach_copy_(destinations[:half], sources[:half])
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(exporter, STEPS[step], die)
    exporter.publish(2)


def read_forever(path: str, log: str, way: str, seed: int) -> None:
    """Pull, or alias, without end; check every element; hold for a random while and check again."""
    import torch

    from async_grpo_ipc import ExporterDiedError, open_remote_memory

    say, chance = Log(log), random.Random(seed)
    model = model_of({name: torch.zeros_like(tensor) for name, tensor in tensors_of(0).items()})
    remote = open_remote_memory(path, timeout_s=DEADLINE_S)
    adopt = remote.pull if way == "pull" else remote.alias
    while True:
        started = time.monotonic()
        try:
            version = adopt(model)
        except ExporterDiedError:
            time.sleep(0.01)  # it died before its first version, the next one is on its way
            continue
        waited = time.monotonic() - started
        seen = dict(model.named_parameters())
        torn = is_torn(seen, version)
        time.sleep(chance.random() * 0.012)
        torn = torn or is_torn(seen, version)
        if not remote.intact():  # its exporter died meanwhile, and its memory with it
            continue
        say("read", generation=remote.generation, version=version, waited=waited, torn=torn)
        if way == "alias":
            adopt = lambda _: remote.refresh()  # noqa: E731  (aliased once, then moved)
            if chance.random() < 0.3:
                remote.release()


def hold_a_lease(path: str, log: str, fork_a_child: bool = False) -> None:
    """Take a lease and keep it; with a forked child that outlives this process, if asked for."""
    from async_grpo_ipc import ForkedError, open_remote_memory

    say = Log(log)
    remote = open_remote_memory(path, timeout_s=DEADLINE_S)
    with remote.lease(timeout_s=DEADLINE_S) as view:
        if fork_a_child and os.fork() == 0:
            try:
                remote.pull(model_of(tensors_of(0)))
            except ForkedError as error:
                say("child", error=str(error))
            stay(log)
        say("held", version=view.version, generation=view.generation)
        time.sleep(DEADLINE_S)


def stay(log: str) -> None:
    """Live on until the test says stop, as a child that nobody waits for."""
    deadline = time.monotonic() + DEADLINE_S
    while not Path(log + ".stop").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os._exit(0)


def export_and_fork(path: str, log: str) -> None:
    """Publish once, then have a forked child that outlives this process, as a trainer with a DataLoader
    worker has.
    """
    from async_grpo_ipc import WeightExporter

    exporter = WeightExporter.from_tensors(tensors_of(1), path)
    exporter.publish(1)
    if os.fork() == 0:
        Log(log)("child", generation=exporter.generation)
        stay(log)
    time.sleep(DEADLINE_S)


ROLES = {role.__name__: role for role in (write_forever, write_and_die, read_forever, hold_a_lease, export_and_fork)}


def spawn(role: str, arguments: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        ROLES[role](**arguments)
    except Exception as error:  # noqa: BLE001  (a forked child must not return)
        Log(arguments["log"])("failed", error=repr(error))
    finally:
        os._exit(1)


def run_nursery() -> None:
    import torch

    import async_grpo_ipc  # noqa: F401  (for the forked children)
    from kit.fake_cuda import install_if_asked

    torch.set_num_threads(1)
    install_if_asked()
    children: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(answer(request, children)), flush=True)
    for pid in list(children):
        end(pid, children)


def answer(request: dict[str, Any], children: set[int]) -> Any:
    if request["verb"] == "spawn":
        children.add(pid := spawn(request["role"], request["arguments"]))
        return pid
    if request["verb"] == "kill":
        return end(request["pid"], children)
    if request["verb"] == "wait":
        children.discard(request["pid"])
        return os.waitpid(request["pid"], 0)[1]
    if request["verb"] == "signal" and request["pid"] in children:
        os.kill(request["pid"], request["number"])
    return None


def end(pid: int, children: set[int]) -> int:
    children.discard(pid)
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


if __name__ == "__main__":
    run_nursery()
