"""The list of all checks, in the order in which they are made: what is quick comes first."""

from __future__ import annotations

from collections.abc import Iterator

from async_grpo.checks.doctor import gpu, link, machine, setup_check
from async_grpo.checks.doctor.finding import Asked, Check, Finding

CHECKS: list[Check] = [
    machine.packages,
    gpu.gpus,
    machine.memory,
    machine.sandbox,
    machine.disk_space,
    machine.run_directory,
    gpu.torch_and_weights,
    machine.cluster,
    link.trainer_link,
    setup_check.setup_file,
]


def findings(asked: Asked) -> Iterator[Finding]:
    """Yield what each check finds as it makes them. Only those with torch and the setup file take seconds."""
    for check in CHECKS:
        yield from check(asked)
