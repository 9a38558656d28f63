"""Whether a killed process was killed for lack of memory, by what the kernel says."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_grpo.launch import host_memory
from async_grpo.launch.host_memory import MemoryWatch


@pytest.fixture(params=["2", "1"])
def counter(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The counter of our group, in either version of control groups."""
    group = {"2": "a/b/memory.events", "1": "memory/a/b/memory.oom_control"}[request.param]
    line = {"2": "0::/a/b", "1": "4:cpu,memory:/a/b\n0::/"}[request.param]
    (tmp_path / group).parent.mkdir(parents=True)
    (tmp_path / group).write_text("oom_kill_disable 0\noom_kill 2\n")
    (tmp_path / "membership").write_text(f"9:pids:/\n{line}\n")
    monkeypatch.setattr(host_memory, "_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(host_memory, "_CGROUPS", tmp_path)
    return tmp_path / group


def test_what_the_kernel_counts_meanwhile(counter: Path) -> None:
    watch = MemoryWatch()
    assert watch.verdict() == "by another process: its control group has reported no lack of memory"
    counter.write_text("oom_kill 3\n")
    assert watch.verdict().startswith("most likely out of memory: the kernel has killed a process of its control group")
    assert "no lack of memory" in MemoryWatch().verdict(), "what was before is no matter"


@pytest.mark.parametrize("says", ["nothing", "something else", "no membership"])
def test_a_kernel_that_does_not_count(counter: Path, says: str) -> None:
    if says == "nothing":
        counter.unlink()
    elif says == "something else":
        counter.write_text("under_oom 0\nx\n")
    else:
        host_memory._MEMBERSHIP.unlink()
    assert "no lack of memory" in MemoryWatch().verdict()
