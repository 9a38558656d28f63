"""Whether programs that a model wrote can be isolated here. Only rewards that run such programs need it."""

from __future__ import annotations

import os
from collections.abc import Iterator

from async_grpo.checks.doctor.finding import Finding, error, ok
from async_grpo.rewards.sandbox import SWITCH, SandboxError, run_code


def sandbox() -> Iterator[Finding]:
    """An error only where the run is to execute programs: the switch is set."""
    if os.environ.get(SWITCH) != "1":
        yield ok("sandbox", f"programs that a model wrote are not run: {SWITCH} is not 1")
        return
    try:
        run_code("pass")
    except SandboxError as refusal:
        yield error("sandbox", str(refusal), f"apt-get install bubblewrap, or unset {SWITCH}.")
    else:
        yield ok("sandbox", "programs that a model wrote are isolated by bubblewrap")
