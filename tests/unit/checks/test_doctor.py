"""Each check of the doctor: what is well, what is complained of, and that every complaint comes with its fix."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from packaging.requirements import Requirement

from async_grpo.checks import probe
from async_grpo.checks.doctor import checkup, finding, gpu, machine, setup_check
from async_grpo.checks.doctor.finding import Asked, Finding, Level, error, ok, warning
from async_grpo.checks.doctor.gpu import DriverReport
from async_grpo.checks.plan.trainer_facts import Look, Question
from async_grpo.cli import main
from async_grpo.launch import host_memory
from async_grpo.rewards.sandbox import SWITCH
from async_grpo.rundir import folders
from kit.trainer_facts import batch, facts

GB = 1_000_000_000
ROOT = Path(__file__).parents[3]
HERE = Asked(Path("worker"))


def levels(found: Iterable[Finding]) -> dict[str, str]:
    return {finding.subject: str(finding.level) for finding in found}


def only(found: Iterable[Finding], subject: str) -> Finding:
    [finding] = [finding for finding in found if finding.subject == subject]
    return finding


# --- this machine, as it is


def test_the_checks_without_torch_find_nothing_wrong_with_this_machine(tmp_path: Path) -> None:
    asked = Asked(tmp_path / "worker")
    found = [*machine.memory(asked), *machine.disk_space(asked), *machine.run_directory(asked)]
    assert not [finding for finding in found if finding.level is Level.ERROR], found
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_the_directory_of_a_run_is_not_touched(tmp_path: Path) -> None:
    run_dir = tmp_path / "worker"
    run_dir.mkdir(mode=0o700)
    before = run_dir.stat().st_mtime_ns
    assert only(machine.run_directory(Asked(run_dir)), "run directory").level is Level.OK
    assert run_dir.stat().st_mtime_ns == before


def test_a_run_directory_that_others_can_change(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    [finding] = machine.run_directory(Asked(tmp_path))
    assert finding.level is Level.ERROR and "can be written by others" in finding.found


def test_a_run_directory_on_a_network_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "network_file_system", lambda path: "NFS")
    [finding] = machine.run_directory(Asked(tmp_path / "worker"))
    assert finding.level is Level.ERROR and "is on NFS" in finding.found and "local disk" in finding.fix


def test_a_run_directory_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "why_not_writable", lambda path: f"{path}: its file system is read-only. Remount it.")
    [finding] = machine.run_directory(Asked(tmp_path / "worker"))
    assert finding.level is Level.ERROR and finding.found.endswith(": its file system is read-only")


@pytest.mark.parametrize(("free", "level"), [(50_000_000, "error"), (GB, "warning"), (50 * GB, "ok")])
def test_space_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, level: str) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=free, f_frsize=1))
    assert levels(machine.disk_space(Asked(tmp_path))) == {"disk": level}


def test_the_limit_of_a_container_counts(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("0::/outer/inner\n")
    for name, limit, used in (("outer", "4000000000", "3900000000"), ("outer/inner", "max", "1")):
        folder = tmp_path / "fs" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(limit + "\n")
        (folder / "memory.current").write_text(used + "\n")
    (tmp_path / "fs/outer/memory.stat").write_text("anon 1\ninactive_file 100000000\n")  # which the kernel drops first
    assert host_memory.memory_group(tmp_path / "fs", own) == host_memory.MemoryGroup(limit=4 * GB, used=3_800_000_000)


def test_little_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_group", lambda: host_memory.MemoryGroup(limit=GB, used=GB // 2))
    [finding] = machine.memory(HERE)
    assert finding.level is Level.WARNING and "may use 1.0 GB" in finding.found


# --- programs that a model wrote


def test_without_the_switch_nothing_is_asked_of_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [*machine.sandbox(HERE)] == []


def test_without_bubblewrap_the_switch_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(SWITCH, "1")
    monkeypatch.setenv("PATH", str(tmp_path))
    [found] = machine.sandbox(HERE)
    assert found.level is Level.ERROR and "bubblewrap is not installed" in found.found
    assert found.fix == f"apt-get install bubblewrap, or unset {SWITCH}."


def test_where_programs_can_be_isolated_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "1")
    monkeypatch.setattr("async_grpo.checks.doctor.machine.run_code", lambda source: None)
    [found] = machine.sandbox(HERE)
    assert found.level is Level.OK


# --- versions


def test_this_environment_is_the_tested_one() -> None:
    assert {"torch", "trl", "transformers", "pytest"} <= machine.tested_set().keys()
    assert "error" not in levels(machine.packages(HERE)).values()


def test_a_python_that_the_tests_do_not_run_on_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.platform, "python_version", lambda: "3.14.1")
    found = only(machine.packages(HERE), "Python")
    assert found.level is Level.WARNING and "3.14.1; no tests run on it, and all tests on 3.11" in found.found
    for tested in ("3.13.2", "3.11.9"):
        monkeypatch.setattr(machine.platform, "python_version", lambda tested=tested: tested)
        assert "Python" not in levels(machine.packages(HERE))


@pytest.mark.parametrize("page", ["README.md", "docs/quick_start.md", "docs/versions.md"])
def test_each_page_says_the_same_of_python(page: str) -> None:
    text = " ".join((ROOT / page).read_text().split())
    assert (
        f"Python 3.11 or newer (tests run on {machine.TESTED_PYTHON}, unit tests also on "
        f"{' and '.join(machine.UNIT_TESTED_PYTHONS)})" in text
    )


@pytest.mark.parametrize(("asked", "code"), [("3.11", 0), ("3.13", 2)])
def test_make_says_that_its_environment_has_another_python(tmp_path: Path, asked: str, code: int) -> None:
    for file in ("pyproject.toml", "src/async_grpo/constraints.txt", "there/bin/python", "python", "there/.installed"):
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\necho {asked if file == 'python' else '3.11'}\n")
        path.chmod(0o755)
    command = ["make", "-f", str(ROOT / "Makefile"), "venv", "VENV=there", "PYTHON=./python"]
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert made.returncode == code
    words = f"there has Python 3.11, and ./python is {asked}. Delete there, or choose another folder: make venv"
    assert (words in made.stderr) is (code != 0)


def test_a_missing_package_and_one_out_of_range_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = [Requirement("trl>=1.15,<1.17"), Requirement("peft>=0.19")]
    monkeypatch.setattr(machine, "needed", lambda extra="": [] if extra else needs)
    found = list(machine.packages(HERE, {"trl": "1.14.0", "torch": "2.12.0+cu128"}.get))
    assert only(found, "trl").level is Level.ERROR and "1.14.0, but trl<1.17,>=1.15" in only(found, "trl").found
    assert only(found, "peft").found.startswith("not installed")
    assert "torch 2.12.0+cu128 (tested: 2.13.0)" in only(found, "versions").found
    assert only(found, "versions").level is Level.WARNING


def test_the_build_of_torch_does_not_matter_to_its_version() -> None:
    pins = machine.tested_set()
    found = machine.packages(HERE, lambda name: pins.get(name) and pins[name] + "+cu128")
    assert only(found, "versions").level is Level.OK


def test_engines_are_optional_but_of_the_tested_version(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not {*machine.ENGINES} & levels(machine.packages(HERE, lambda name: None)).keys()
    monkeypatch.setattr(machine, "needed", lambda extra="": [Requirement(f"{extra}==0.32.0")] if extra else [])
    found = list(machine.packages(HERE, {"vllm": "0.31.0", "unsloth": "0.32.0"}.get))
    assert only(found, "vllm").level is Level.WARNING and "unsloth" not in levels(found)
    assert "0.31.0 (tested: vllm==0.32.0)" in only(found, "vllm").found


# --- GPUs

DRIVER = DriverReport(version="580.65.06", cuda=13000, compute_modes=(0, 0))


def refuse() -> None:
    raise RuntimeError("no kernel\nmore")


@pytest.mark.parametrize(
    ("driver", "env", "level", "words"),
    [
        (DriverReport(version="", cuda=0), {}, Level.OK, "everything runs on the CPU"),
        (DriverReport(version="580.65", cuda=13000), {"CUDA_VISIBLE_DEVICES": ""}, Level.WARNING, "hides them"),
        (DriverReport(version="580.65", cuda=0), {}, Level.ERROR, "it shows no GPU"),
        (DRIVER, {"CUDA_VISIBLE_DEVICES": "4,5"}, Level.OK, "CUDA up to 13.0, CUDA_VISIBLE_DEVICES=4,5"),
    ],
)
def test_presence(driver: DriverReport, env: dict[str, str], level: Level, words: str) -> None:
    finding = gpu.presence(driver, env)
    assert finding.level is level and words in finding.found


@pytest.mark.parametrize(
    ("built_for", "init", "cuda", "words"),
    [
        ("12.8", print, 13000, ""),
        (None, print, 13000, "without CUDA"),
        ("13.0", print, 12080, "the driver runs CUDA up to 12.8"),
        ("12.8", refuse, 13000, "cannot use the GPU: no kernel"),
    ],
)
def test_torch_and_the_driver(built_for: str | None, init: Any, cuda: int, words: str) -> None:
    version, of_torch = SimpleNamespace(cuda=built_for), SimpleNamespace(init=init)
    finding = gpu.torch_fits(cuda, SimpleNamespace(__version__="2.13", version=version, cuda=of_torch))
    assert finding.found.endswith(words) and (finding.level is Level.ERROR) == bool(words)


@pytest.mark.parametrize(
    ("own", "cuda", "wheels", "level", "words"),
    [
        (12080, 13000, "cupy-cuda12x", "ok", "14.2.0, CUDA 12.8, as torch"),
        (0, 13000, "", "warning", "through host memory"),
        (13000, 12080, "cupy-cuda13x", "error", "14.2.0 is for CUDA 13.0, the driver runs up to 12.8"),
        (13000, 13000, "cupy-cuda13x", "warning", "two CUDAs in a process"),
        (12080, 13000, "cupy-cuda12x cupy-cuda13x", "error", "overwrite each other"),
    ],
)
def test_cupy_torch_and_the_driver(
    own: int, cuda: int, wheels: str, level: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = SimpleNamespace(runtimeGetVersion=lambda: own)
    cupy = SimpleNamespace(__version__="14.2.0", cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", cupy if own else None)
    finding = gpu.cupy_fits(cuda, "12.8", lambda name: "14.2.0" if name in wheels.split() else None)
    assert finding.level == level and words in finding.found


@pytest.mark.parametrize(
    ("free", "runs", "why_not", "level"),
    [
        (79, True, None, Level.OK),
        (79, False, None, Level.ERROR),
        (10, True, None, Level.WARNING),
        (79, True, "WSL has no CUDA IPC", Level.WARNING),
    ],
)
def test_a_gpu_that_is_not_all_there(
    free: int, runs: bool, why_not: str | None, level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(name="H100", major=9, minor=0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: properties)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda index: (free * GB, 80 * GB))
    monkeypatch.setattr("async_grpo_ipc.memory.cuda_runtime.why_not", lambda device: why_not)
    monkeypatch.setattr(gpu, "find_spec", lambda name: name)
    monkeypatch.setattr(gpu, "_runs", lambda index: runs)
    finding = gpu.device(0)
    assert finding.level is level and (why_not or "H100") in finding.found


def test_what_a_process_finds_is_said_and_so_is_its_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = probe.ChildFailed("was killed by SIGSEGV", ["Fault"])
    monkeypatch.setattr(gpu, "driver", lambda: DRIVER)
    monkeypatch.setattr(probe, "ask", Mock(side_effect=[[asdict(ok("GPU 0", "H100"))], failure]))
    monkeypatch.setattr(gpu, "weight_sharing", lambda names: [ok("weights", *names)])
    assert [*gpu.torch_and_weights(HERE)] == [ok("GPU 0", "H100"), ok("weights", "cuda:0")]
    [finding] = gpu.torch_and_weights(HERE)
    assert finding.level is Level.ERROR and "killed by SIGSEGV: Fault" in finding.found


@pytest.mark.parametrize(("mode", "level"), [(3, Level.WARNING), (2, Level.ERROR)])
def test_a_gpu_that_does_not_admit_several_processes_is_named(mode: int, level: Level) -> None:
    driver = DriverReport(version="580", cuda=13000, compute_modes=(0, mode))
    [found] = gpu.modes(driver, {})
    assert (found.subject, found.level) == ("GPU 1", level)
    assert "nvidia-smi -i 1 -c DEFAULT" in found.fix
    [found] = gpu.modes(driver, {"CUDA_VISIBLE_DEVICES": "4,GPU-5f"})
    assert "nvidia-smi -i GPU-5f -c DEFAULT" in found.fix, "which has numbers of its own"


@pytest.mark.parametrize(
    ("made", "names", "mode", "words"),
    [
        ([], [], 0, "not possible: nvidia-cuda-mps-control is not installed"),
        (["bin/nvidia-cuda-mps-control"], [], 0, "possible, no daemon runs"),
        (["bin/nvidia-cuda-mps-control", ".dockerenv"], [], 0, "possible for processes of this container, no daemon"),
        (["bin/nvidia-cuda-mps-control"], [], 2, "not possible on a GPU in prohibited mode"),
        (["bin/nvidia-cuda-mps-control"], [None, "nvidia-cuda-mps-control"], 0, "a daemon runs already"),
        (["tmp/nvidia-mps/control"], ["bash"], 0, "/tmp/nvidia-mps is a daemon's, which runs in another container"),
    ],
)
def test_whether_mps_is_possible(
    made: list[str], names: list[str | None], mode: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in map(tmp_path.joinpath, made):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o755)
    running = [SimpleNamespace(info={"name": name, "status": "sleeping"}) for name in names]
    running.append(SimpleNamespace(info={"name": "nvidia-cuda-mps-control", "status": "zombie"}))
    monkeypatch.setattr(gpu.psutil, "process_iter", lambda attributes: running)
    driver = DriverReport(version="580", cuda=13000, compute_modes=(0, mode))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    found = gpu.mps(driver, {}, tmp_path)
    assert found.level is Level.OK and words in found.found and "set CUDA" not in found.found


def test_where_mps_may_not_write_its_folders_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-cuda-mps-control").touch(mode=0o755)
    (tmp_path / "var/log").mkdir(parents=True)
    access = os.access  # root may write everywhere
    monkeypatch.setattr(os, "access", lambda path, mode: "log" not in str(path) and access(path, mode))
    monkeypatch.setattr(gpu.psutil, "process_iter", lambda attributes: [])
    monkeypatch.setenv("PATH", str(tmp_path))
    found = gpu.mps(DRIVER, {}, tmp_path).found
    assert f"without the right to write to {tmp_path}/var/log/nvidia-mps, set CUDA_MPS_PIPE_DIRECTORY and" in found


# --- weights between processes

MEASURED = {"memory": "cuda", "read_gbps": 1500.0, "equal": True}


@pytest.mark.parametrize(
    ("changes", "level"), [({}, Level.OK), ({"equal": False}, Level.ERROR), ({"memory": "posix"}, Level.WARNING)]
)
def test_what_a_round_trip_means(changes: dict[str, Any], level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_measure", lambda writer, reader, way: {**MEASURED, **changes})
    monkeypatch.setattr(gpu, "why_unreachable", lambda *_: None)
    [finding] = gpu.weight_sharing(["cuda:0"])
    assert finding.level is level


def test_a_real_round_trip() -> None:
    [finding] = gpu.weight_sharing(["cpu"])
    assert finding.level is Level.OK and "by shared host memory: every value arrived" in finding.found


def test_a_round_trip_that_fails_is_a_line_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "ask", Mock(side_effect=probe.ChildFailed("ended with 1", ["no device nowhere"])))
    [finding] = gpu.weight_sharing(["nowhere"])
    assert finding.level is Level.ERROR and "nowhere" in finding.found


def test_writer_and_reader_see_their_own_gpu_alone_as_server_and_worker_do(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[dict[str, Any], str]] = []

    def ask(module: str, question: dict[str, Any], *, timeout_s: float, env: dict[str, str]) -> dict[str, Any]:
        asked.append((question, env["CUDA_VISIBLE_DEVICES"]))
        return {"equal": True, "read_gbps": 1.0, "memory": "cuda"}

    monkeypatch.setattr(probe, "ask", ask)
    monkeypatch.setattr(gpu, "why_unreachable", lambda *_: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert [finding.level for finding in gpu.weight_sharing(["cuda:0", "cuda:1"])] == [Level.OK] * 2
    assert [(question["reader_sees"], sees) for question, sees in asked] == [
        ({"CUDA_VISIBLE_DEVICES": "4"}, "4"),
        ({"CUDA_VISIBLE_DEVICES": "5"}, "4"),
    ]
    assert {(question["writer"], question["reader"]) for question, _ in asked} == {("cuda:0", "cuda:0")}


def test_gpus_that_are_no_peers_are_tried_in_the_way_that_a_run_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--weights auto` goes through host memory there, so it is no error that CUDA IPC does not work."""

    def ask(module: str, question: dict[str, Any], **_: Any) -> dict[str, Any]:
        if question["way"] != "host":
            raise probe.ChildFailed("ended with 1", ["cudaErrorPeerAccessUnsupported"])
        return {"equal": True, "read_gbps": 1.0, "memory": "posix"}

    monkeypatch.setattr(probe, "ask", ask)
    monkeypatch.setattr(gpu, "why_unreachable", lambda *_: "GPU 1 cannot map memory of GPU 0 (no peers)")
    for found in gpu.weight_sharing(["cuda:0", "cuda:1"]):
        assert found.level is Level.WARNING, "the server's own GPU is tried as well"
        assert "every value arrived" in found.found and "GPU 1 cannot map memory of GPU 0" in found.found


# --- a setup file


FP32 = replace(facts().parameters, dtypes={"float32": 4_000_000})


def judged(look: Look, gpus: int = 0, memory: int = 20 * GB) -> list[Finding]:
    return list(setup_check.judge(look, gpus, memory))


def test_a_trainer_with_nothing_to_complain_of() -> None:
    found = judged(Look(facts=facts()), gpus=2)
    assert set(levels(found).values()) == {"ok"}, found


def test_a_batch_that_trl_refuses_comes_with_numbers_that_it_takes() -> None:
    [finding] = judged(Look(error="ValueError", exit_code=2, batch=batch(8, group=3, passes=2)))
    assert finding.level is Level.ERROR
    assert finding.found.startswith("a generation batch of 16 completions")
    assert "num_generations=" in finding.fix and "per_device_train_batch_size=9" in finding.fix


@pytest.mark.parametrize(
    ("changes", "gpus", "subject", "level", "words"),
    [
        ({"dataset_rows": 0, "epoch_rounds": 0}, 1, "dataset", "error", "fewer than the 1 prompts"),
        ({"end_token": None}, 1, "tokenizer", "error", "no end-of-text"),
        ({"padding_token": None}, 1, "tokenizer", "error", "no padding"),
        ({"context_length": 300}, 1, "lengths", "error", "more than the model's context of 300"),
        ({"precision": "fp32", "parameters": FP32}, 1, "precision", "warning", "slower than bf16"),
        ({"parameters": replace(FP32, trained=0)}, 1, "get_trainer()", "error", "none of which is trained"),
        ({"save_strategy": "no"}, 1, "checkpoints", "warning", "none are saved"),
        ({"batch": batch(8, num_iterations=8)}, 1, "staleness", "warning", "8 optimizer steps"),
    ],
)
def test_what_is_wrong_with_a_trainer(changes: dict[str, Any], gpus: int, subject: str, level: str, words: str) -> None:
    finding = only(judged(Look(facts=facts(**changes)), gpus), subject)
    assert finding.level == level and words in finding.found


def test_too_little_memory_for_the_model() -> None:
    assert only(judged(Look(facts=facts()), memory=1_000_000), "model memory").level is Level.ERROR


def test_what_cannot_run_distributed_is_told_beside_the_rest() -> None:
    found = judged(Look(facts=facts(), error="use_vllm=True starts vLLM inside.", exit_code=2), gpus=1)
    assert only(found, "distributed").level is Level.ERROR
    assert only(found, "batch").level is Level.OK


@pytest.mark.integration
def test_trls_own_refusal_of_a_batch_is_understood(tmp_path: Path) -> None:
    config = tmp_path / "setup.py"
    config.write_text(
        "from trl import GRPOConfig\n"
        "def get_trainer():\n"
        "    return GRPOConfig(output_dir='x', use_cpu=True, bf16=False, per_device_train_batch_size=4,\n"
        "                      gradient_accumulation_steps=2, num_generations=3)\n"
    )
    [finding] = setup_check.setup_file(Asked(tmp_path, config=config))
    assert finding.subject == "batch"
    assert "8 completions (per_device_train_batch_size=4 * steps_per_generation=2)" in finding.found
    assert "num_generations=2; num_generations=4; per_device_train_batch_size=6" in finding.fix


def test_a_file_that_is_no_setup_file(tmp_path: Path) -> None:
    [finding] = setup_check.setup_file(Asked(tmp_path, config=tmp_path / "missing.py"))
    assert finding.level is Level.ERROR and "not found" in finding.found


@pytest.mark.parametrize(("gpus", "sharing"), [(0, 2), (1, 1), (2, 0), (8, 0)])
def test_the_doctor_counts_the_memory_of_the_run_that_this_machine_would_start(
    gpus: int, sharing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers on a CPU, one on the only GPU, none beside a server that has a GPU of its own: `-n` without a number.

    Of an unknown number, versions would be counted for as many readers as the staleness bound lets there be.
    """
    asked: list[int | None] = []

    def look(question: Question, timeout_s: float) -> Look:
        asked.append(question.plan.workers_sharing)
        return Look(facts=facts())

    config = tmp_path / "setup.py"
    config.write_text("def get_trainer(): ...\n")
    monkeypatch.setattr(setup_check, "look_at_trainer", look)
    monkeypatch.setattr(setup_check, "driver", lambda: replace(DRIVER, compute_modes=(0,) * gpus))
    list(setup_check.setup_file(Asked(tmp_path, config=config)))
    assert asked == [sharing]


# --- the command


@pytest.mark.parametrize(
    ("found", "code"), [([ok("a", "b")], 0), ([warning("a", "b", "c")], 0), ([ok("a", "b"), error("a", "b", "c")], 1)]
)
def test_only_errors_fail_the_command(
    found: list[Finding], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkup, "CHECKS", [lambda asked: iter(found)])
    assert main(["doctor", "--json"]) == code
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] == (code == 0)
    assert [entry["level"] for entry in report["findings"]] == [str(finding.level) for finding in found]
    assert main(["doctor"]) == code
    shown = capsys.readouterr().out
    assert all(finding.found in shown and finding.fix in shown for finding in found)
    assert ("a run can start" in shown) == (code == 0)


def test_lines_fold_beneath_themselves() -> None:
    shown = finding.line(warning("memory", "word " * 40, "do this"), width=80).splitlines()
    assert shown[0].startswith("warning  memory         word")
    assert all(row.startswith(" " * 24) for row in shown[1:]) and all(len(row) <= 80 for row in shown)
    assert shown[-1].strip() == "-> do this"
