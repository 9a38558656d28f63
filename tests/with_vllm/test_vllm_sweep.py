"""The demo recipe on two seeds at once, each with a vLLM server of its own, of which one is killed in the middle."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from kit import runs
from kit.runs import command, ran, read, steps_logged
from kit.waiting import until_gone

pytestmark = pytest.mark.slow
SETUP = str(Path(__file__).parent / "setups" / "demo.py")
OPTIONS = ("--num-instances", "2", "-n", "1", "--generator", "vllm-server", "--steps", "12", "--eval-every", "6")


def server_in(family: list[psutil.Process], run: Path) -> psutil.Process:
    """The vLLM server of a run; its own children come after it."""
    for process in family:
        with suppress(psutil.NoSuchProcess):
            command_line = " ".join(process.cmdline())
            if "api_server" in command_line and str(run) in command_line:
                return process
    raise AssertionError(f"no server of {run}")


def test_two_servers_in_a_sweep_of_which_one_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "DEADLINE_S", 1200.0)  # two servers load on the cores of one
    dirs = [tmp_path / "outputs" / f"trl_demo_instance{index}_seed{index + 1}" / "run" for index in range(2)]
    with command("sweep", SETUP, "--seeds", "1,2", *OPTIONS, cwd=tmp_path, OMP_NUM_THREADS="1") as sweep:
        sweep.wait_until(lambda: len(steps_logged(dirs[0])) >= 2, "two steps of the first run")
        family = sweep.children()
        server_in(family, dirs[0]).kill()
        assert sweep.wait() == 0, sweep.output
    assert "n = 2 of 2 seeds (1, 2)." in sweep.output
    for run in dirs:
        assert steps_logged(run) == list(range(1, 13))
        summary = read(run / "summary.json")
        assert (summary["jobs_quarantined"], summary["worker_restarts"]) == (0, 0)
        ran("audit", str(run), "--json", cwd=tmp_path)
    assert "is started again" in (dirs[0] / "log_worker_1.txt").read_text()
    assert "is started again" not in (dirs[1] / "log_worker_1.txt").read_text()
    report = json.loads((tmp_path / "outputs" / "sweep_demo" / "report.json").read_text())
    assert {row["step"]: row["n"] for row in report["evaluations"]["success_rate"]} == {0: 2, 6: 2, 12: 2}
    links = sorted((tmp_path / "logs" / "parallel_training").glob("vllm_instance*"))
    assert [link.resolve().parent for link in links] == dirs
    until_gone(family)
