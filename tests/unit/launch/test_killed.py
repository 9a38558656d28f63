"""Whether a killed process was killed for lack of memory, by what the kernel says."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_grpo.launch import killed
from async_grpo.launch.killed import MemoryWatch

PID = 4242
NAMED = b"3,1,2,-;Out of memory: Killed process 4242 (python3) total-vm:1kB, anon-rss:1kB\n"


@pytest.fixture(params=["2", "1"])
def kernel(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of a kernel, with either version of control groups; the group's counter is returned."""
    group = {"2": "a/b/memory.events", "1": "memory/a/b/memory.oom_control"}[request.param]
    line = {"2": "0::/a/b", "1": "4:cpu,memory:/a/b"}[request.param]
    (tmp_path / group).parent.mkdir(parents=True)
    (tmp_path / group).write_text("oom_kill_disable 0\noom_kill 2\n")
    (tmp_path / "membership").write_text(f"9:pids:/\n{line}\n")
    (tmp_path / "vmstat").write_text("pgfault 7\noom_kill 27\n")
    (tmp_path / "kmsg").write_bytes(b"6,1,1,-;rcu\n")
    for name, file in (("_KERNEL_LOG", "kmsg"), ("_COUNTERS", "vmstat"), ("_MEMBERSHIP", "membership")):
        monkeypatch.setattr(killed, name, tmp_path / file)
    monkeypatch.setattr(killed, "_CGROUPS", tmp_path)
    monkeypatch.setattr(killed, "_MOST_RECORDS", 2)  # a file ends where /dev/kmsg would block
    return tmp_path / group


def test_what_the_kernel_counts_and_says(kernel: Path) -> None:
    root = killed._COUNTERS.parent
    watch = MemoryWatch()
    assert watch.verdict(PID) == "by another process: the kernel has reported no lack of memory"
    (root / "vmstat").write_text("oom_kill 28\n")
    assert watch.verdict(PID).startswith("most likely out of memory: the kernel has killed a process of this machine")
    kernel.write_text("oom_kill 3\n")
    assert watch.verdict(PID).startswith("most likely out of memory: its control group")
    with (root / "kmsg").open("ab") as log:
        log.write(NAMED)
    assert watch.verdict(PID) == "out of memory: the kernel's log names it"
    assert "log" not in watch.verdict(PID + 1)


def test_what_the_log_said_before_is_of_another_process_of_that_number(kernel: Path) -> None:
    (killed._COUNTERS.parent / "kmsg").write_bytes(NAMED)
    assert "no lack of memory" in MemoryWatch().verdict(PID)


def test_a_kernel_that_says_nothing(kernel: Path) -> None:
    root = killed._COUNTERS.parent
    for file in (kernel, root / "membership", root / "vmstat", root / "kmsg"):
        file.unlink()
    assert "no lack of memory" in MemoryWatch().verdict(PID)
