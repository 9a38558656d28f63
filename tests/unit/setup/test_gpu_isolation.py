"""A process is held to its device before the CUDA driver is initialised in it, and never afterwards."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from async_grpo.cli import main
from async_grpo.errors import UsageError
from async_grpo.launch.placement import choose_weights
from async_grpo.rundir.run_plan import RunPlan
from async_grpo.setup import devices

HERE = Path(__file__).parent
SRC = HERE.parents[2] / "src"


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libcuda.so.1 that writes down the environment at each `cuInit`."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) for the stand-in of libcuda")
    folder = tmp_path_factory.mktemp("stub")
    source = HERE / "cuda_stub" / "libcuda.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), str(source)], check=True)
    return folder


@pytest.fixture
def environment(stub: Path, tmp_path: Path) -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("CUDA")},
        "LD_LIBRARY_PATH": str(stub),
        "PYTHONPATH": str(SRC),
        "STUB_GPUS": "8",
        "STUB_LOG": str(tmp_path / "cuinit.log"),
    }


def test_every_role_is_initialised_with_its_own_gpu_only(environment: dict[str, str], tmp_path: Path) -> None:
    environment["CUDA_VISIBLE_DEVICES"] = "4,5,6"
    command = [sys.executable, str(HERE / "gpu_roles.py"), str(tmp_path / "setup.py")]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    roles = json.loads(ran.stdout.splitlines()[-1])
    seen: dict[str, list[str]] = {}
    for line in Path(environment["STUB_LOG"]).read_text().splitlines():
        pid, _, visible = line.partition(" ")
        seen.setdefault(pid, []).append(visible)
    assert len(roles) == 8
    for pid, (command_name, device) in roles.items():
        assert seen[pid] == ["" if device == "cpu" else "5"], (
            f"{command_name} --device {device} initialised CUDA with {seen[pid]}"
        )


def test_gpus_are_counted_without_initialising_the_driver_here(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**environment, "STUB_MODE": "3", "CUDA_VISIBLE_DEVICES": "2,3"}.items():
        monkeypatch.setenv(name, value)
    devices._compute_modes.cache_clear()
    assert devices.compute_modes() == [3, 3]
    assert devices.visible_gpus() == 2
    assert str(os.getpid()) not in Path(environment["STUB_LOG"]).read_text()
    devices._compute_modes.cache_clear()


def test_peers_are_tried_by_processes_that_see_what_the_roles_see(environment: dict[str, str]) -> None:
    environment["CUDA_VISIBLE_DEVICES"] = "4,5,6"
    assert devices.why_unreachable("0", ["1", "2"], environment) is None
    assert sorted(line.split()[1] for line in Path(environment["STUB_LOG"]).read_text().splitlines()) == ["4", "5", "6"]
    why = devices.why_unreachable("0", ["0", "1"], {**environment, "STUB_NO_PEER": "1"})
    assert why == "GPU 1 cannot map memory of GPU 0 (cuIpcOpenMemHandle_v2: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED)"


def test_where_nobody_reads_on_a_gpu_nothing_is_tried() -> None:
    assert devices.why_unreachable("0", [], {}) is None
    assert devices.why_unreachable("cpu", ["cpu", "cpu"], {}) is None


def test_the_servers_own_gpu_is_tried_where_a_worker_is_on_it(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A handle can be had, and no other process can open it: the worker would refuse, and the run would end."""
    for name, value in {**environment, "CUDA_VISIBLE_DEVICES": "4,5", "STUB_NO_OPEN": "1"}.items():
        monkeypatch.setenv(name, value)
    assert choose_weights("auto", "0", ("0", "0")) == "host"
    why = "another process on GPU 0 cannot map memory of GPU 0 (cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_CONTEXT)"
    assert why in capsys.readouterr().err
    assert [line.split()[1] for line in Path(environment["STUB_LOG"]).read_text().splitlines()] == ["4", "4"]
    monkeypatch.delenv("STUB_NO_OPEN")
    assert choose_weights("auto", "0", ("0", "0")) == "auto"


def test_a_run_whose_workers_cannot_reach_the_server_publishes_in_host_memory(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {**environment, "STUB_NO_PEER": "1"}.items():
        monkeypatch.setenv(name, value)
    assert choose_weights("auto", "0", ("1", "2")) == "host"
    assert "GPU 1 cannot map memory of GPU 0" in capsys.readouterr().err
    assert choose_weights("auto", "0", ("0",)) == "auto"
    assert choose_weights("auto", "0", ("0",), "2,3") == "host", "the vLLM server reads there"
    assert "the vLLM server's GPU 3 cannot map memory of GPU 0" in capsys.readouterr().err
    assert choose_weights("ipc", "0", ("1",)) == "ipc", "as the user says"
    monkeypatch.delenv("STUB_NO_PEER")
    assert choose_weights("auto", "0", ("1", "2")) == "auto"


def test_the_gpus_of_a_vllm_server_are_tried_as_well(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # a command that an earlier test called may have set it
    for name, value in {**environment, "STUB_NO_PEER": "1"}.items():
        monkeypatch.setenv(name, value)
    devices._compute_modes.cache_clear()
    launched: list[RunPlan] = []
    monkeypatch.setattr("async_grpo.launch.launcher.launch", lambda root, plan: launched.append(plan) or 0)
    monkeypatch.setattr("async_grpo.cli.compute.train.choose_generator", lambda *_, **__: "vllm-server")
    (tmp_path / "setup.py").write_text("def get_trainer(): ...")
    of_server = ["--generator", "vllm-server", "--server-devices", "2,3", "--worker-device-ids", "0"]
    main(["train", str(tmp_path / "setup.py"), "--run-dir", str(tmp_path / "run"), *of_server])
    devices._compute_modes.cache_clear()
    assert [(plan.weights, plan.training.weights) for plan in launched] == [("host", "auto")], "a resume looks again"


def test_ipc_is_refused_for_a_server_on_the_cpu() -> None:
    with pytest.raises(UsageError, match="--weights ipc shares memory of a GPU, and the server is on the CPU"):
        devices.check_weights("ipc", "cpu")
