"""The list of all checks, in the order in which they are made: what is quick comes first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import psutil

from async_grpo.checks import probe
from async_grpo.checks.doctor import cluster, gpu, machine, packages, setup, weights
from async_grpo.checks.doctor.finding import Check, Finding, Level, error


def checks(
    run_dir: Path,
    config: Path | None = None,
    config_values: Mapping[str, str] | None = None,
    gpu_memory: int | None = None,
    ray: str | None = None,
) -> list[Check]:
    """Each yields its findings as it makes them. Only those on GPUs, weights and the setup file take seconds."""
    found = gpu.driver()
    every: list[Check] = [
        packages.packages,
        lambda: gpu.presence(found),
        lambda: gpu.modes(found),
        machine.memory,
        machine.sandbox,
        lambda: machine.room(run_dir),
        lambda: machine.place(run_dir),
        lambda: _devices(found),
    ]
    if ray is not None:
        every.append(lambda: cluster.cluster(ray))
    if config is not None:
        available = psutil.virtual_memory().available
        every.append(
            lambda: setup.setup_file(config, config_values, gpus=found.visible, memory=available, gpu_memory=gpu_memory)
        )
    return every


def findings(every: Iterable[Check]) -> Iterator[Finding]:
    for check in every:
        yield from check()


def exit_code(found: Iterable[Finding]) -> int:
    """0: no errors; 1: at least one."""
    return int(any(finding.level is Level.ERROR for finding in found))


def _devices(found: gpu.DriverReport) -> Iterator[Finding]:
    """Judge what needs torch: the GPUs, and weights between two processes."""
    names = ["cpu"]
    if found.visible:
        try:
            facts = gpu.look()
        except probe.ChildFailed as failure:
            yield error("GPU", f"a process that used it failed: {failure}", "nvidia-smi says whether the driver works.")
            return
        yield from gpu.fit(found, facts)
        yield from gpu.devices(facts)
        names = [f"cuda:{index}" for index in range(min(2, len(facts.gpus)))] or names
    yield from weights.weight_sharing(names)
