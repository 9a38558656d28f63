"""How a worker's loop ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from async_grpo.errors import UnsupportedError, WeightsError
from async_grpo.queue import ServerQueue, WorkerQueue
from async_grpo.records import Job
from async_grpo.roles import rollout_worker
from async_grpo.roles.rollout_worker import WorkerOptions, require_same_trainer
from async_grpo.rollout import engine_choice, trl_trainer
from async_grpo.rundir.locks import server_lock
from async_grpo.rundir.paths import RUNNING, STOPPED, Accepted, RunDir, RunState
from async_grpo.settings import WorkerSettings
from async_grpo_ipc import AttachError, MismatchError, NoRoomError
from kit.plans import planned

RUN = "f" * 32


@pytest.mark.parametrize("error", [None, RuntimeError("the engine is broken")], ids=["stopped", "failed"])
def test_jobs_are_handed_back_even_if_the_main_thread_does_not_come_to_its_end(
    error: Exception | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reward that hangs there ends the process, and the jobs of a process that just ends have failed once more."""

    class Ends:
        statistics = SimpleNamespace(report=str)

        def __init__(self, context: Any, engine: Any) -> None: ...

        def run(self) -> None:
            if error is not None:
                raise error

    monkeypatch.setattr(rollout_worker, "Worker", Ends)
    with (
        closing(ServerQueue.open(tmp_path / "q", RUN, watch_workers=False)) as server,
        closing(WorkerQueue.open(server.root, 1, "cpu")) as queue,
    ):
        server.submit(Job(run_id=RUN, seq=0, row={}, num_generations=1, seed=0, born_version=0, min_version=0))
        assert len(queue.claim(1)) == 1
        with nullcontext() if error is None else pytest.raises(RuntimeError, match="broken"):
            rollout_worker._run_worker(None, None, queue)
        assert [file.name for file in (server.root / "queue").iterdir()] == ["0000000000.a00_pending.safetensors"]


@pytest.mark.parametrize(
    ("error", "raised"),
    [(NoRoomError, WeightsError), (AttachError, UnsupportedError), (MismatchError, UnsupportedError)],
)
def test_a_worker_that_found_no_room_is_started_again_and_one_that_can_never_map_ends_the_run(
    error: type[Exception], raised: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("StallReporter", "_begin", "_load", "WorkerQueue", "closing"):
        monkeypatch.setattr(rollout_worker, name, MagicMock())
    monkeypatch.setattr(rollout_worker, "_wait_for_run", lambda run: LOADED)
    monkeypatch.setattr(rollout_worker, "_serve", MagicMock(side_effect=error("why")))
    with pytest.raises(raised, match="The weights could not be adopted"):
        rollout_worker._work(worker_on("0", tmp_path), None)  # type: ignore[arg-type]


def worker_on(gpu: str, run: Path, **settings: Any) -> WorkerOptions:
    return WorkerOptions(run_dir=run, device=gpu, config=run / "setup.py", settings=WorkerSettings(**settings))


@pytest.mark.parametrize(
    ("gpu", "settings", "order"),
    [
        ("0", {}, ["weights", "engine"]),
        ("1", {}, ["engine"]),
        ("cpu", {}, ["engine"]),
        ("0", {"server_devices": "2,3"}, ["engine"]),
    ],
)
def test_an_engine_on_the_servers_gpu_starts_once_the_server_has_its_share(
    gpu: str, settings: dict[str, Any], order: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM takes what is free at its start, and does not start where less is free at its end."""
    done: list[str] = []

    def start(*_: Any, **__: Any) -> None:
        done.append("engine")
        raise KeyError  # enough

    monkeypatch.setattr(rollout_worker, "wait_until", lambda ready, **_: done.append("weights"))
    monkeypatch.setattr(engine_choice, "make_engine", start)
    with pytest.raises(KeyError):
        given = (worker_on(gpu, tmp_path, **settings), RunDir(tmp_path), ON_GPU_0)
        rollout_worker._serve(None, *given, SimpleNamespace(id=1), None)  # type: ignore[arg-type]
    assert done == order


@pytest.mark.parametrize(
    ("gpu", "engine_inside", "order"),
    [
        ("0", "1", ["weights", "locked", "load", "free"]),
        ("0", "0", ["locked", "load", "free"]),
        ("1", "1", ["locked", "load", "free"]),
        ("1", "0", ["load"]),
    ],
)
def test_workers_of_one_gpu_load_one_after_the_other_where_room_is_short(
    gpu: str, engine_inside: str, order: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unsloth starts a vLLM engine while it loads a model with `fast_inference=True`."""
    done: list[str] = []

    @contextmanager
    def alone(*_: Any) -> Iterator[None]:
        done.append("locked")
        yield
        done.append("free")

    def load(*_: Any, policy_on_cpu: bool, alone: Any, **__: Any) -> Any:
        assert policy_on_cpu == (gpu == "0")
        with alone or nullcontext():
            done.append("load")
        return SimpleNamespace(model=nn.Linear(3, 2), accelerator=SimpleNamespace(device=torch.device("cpu")))

    monkeypatch.setenv("FAST_INFERENCE", engine_inside)
    monkeypatch.setattr(rollout_worker, "alone_on_the_gpu", alone)
    monkeypatch.setattr(rollout_worker, "wait_until", lambda ready, **_: done.append("weights"))
    monkeypatch.setattr(rollout_worker, "load_trainer", load)
    monkeypatch.setattr(rollout_worker, "check_overrides", lambda trainer: None)
    monkeypatch.setattr(trl_trainer, "RolloutTrainer", lambda trainer, *states: trainer)
    loaded = rollout_worker._load(worker_on(gpu, tmp_path), RunDir(tmp_path), ON_GPU_0)
    assert done == order
    assert loaded.model.weight.is_meta == (gpu == "0")  # type: ignore[attr-defined]


LOADED = RunState(run_id=RUN, state=RUNNING, started="", plan=planned(Path("/my_trainer.py"), set={"top_k": "3"}))
ON_GPU_0 = replace(LOADED, plan=planned(Path("/my_trainer.py"), master_device="0"))


def resumed_with(config: str = "/my_trainer.py", **options: Any) -> RunState:
    return replace(LOADED, step=9, plan=planned(Path(config), **{"set": {"top_k": "3"}, **options}))


@pytest.mark.parametrize("change", [{"set": {}}, {"config": "/other.py"}, {"publish_dtype": "bf16"}])
def test_a_worker_of_before_does_not_serve_a_run_that_was_resumed_with_another_trainer(change: dict[str, Any]) -> None:
    resumed = resumed_with(**change)
    with pytest.raises(UnsupportedError, match=r"was resumed with another setup file.*Start the worker again"):
        require_same_trainer(LOADED, resumed, own_file=False)
    may_be_refused = replace(resumed, undo=Accepted(STOPPED, LOADED.plan))
    require_same_trainer(LOADED, may_be_refused, own_file=False)


def test_it_serves_one_that_was_resumed_as_it_was() -> None:
    require_same_trainer(LOADED, resumed_with(steps=50), own_file=False)
    require_same_trainer(LOADED, resumed_with("/other.py"), own_file=True)


LAUNCHERS = {"alive": os.getppid(), "dead": os.getpid(), "none": None}  # the pid that a worker is given


@pytest.mark.parametrize(
    ("launcher", "deterministic", "served", "ends"),
    [
        ("dead", True, True, False),  # the server needs it for the groups of this version
        ("dead", True, False, True),
        ("dead", False, True, True),
        ("alive", True, True, True),
        ("none", True, True, True),
    ],
)
def test_a_worker_that_is_asked_to_end_does_so_unless_a_deterministic_run_lost_its_launcher(
    tmp_path: Path, launcher: str, deterministic: bool, served: bool, ends: bool
) -> None:
    options = WorkerOptions(run_dir=tmp_path, device="cpu", settings=WorkerSettings(), launched_by=LAUNCHERS[launcher])
    state = resumed_with(deterministic=deterministic)
    lock = server_lock(tmp_path)
    if served:
        assert lock.try_acquire({})
    for requested in (False, True):
        stop: Any = SimpleNamespace(requested=requested)
        assert rollout_worker._should_stop(options, RunDir(tmp_path), state, stop) == (requested and ends)
    lock.release()
