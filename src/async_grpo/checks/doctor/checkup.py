"""The list of all checks, in the order in which they are made: what is quick comes first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from async_grpo.checks.doctor import cluster, gpu, machine, packages, setup
from async_grpo.checks.doctor.finding import Asked, Check, Finding, Level

CHECKS: list[Check] = [
    packages.packages,
    gpu.gpus,
    machine.memory,
    machine.sandbox,
    machine.room,
    machine.place,
    gpu.torch_and_weights,
    cluster.cluster,
    setup.setup_file,
]


def findings(asked: Asked) -> Iterator[Finding]:
    """Yield what each check finds as it makes them. Only those with torch and the setup file take seconds."""
    for check in CHECKS:
        yield from check(asked)


def exit_code(found: Iterable[Finding]) -> int:
    """0: no errors; 1: at least one."""
    return int(any(finding.level is Level.ERROR for finding in found))
