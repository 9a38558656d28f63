"""What this machine has for a run: packages, memory, disk, a folder for its queue, isolation; and its cluster."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as NotYet
from importlib import metadata, resources
from typing import TYPE_CHECKING

import psutil
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from async_grpo.checks.doctor.finding import Asked, Finding, error, ok, warning
from async_grpo.checks.doctor.link import link_of_cluster
from async_grpo.errors import PeerDiedError, RunDirError, UsageError
from async_grpo.formatting import size
from async_grpo.launch.host_memory import memory_group
from async_grpo.rewards.sandbox import SWITCH, SandboxError, run_code
from async_grpo.rundir.folders import check_folder, nearest_existing
from async_grpo.setup.fingerprints import installed
from async_grpo.version import __version__

if TYPE_CHECKING:
    from async_grpo.nodes.cluster import Cluster, Machine

LITTLE_MEMORY = 2_000_000_000  # a server and a worker take about 1 GB before there is a model
LITTLE_SPACE = 5_000_000_000
NO_SPACE = 100_000_000
NODE_ANSWER_S = 60.0  # an actor that starts imports what a worker does
NODES = "nodes"
TESTED_PYTHON = "3.11"
UNIT_TESTED_PYTHONS = ("3.12", "3.13")
ENGINES = {"vllm": "vllm", "unsloth": "unsloth", "bitsandbytes": "qlora"}  # distribution -> our extra
MAIN = (
    *("torch", "transformers", "trl", "datasets", "accelerate", "peft", "tokenizers", "numpy", "safetensors"),
    *("huggingface_hub", "tensorboard", "loguru", "filelock", "psutil", "rich", "pyarrow"),
)
_CONSTRAINTS = resources.files("async_grpo").joinpath("constraints.txt")
_INSTALL = f"pip install -c {_CONSTRAINTS} async-grpo"

Installed = Callable[[str], str | None]


# --- installed packages, none of which is imported


def tested_set() -> dict[str, str]:
    """Name -> version, of the constraints that the tests ran with."""
    lines = (line.strip() for line in _CONSTRAINTS.read_text(encoding="utf-8").splitlines())
    pins = (line.partition("==") for line in lines if not line.startswith("#"))
    return {canonicalize_name(name): version for name, equal, version in pins if equal}


def needed(extra: str = "") -> list[Requirement]:
    """The needs of Async-GRPO itself, or with an extra; empty where it runs without being installed."""
    if installed("async-grpo") is None:
        return []
    every = map(Requirement, metadata.requires("async-grpo") or [])
    return [each for each in every if each.marker is None or each.marker.evaluate({"extra": extra})]


def packages(asked: Asked, version_of: Installed = installed) -> Iterator[Finding]:
    """A main package that is missing or out of range is an error, another version than tested a warning.

    The optional engines are compared with the versions that our extras ask for. For their own needs there is `pip
    check`.
    """
    python = platform.python_version()
    yield ok("async-grpo", f"{__version__} on Python {python}, {platform.system()} {platform.release()}")
    if python.rpartition(".")[0] not in (TESTED_PYTHON, *UNIT_TESTED_PYTHONS):
        fix = f"If it fails: an environment of Python {TESTED_PYTHON}."
        yield warning("Python", f"{python}; no tests run on it, and all tests on {TESTED_PYTHON}", fix)
    for requirement in needed():
        have = version_of(requirement.name)
        if have is None:
            yield error(requirement.name, f"not installed; {requirement} is needed", _INSTALL)
        elif not requirement.specifier.contains(have, prereleases=True):
            yield error(requirement.name, f"{have}, but {requirement} is needed", _INSTALL)
    yield _against_tested(version_of)
    for name, extra in ENGINES.items():
        have, wanted = version_of(name), [each for each in needed(extra) if each.name == name]
        if have is not None and not all(each.specifier.contains(have, prereleases=True) for each in wanted):
            fix = f"If it fails: pip install 'async-grpo[{extra}]', in an environment of its own."
            yield warning(name, f"{have} (tested: {', '.join(map(str, wanted))})", fix)


def _against_tested(version_of: Installed) -> Finding:
    tested = tested_set()
    both = [(name, have, tested[canonicalize_name(name)]) for name in MAIN if (have := version_of(name))]
    others = [f"{name} {have} (tested: {pin})" for name, have, pin in both if Version(have).public != pin]
    if others:
        return warning("versions", f"not those that were tested: {', '.join(others)}", f"If it fails: {_INSTALL}")
    shown = ", ".join(f"{name} {version_of(name)}" for name in ("torch", "transformers", "trl"))
    return ok("versions", f"{len(both)} packages, all in the tested version: {shown}, ...")


# --- memory, disk and isolation


def memory(asked: Asked) -> Iterator[Finding]:
    """Judge the RAM, and what the container's memory limit leaves of it."""
    ram = psutil.virtual_memory()
    group = memory_group()
    free, what = int(ram.available), f"{size(ram.available)} of {size(ram.total)} RAM available"
    if group is not None and group.limit < ram.total:
        free = min(free, group.limit - group.used)
        what += f"; this container may use {size(group.limit)}, and uses {size(group.used)}"
    if free < LITTLE_MEMORY:
        yield warning(
            "memory",
            what,
            "End other processes, raise the container's limit (docker run --memory), or start fewer workers. Shared "
            "weights on a CPU count as memory of the container.",
        )
    else:
        yield ok("memory", what)


def disk_space(asked: Asked) -> Iterator[Finding]:
    """Judge the bytes that the disk of the run directory has left."""
    disk = os.statvfs(nearest_existing(asked.run_dir))
    free = disk.f_bavail * disk.f_frsize
    found = f"{size(free)} free where {asked.run_dir} is"
    if free < NO_SPACE:
        yield error("disk", found, "Free some space, or choose another --run-dir: a full disk stops the run.")
    elif free < LITTLE_SPACE:
        yield warning("disk", found, "Free some space, or keep less: --keep-done 1GB, save_total_limit=2.")
    else:
        yield ok("disk", found)


def run_directory(asked: Asked) -> Iterator[Finding]:
    """Judge whether the queue can be there: on a local disk, writable by this user and by no other."""
    try:
        check_folder(asked.run_dir)
    except RunDirError as refusal:
        fix = "Choose a --run-dir on a local disk (ext4, xfs, tmpfs) that only you can write to."
        yield error("run directory", str(refusal).split(". ")[0], fix)
    else:
        yield ok("run directory", f"{asked.run_dir}: on a local disk, yours to write to")


def sandbox(asked: Asked) -> Iterator[Finding]:
    """Judge the isolation of programs where the run is to execute some: the switch is set."""
    if os.environ.get(SWITCH) != "1":
        return
    try:
        run_code("pass")
    except SandboxError as refusal:
        yield error("sandbox", str(refusal), f"apt-get install bubblewrap, or unset {SWITCH}.")
    else:
        yield ok("sandbox", "programs that a model wrote are isolated by bubblewrap")


# --- other machines


def cluster(asked: Asked) -> Iterator[Finding]:
    """Look at each machine of the cluster that `--ray` names."""
    if asked.ray is None:
        return
    from async_grpo.nodes.cluster import Cluster
    from async_grpo.nodes.node import facts
    from async_grpo.nodes.request import require_ray

    try:
        require_ray()
        with Cluster(asked.ray, nodes=2, cpus=1, run_id="doctor") as found:
            yield from _tokens(found)
            here, machines = facts(), found.machines()
            if not machines:
                yield error(NODES, "this machine is alone in the cluster", "Start Ray on others: ray start --address=…")
            for machine in machines:
                yield _machine(found, machine, here["versions"])
            if machines:
                yield from link_of_cluster(asked, found, machines)
    except (UsageError, PeerDiedError) as refusal:
        yield error(NODES, str(refusal), "Correct that first.")


def _tokens(found: Cluster) -> Iterator[Finding]:
    if why := found.open_to_the_network():
        yield warning(NODES, why, "ray get-auth-token --generate, and RAY_AUTH_MODE=token on all nodes (SECURITY.md).")
    else:
        yield ok(NODES, "only this machine can reach the cluster, or a token is asked for")


def _machine(found: Cluster, machine: Machine, here: dict[str, str]) -> Finding:
    node = found.start(machine, workers=0, gpus=0)
    try:
        facts = node.facts().result(NODE_ANSWER_S)
        began = time.monotonic()
        node.facts().result(NODE_ANSWER_S)
        took_ms = 1000 * (time.monotonic() - began)
    except NotYet:
        return error(NODES, f"{machine.name} has not answered within {NODE_ANSWER_S:g} s", "See its logs in /tmp/ray.")
    except Exception as failure:  # noqa: BLE001 - whatever Ray makes of a machine that cannot
        return error(NODES, f"{machine.name}: {failure}", "pip install 'async-grpo[ray]' there, as here.")
    finally:
        node.kill()
    has = f"{machine.name} ({machine.address}): {machine.free}"
    others = [name for name, version in facts["versions"].items() if version != here.get(name)]
    if others:
        named = ", ".join(f"{name} {facts['versions'][name] or '(not installed)'}" for name in others)
        return error(NODES, f"{has}; it has {named}", "Install the same versions on all nodes.")
    return ok(NODES, f"{has}; the same versions as here; a call takes {took_ms:.1f} ms")
