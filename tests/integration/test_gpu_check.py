"""`scripts/gpu_check.sh` as far as a CPU allows: its parts, its report, and that one failure stops nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from kit.runs import ROOT
from kit.waiting import is_gone, until

SCRIPT = ROOT / "scripts" / "gpu_check.sh"


def check(tmp_path: Path, *arguments: str, **env: str) -> tuple[int, str]:
    """The exit code and the report."""
    report = tmp_path / "report.md"
    ran = run(SCRIPT, *arguments, "--dry-run", "--report", report, **{"PYTHON": sys.executable, **env})
    return ran.returncode, report.read_text() if report.exists() else ran.stderr


def run(script: Path, *arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [str(script), *map(str, arguments)]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=500, check=False)


def test_parts_of_the_report(tmp_path: Path) -> None:
    code, report = check(tmp_path, "sampler", "weights", "gsm8k", "targets", GSM8K_PATH="")
    assert code == 0, report
    assert report.count("PASSED tests/gpu/test_sampler_cuda.py::") == 6
    assert "no figure here means anything" in report
    assert f"## Weights\n\n    {sys.executable} benchmarks/weights.py --help\n" in report, "each part names its command"
    assert "```\n\nDone in" in report
    assert "## GSM8K\n\nLeft out: GSM8K_PATH names no folder" in report
    assert "| attach | <= 50 ms | not measured | |" in report


def test_a_part_that_fails_is_said_and_the_others_go_on(tmp_path: Path) -> None:
    code, report = check(tmp_path, "smoke", "weights", GSM8K_PATH="", PYTHON="false")
    assert code == 1
    for part in ("Doctor", "Weights between processes", "Weights"):
        section = report.split(f"## {part}\n")[1].split("\n## ")[0]
        assert "**Failed** with exit code 1" in section


def slow_check(tmp_path: Path, command: str, *parts: str) -> subprocess.Popen[bytes]:
    """These parts, with a Python that runs this line of a shell in place of their benchmarks and tests."""
    slow = tmp_path / "python"
    slow.write_text(f'#!/bin/sh\ncase "$1 $2" in *.py\\ * | *pytest) {command} ;; *) exit 0 ;; esac\n')
    slow.chmod(0o755)
    env = {**os.environ, "PYTHON": str(slow), "OUT": str(tmp_path)}
    return subprocess.Popen([str(SCRIPT), *parts, "--dry-run"], env=env, start_new_session=True)


def test_a_report_that_is_killed_has_what_was_said_until_then(tmp_path: Path) -> None:
    """The machine may be taken away in the middle of a part. By default the report is where OUT says."""
    report = tmp_path / "gpu_report.md"
    with slow_check(tmp_path, "echo half a figure; sleep 60", "weights") as running:
        until(lambda: report.exists() and "half a figure" in report.read_text(), "what is written as it comes")
        os.killpg(running.pid, signal.SIGKILL)
    assert "half a figure" in report.read_text()


@pytest.mark.parametrize("parts", [("weights",), ("tests", "kinds")], ids=["alone", "side by side"])
def test_a_check_that_is_ended_ends_the_parts_that_run(parts: tuple[str, ...], tmp_path: Path) -> None:
    """A part that is left behind would share the GPU with what is measured next."""
    with slow_check(tmp_path, 'echo half; echo $$ >"$OUT/$$.pid"; exec sleep 600', *parts) as running:
        pids = until(lambda: len(found := list(tmp_path.glob("*.pid"))) == len(parts) and found, "the parts' pids")
        until(lambda: "".join(map(Path.read_text, tmp_path.glob("*.md*"))).count("half\n") == len(parts), "their words")
        running.terminate()
        assert running.wait(60) == 143
    for pid in pids:
        until(lambda pid=pid: is_gone(int(pid.stem)), "a part's end")
    assert (tmp_path / "gpu_report.md").read_text().count("```text\nhalf\n") == len(parts), "sections were joined"


def test_parts_that_run_side_by_side_have_whole_sections(tmp_path: Path) -> None:
    meet = """case $* in *kinds*) me=kinds you=tests ;; *) me=tests you=kinds ;; esac; echo $me begins; touch "$OUT/$me"
        until [ -e "$OUT/$you" ]; do sleep 0.05; done; echo $me ends"""
    with slow_check(tmp_path, meet, "tests", "kinds") as running:
        assert running.wait(200) == 0
    sections = (tmp_path / "gpu_report.md").read_text().split("\n## ")[1:]
    assert [section.splitlines()[0] for section in sections] == ["Tests marked gpu", "Each kind of run"]
    for section, name in zip(sections, ("tests", "kinds"), strict=True):
        assert f"```text\n{name} begins\n{name} ends\n```\n\nDone in" in section


def test_a_budget_shortens_a_limit_and_leaves_out_what_has_less_than_half(tmp_path: Path) -> None:
    code, report = check(tmp_path, "weights", "padding", "targets", "--budget", "100", PYTHON="true")
    assert code == 0
    assert re.search(r"## Weights\n\nLeft out: \d+ s of the budget were left, its limit is 300\.", report)
    assert re.search(r"padding\n\nIts limit is the \d+ s that were left of the budget, in place of 120\.", report)
    assert "Done in" in report and "## Targets" in report


def test_what_is_brought_is_unpacked_once(tmp_path: Path) -> None:
    """Into the project's folder, so the script is copied into another one."""
    folder, stage, pieces = (tmp_path / name for name in ("scripts", "stage/vllm", "pieces"))
    for each in (folder, stage, pieces):
        each.mkdir(parents=True)
    script = Path(shutil.copy(SCRIPT, folder))
    (stage / "__init__.py").write_text("print('imported', __file__)\nLLM, __version__ = 'it', '1'\n")
    pack = "tar c -C stage vllm | xz | split -b 100 - pieces/piece. && cd pieces && sha256sum piece.* >manifest"
    subprocess.run(["bash", "-c", pack], cwd=tmp_path, check=True, timeout=60)

    def report(pieces: Path = pieces) -> str:
        run(script, "vllm", "--vllm", pieces, "--budget", "99", PYTHON=sys.executable, OUT=str(tmp_path))
        return (tmp_path / "gpu_report.md").read_text().rpartition("# GPU check")[2]

    unpacked = tmp_path / ".gpu" / "vllm-site" / "vllm" / "__init__.py"
    assert f"imported {unpacked}" in report()
    unpacked.write_text(unpacked.read_text().replace("imported", "kept"))
    assert f"kept {unpacked}" in report()
    assert "nowhere could not be unpacked." in report(tmp_path / "nowhere"), "what is there is not taken"
    next(pieces.glob("piece.*")).write_bytes(b"damaged")
    assert f"Left out: the pieces in {pieces} could not be unpacked." in report()


def test_a_slimmed_library_keeps_what_its_gpu_loads(tmp_path: Path) -> None:
    def entry(kind: int, sm: int, size: int) -> bytes:
        return struct.pack("<HHIQ12xI", kind, 0x101, 64, size, sm).ljust(64, b"\0") + bytes([sm]) * size

    def container(*entries: bytes, of: int) -> bytes:
        code = b"".join(entries)
        return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(code)) + code.ljust(of, b"\0")

    ptx, code = 1, 2
    own = container(entry(code, 80, 8), entry(code, 90, 8), entry(ptx, 90, 8), of=0)
    compiled = container(entry(code, 80, 8), entry(ptx, 75, 8), entry(ptx, 80, 8), entry(ptx, 100, 8), of=0)
    neither = container(entry(code, 100, 16), entry(code, 120, 8), of=0)
    (tmp_path / "it.so").write_bytes(b"before" + own + b"between" + compiled + neither)
    ran = run(Path(sys.executable), ROOT / "scripts" / "slim_cuda.py", tmp_path / "it.so")
    assert ran.returncode == 0, ran.stderr
    slimmed = (container(entry(code, 90, 8), of=3 * 72), container(entry(ptx, 80, 8), of=4 * 72))
    last = container(entry(code, 120, 8), of=80 + 72)
    assert (tmp_path / "it.so").read_bytes() == b"before" + slimmed[0] + b"between" + slimmed[1] + last


def test_the_plan_has_each_part_in_under_ten_minutes(tmp_path: Path) -> None:
    code, report = check(tmp_path, "--plan", GSM8K_PATH="data")
    assert code == 0 and not report, "nothing is run, and nothing is reported"
    plan = run(SCRIPT, "--plan", GSM8K_PATH="data").stdout
    limits: dict[str, int] = {}
    for line in plan.splitlines():
        if line.startswith("scripts/gpu_check.sh "):
            part = line.split()[1]
            limits[part] = 0
        elif found := re.search(r"at most (\d+) s", line):
            limits[part] += int(found[1])
    assert " ".join(limits) == (
        "smoke vllm sampler engine kill one_gpu async weights padding tests kinds deterministic full gsm8k targets"
    )
    assert all(0 < limits[part] < 600 for part in limits if part != "targets")
    at_once = sum(limits[part] for part in ("tests", "kinds", "deterministic")) - limits["tests"]
    assert f"all of it: {sum(limits.values()) - at_once} s at most" in plan
    some = run(SCRIPT, "--plan", "--budget", str(limits["smoke"] + 10), GSM8K_PATH="data").stdout
    assert f"Weights: left out, 10 s of the budget were left, its limit is {limits['weights']}." in some


def test_an_unknown_part(tmp_path: Path) -> None:
    assert check(tmp_path, "everything") == (2, "unknown: everything\n")


@pytest.mark.parametrize(("value", "verdict"), [(1.69, "**no**"), (1.7, "yes")])
def test_targets_are_held_against_the_worst_row(tmp_path: Path, value: float, verdict: str) -> None:
    rows = [{"name": "1 worker against TRL alone", "value": 9}, {"name": "2 workers against TRL alone", "value": value}]
    (tmp_path / "gpu_async.json").write_text(json.dumps({"rows": rows}))
    rows = [{"name": "publish, 1B fp32, flat", "value": 0.5}, {"name": "publish, 1B bf16, flat", "value": 0.1}]
    (tmp_path / "gpu_weights.json").write_text(json.dumps({"rows": rows}))
    table = run(Path(sys.executable), ROOT / "benchmarks" / "gpu_targets.py", tmp_path).stdout
    assert f"| >= 1.7 of its rollouts/s | {value} | {verdict} |" in table
    assert "| publish | >= 0.85 of raw copy | 0.5 | **no** |" in table


def test_a_server_that_is_killed_and_two_equal_runs(tmp_path: Path) -> None:
    code, report = check(tmp_path, "kill", "deterministic")
    assert code == 0, report
    assert "PASSED tests/gpu/test_runs_cuda.py::test_a_server_killed_while_workers_generate_is_resumed" in report
    assert "handed back after the server's death" in report
    hashes = re.findall(r"^([0-9a-f]{64})  .*/out[12]/checkpoint-4/model\.safetensors$", report, re.MULTILINE)
    assert len(hashes) == 2 and len({*hashes}) == 1


@pytest.mark.slow
def test_one_gpu(tmp_path: Path) -> None:
    code, report = check(tmp_path, "one_gpu")
    assert code == 0, report
    found = json.loads((tmp_path / "gpu_one_gpu.json").read_text())
    measured = [row["name"] for row in found["rows"] if row["unit"] == "rollouts/s"]
    assert {f"server and {workers}" for workers in ("1 worker", "2 workers", "4 workers")} < {*measured}
    assert {note.partition(": ")[0] for note in found["notes"].values()} == {"left out"}, found["notes"]
    assert all(f"\n| {name} | " in report for name in [*measured, *found["notes"]])


@pytest.mark.slow
def test_asynchronous_against_trl(tmp_path: Path) -> None:
    code, report = check(tmp_path, "async")
    assert code == 0, report
    assert "| TRL alone | 2 |" in report
    assert "| 1 worker | 2 |" in report
