"""On which devices the processes of a run are, and what a process finds in its environment."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_grpo.cli import options
from async_grpo.cli.compute import server as server_command
from async_grpo.cli.compute import train as train_command
from async_grpo.cli.compute import worker as worker_command
from async_grpo.errors import UsageError
from async_grpo.launch.placement import plan_devices
from async_grpo.roles import parameter_server, rollout_worker
from async_grpo.rundir.lifecycle import prepare
from async_grpo.setup import process
from kit.plans import planned

SeeGpus = Callable[[int], None]
Asked = tuple[str | None, str | None, int | None]  # master, workers, their number


@pytest.mark.parametrize(
    ("gpus", "asked", "plan"),
    [
        (0, (None, None, None), ("cpu", ["cpu", "cpu"])),
        (0, ("cpu", "cpu", None), ("cpu", ["cpu"])),
        (1, (None, None, None), ("0", ["0"])),
        (4, (None, None, None), ("0", ["1", "2", "3"])),
        (4, ("02", None, None), ("2", ["0", "1", "3"])),
        (4, (None, None, 2), ("0", ["1", "2"])),
        (3, (None, None, 4), ("0", ["1", "2", "1", "2"])),
        (4, (None, "1, 3", None), ("0", ["1", "3"])),
        (4, ("3", "3,3,0", 3), ("3", ["3", "3", "0"])),
        (4, ("cpu", None, None), ("cpu", ["cpu", "cpu"])),
    ],
)
def test_the_plan_of_devices(gpus: int, asked: Asked, plan: tuple[str, list[str]], see_gpus: SeeGpus) -> None:
    see_gpus(gpus)
    assert plan_devices(*asked) == (plan[0], tuple(plan[1]))


@pytest.mark.parametrize(
    ("gpus", "asked", "message"),
    [
        (0, ("0", None, None), "no CUDA GPU is visible"),
        (0, (None, "1", None), "no CUDA GPU is visible"),
        (2, ("2", None, None), "There is no GPU 2: 2 visible"),
        (2, (None, "1,2", None), "There is no GPU 2: 2 visible"),
        (2, (None, "1,,0", None), "got ''"),
        (2, (None, "1;0", None), "got '1;0'"),
        (2, (None, "0,1", 3), "--num-workers 3 does not fit --worker-device-ids 0,1"),
    ],
)
def test_plans_that_do_not_add_up(gpus: int, asked: Asked, message: str, see_gpus: SeeGpus) -> None:
    see_gpus(gpus)
    with pytest.raises(UsageError, match=message):
        plan_devices(*asked)


@pytest.mark.parametrize(
    ("given", "refused"),
    [([], True), (["-n", "2"], True), (["--worker-device-ids", "2,3"], False), (["-n", "0"], False)],
)
def test_the_gpus_that_several_ranks_leave_to_local_workers_are_named(
    given: list[str], refused: bool, tmp_path: Path, see_gpus: SeeGpus
) -> None:
    """Without a local worker (they are all on other machines) there is nothing to name."""
    see_gpus(4)
    (tmp_path / "ddp.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 2\ngpu_ids: 0,1\n")
    arguments = ["setup.py", "--ray", "auto", "--accelerate-config", str(tmp_path / "ddp.yaml"), *given]
    args = train_command.build_parser().parse_args(arguments)
    if refused:
        with pytest.raises(UsageError, match="which are left for the workers: --worker-device-ids"):
            train_command._ranks(args)
    else:
        assert train_command._ranks(args).processes == 2


@pytest.fixture
def worker_begun(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], tuple[str, str]]:
    """On which device a worker with these arguments begins, and whether with fast inference."""

    class Begun(Exception): ...  # no error

    def begin(args: argparse.Namespace, device: str, *, fast_inference: str) -> None:
        raise Begun(device, fast_inference)

    def begun(arguments: list[str]) -> tuple[str, str]:
        with monkeypatch.context() as stopped, pytest.raises(Begun) as role:
            stopped.setattr(options, "become_role", begin)
            worker_command.run(worker_command.build_parser().parse_args(arguments))
        return role.value.args

    return begun


@pytest.mark.parametrize(
    ("gpus", "arguments", "environment", "device"),
    [
        (4, [], None, "1"),
        (0, [], None, "cpu"),
        (4, [], "3", "3"),
        (4, ["-d", "2"], "3", "2"),
        (4, ["-d", "cpu"], "3", "cpu"),
    ],
)
def test_the_worker_s_device(
    gpus: int,
    arguments: list[str],
    environment: str | None,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    see_gpus: SeeGpus,
    worker_begun: Any,
) -> None:
    see_gpus(gpus)
    monkeypatch.delenv("WORKER_DEVICE", raising=False)
    if environment is not None:
        monkeypatch.setenv("WORKER_DEVICE", environment)
    assert worker_begun(arguments)[0] == device


@pytest.mark.parametrize(
    ("command", "flags", "device"), [(server_command, [], "2"), (worker_command, ["--id", "2"], "0")]
)
def test_a_process_of_a_launcher_reads_in_the_run_directory_what_it_is_to_do(
    command: Any, flags: list[str], device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(master_device="2", worker_devices=("1", "0"), tool_timeout=7.0, steps=3, log_level="DEBUG")
    prepare(tmp_path / "worker", plan)
    begun: list[Any] = []
    monkeypatch.setattr(options, "become_role", lambda args, device, **_: begun.append((args.log_level, device)))
    monkeypatch.setattr(rollout_worker, "run_worker", begun.append)
    monkeypatch.setattr(parameter_server, "run_parameter_server", begun.append)
    given = ["--run-dir", str(tmp_path / "worker"), "--launched-by", "1", *flags]
    assert command.run(command.build_parser().parse_args(given)) == 0
    (found, role) = begun
    assert found == ("DEBUG", device)
    assert role.plan == plan if command is server_command else (role.worker_id, role.settings) == (2, plan.work)


def test_a_role_leaves_what_the_user_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "set_up_log", lambda level, rank=0: None)
    given = {"OMP_NUM_THREADS": "7", "TOKENIZERS_PARALLELISM": "true", "XLA_PYTHON_CLIENT_PREALLOCATE": "true"}
    given["TORCH_CUDNN_SDPA_DEPRIORITIZED"] = "0"
    for name, value in {**given, "CUDA_VISIBLE_DEVICES": "4,5"}.items():
        monkeypatch.setenv(name, value)
    args = argparse.Namespace(log_level="INFO", launched_by=None)
    options.become_role(args, "1", fast_inference="1")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5"
    options.become_role(args, "cpu", fast_inference="1")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert given.items() <= os.environ.items()


@pytest.mark.parametrize(
    ("installed", "device", "generator", "expected"),
    [
        (("unsloth", "vllm"), "1", None, "1"),
        (("unsloth", "vllm"), "1", "vllm", "1"),
        (("unsloth", "vllm"), "1", "hf", "0"),
        (("unsloth", "vllm"), "cpu", None, "0"),
        (("unsloth",), "1", None, "0"),
        (("vllm",), "1", None, "0"),
    ],
)
def test_a_worker_has_fast_inference_where_unsloth_can_generate_with_vllm(
    monkeypatch: pytest.MonkeyPatch, installed: tuple[str, ...], device: str, generator: str | None, expected: str
) -> None:
    monkeypatch.setattr(worker_command, "installed", lambda package: package in installed)
    assert worker_command._fast_inference(generator, device) == expected


@pytest.mark.parametrize(("given", "worker"), [(None, "0"), ("0", "0"), ("1", "1")])
def test_the_server_never_has_fast_inference_and_a_worker_as_the_user_says(
    monkeypatch: pytest.MonkeyPatch, worker_begun: Any, given: str | None, worker: str
) -> None:
    monkeypatch.setattr(process, "set_up_log", lambda level, rank=0: None)
    monkeypatch.delenv("FAST_INFERENCE", raising=False)
    if given is not None:
        monkeypatch.setenv("FAST_INFERENCE", given)
    assert worker_begun(["-d", "cpu"]) == ("cpu", worker)
    set_by_the_role = "XLA_PYTHON_CLIENT_PREALLOCATE", "TORCH_CUDNN_SDPA_DEPRIORITIZED"
    for name in ("FAST_INFERENCE", "CUDA_VISIBLE_DEVICES", "TOKENIZERS_PARALLELISM", *set_by_the_role):
        monkeypatch.setenv(name, "1")  # so that what the role sets is taken back
    for name in set_by_the_role:
        monkeypatch.delenv(name)
    options.become_role(argparse.Namespace(log_level="INFO", launched_by=None), "cpu", fast_inference="0")
    assert os.environ["FAST_INFERENCE"] == "0"
    assert [os.environ[name] for name in set_by_the_role] == ["false", "1"]
