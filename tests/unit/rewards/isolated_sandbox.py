"""Whether this machine isolates programs."""

from __future__ import annotations

import os

import pytest

from async_grpo.rewards.sandbox import SWITCH, SandboxError, run_code


def _why_not() -> str:
    """Why this machine cannot isolate a program; empty if it can."""
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "1"
    try:
        run_code("pass")
    except SandboxError as error:
        return str(error)
    finally:
        if before is None:
            del os.environ[SWITCH]
    return ""


WHY_NOT = _why_not()
isolated = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
