"""Every reader of files, and every reward, against a fixed set of some hundred inputs: only its own errors come out.

`benchmarks/fuzz.py` searches for longer.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st
from targets import TARGETS, Target

EXAMPLES = 100


@pytest.mark.parametrize(
    "target", [pytest.param(it, id=it.name, marks=[pytest.mark.integration] * (it.name == "rewards")) for it in TARGETS]
)
def test_only_our_own_errors_come_out(target: Target, tmp_path: Path) -> None:
    @settings(
        max_examples=EXAMPLES, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(data=st.data())
    def read(data: st.DataObject) -> None:
        try:
            target.read(data.draw(target.inputs), tmp_path)
        except target.errors:
            return

    read()


@pytest.mark.parametrize("target", [target for target in TARGETS if target.errors], ids=lambda target: target.name)
def test_some_of_the_inputs_are_sound(target: Target, tmp_path: Path) -> None:
    """Else the errors would be those of the inputs, and nothing behind them was reached."""

    def is_sound(data: bytes) -> bool:
        try:
            target.read(data, tmp_path)
        except target.errors:
            return False
        return True

    find(target.inputs, is_sound, settings=settings(derandomize=True, database=None, deadline=None), random=Random(0))
