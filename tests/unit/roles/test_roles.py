"""The processes of a run and of `evaluate`: the parameter server, its workers, and the evaluator."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from async_grpo.errors import AsyncGRPOError, QueueError, RunDirError, UnsupportedError, UsageError, WeightsError
from async_grpo.evals.estimators import Answers
from async_grpo.evals.eval_ledger import Evaluated, evaluated, read
from async_grpo.queue import ServerQueue, WorkerQueue
from async_grpo.records import Job
from async_grpo.roles import answering, evaluator, parameter_server, rollout_worker
from async_grpo.roles.answering import load_weights
from async_grpo.roles.parameter_server import ServerOptions, run_parameter_server
from async_grpo.roles.rollout_worker import WorkerOptions, require_same_trainer
from async_grpo.rollout import engine_choice, trl_trainer
from async_grpo.rundir import paths as runs
from async_grpo.rundir.lifecycle import prepare
from async_grpo.rundir.locks import KernelLock, server_lock
from async_grpo.rundir.paths import RUNNING, STOPPED, Accepted, RunDir, RunState
from async_grpo.settings import EVAL_SAMPLING, WorkerSettings
from async_grpo_ipc import AttachError, MismatchError, NoRoomError, open_remote_memory
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
    [("0", {}, ["weights", "engine"]), ("1", {}, ["engine"]), ("0", {"server_devices": "2,3"}, ["engine"])],
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


# --- What a parameter server writes when it ends, and what it leaves alone ---------------------------------------

Serve = Callable[[Callable[..., Any]], str]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Run a server in `tmp_path/worker` that trains as the function given to it does."""
    monkeypatch.setattr(parameter_server, "StopRequest", type("S", (), {"install": lambda self: self}))
    monkeypatch.setattr(parameter_server, "write_stacks_on_signal", lambda path: None)
    options = ServerOptions(run_dir=tmp_path / "worker", plan=planned(tmp_path / "setup.py", steps=30))
    prepare(options.run_dir, options.plan)

    def serve(train: Callable[..., Any]) -> str:
        monkeypatch.setattr(parameter_server, "_train", train)
        return run_parameter_server(options)

    return serve


def test_a_server_that_fails_while_it_loads_says_so_in_its_files(tmp_path: Path, serve: Serve) -> None:
    def fail(*_: object) -> None:
        raise RunDirError("no")

    with pytest.raises(RunDirError):
        serve(fail)
    assert RunDir(tmp_path / "worker").read_state().state == runs.FAILED


def test_a_worker_waits_for_this_servers_weights_and_takes_no_file_of_a_killed_one_for_them(
    tmp_path: Path, serve: Serve
) -> None:
    handle = RunDir(tmp_path / "worker").weights_handle
    handle.write_text("{}")

    def train(*_: object) -> str:
        assert not handle.exists(), "gone before anything is loaded"
        return runs.FINISHED

    assert serve(train) == runs.FINISHED


@pytest.mark.parametrize("reason", [RunDirError("it is of another model"), SystemExit(143)])
def test_a_resume_that_is_refused_or_stopped_while_it_loads_changes_nothing(
    tmp_path: Path, serve: Serve, reason: BaseException
) -> None:
    def refuse(*_: object) -> None:
        assert RunDir(tmp_path / "worker").state_of(None).plan.num_workers == 7, "what the refused run would have"
        raise reason

    run = RunDir(tmp_path / "worker")
    run.update_state(state=runs.FINISHED, step=30)
    run.summary.write_text("of the training")
    before = run.state_file.read_bytes()
    prepare(run.root, planned(Path("other.py"), resume=True, workers=7, steps=50))
    with pytest.raises(type(reason)):
        serve(refuse)
    assert run.state_file.read_bytes() == before
    assert run.summary.read_text() == "of the training"


def test_a_server_whose_directory_another_run_has_now_leaves_that_run_alone(tmp_path: Path, serve: Serve) -> None:
    root = tmp_path / "worker"

    def lose_the_directory(options: object, run: RunDir, state: object, stop: object, lock: KernelLock) -> None:
        (root / "server.lock").unlink()
        lock.release()  # so that this process can be the second server, too
        run.update_state(run_id="another")
        raise QueueError("server.lock was deleted while in use; another process has it now.")

    with pytest.raises(QueueError, match="another process has it now"):
        serve(lose_the_directory)
    state = RunDir(root).read_state()
    assert (state.run_id, state.state) == ("another", runs.RUNNING)
    assert not (root / "summary.json").exists()


def test_a_server_whose_lock_another_server_of_the_same_run_has_writes_nothing(tmp_path: Path, serve: Serve) -> None:
    def lose_the_lock(options: object, run: RunDir, state: object, stop: object, lock: KernelLock) -> None:
        lock.release()
        raise QueueError("lost")

    with pytest.raises(QueueError):
        serve(lose_the_lock)
    assert RunDir(tmp_path / "worker").read_state().state == runs.RUNNING


def test_a_server_whose_directory_is_gone_says_that(serve: Serve) -> None:
    def delete(options: object, run: RunDir, *_: object) -> None:
        shutil.rmtree(run.root)
        (run.root / "queue" / "x").read_bytes()

    with pytest.raises(AsyncGRPOError, match="was renamed or deleted while the run was going on"):
        serve(delete)


# --- The weights that `async-grpo evaluate` publishes ------------------------------------------------------------


def test_of_two_models_the_frozen_weights_are_each_models_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(requires_grad=False)

    def load(trainer: Any, source: str) -> None:
        for parameter in trainer.model.parameters():
            nn.init.constant_(parameter, float(source))

    monkeypatch.setattr(answering, "load_weights", load)
    run = RunDir(tmp_path)
    with answering.PublishedModels(SimpleNamespace(model=model), run, "host") as weights:  # type: ignore[arg-type]
        for version in range(2):
            weights.publish(version, str(version))
            with open_remote_memory(run.weights_handle) as worker, worker.lease() as seen:
                assert [seen[name].flatten()[0].item() for name in ("weight", "bias")] == [version] * 2


OF_HEAD = {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "eta": 0.2}


def samplings(*, guided: bool = True, etas: tuple[Any, ...] = (), **training: Any) -> list[dict[str, Any]]:
    trainer: Any = SimpleNamespace(**({"guidance": SimpleNamespace(sampling=OF_HEAD)} if guided else {}))
    return evaluator._samplings(trainer, replace(planned(Path("setup.py"), **training), etas=etas))


def test_a_guided_evaluation_samples_as_the_head_says_where_the_command_says_nothing() -> None:
    assert samplings(guided=False) == [{"temperature": 0.6, "top_p": 0.95, "top_k": 20}]
    assert samplings() == [OF_HEAD]
    assert samplings(eval_temperature=0.0) == [{**OF_HEAD, "temperature": 0.0}]
    assert samplings(etas=(0.5, "off")) == [{**OF_HEAD, "eta": 0.5}, {**OF_HEAD, "eta": "off"}]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"guided": False, "etas": (0.1,)}, r"--eval-eta: the trainer of \S*setup.py is not guided"),
        ({"eval_top_p": 0.9}, "values are of the untruncated sampler: set top_p to 1"),
        ({"eval_temperature": 1.0}, "--eval-temperature 1.0: the head has values of the sampler at temperature 0.7"),
    ],
)
def test_what_a_guided_evaluation_cannot_do_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        samplings(**asked)


def test_a_file_without_problems_is_told_what_to_add() -> None:
    """As the file of `async-grpo init` is."""
    server: Any = SimpleNamespace(run=None, plan=planned(Path("mine.py")), trainer=SimpleNamespace(eval_dataset=None))
    with pytest.raises(UsageError, match=r"mine\.py has no eval_dataset\. Add eval_dataset=Dataset\.from_list"):
        evaluator._beginning(server)


class Tied(nn.Module):
    """As transformers has it: the input's and the output's embedding may be one."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    @classmethod
    def from_pretrained(cls, source: str, **_: Any) -> tuple[Tied, dict[str, list[str]]]:
        return cls(tied=source == "tied"), {"missing_keys": [], "mismatched_keys": []}


def test_a_checkpoint_with_weights_of_its_own_for_tied_ones_is_refused() -> None:
    trainer: Any = SimpleNamespace(model=Tied(tied=True))
    load_weights(trainer, "tied")
    with pytest.raises(UsageError, match=r"embed\.weight and head\.weight are tied in the setup file's model"):
        load_weights(trainer, "untied")
    untied: Any = SimpleNamespace(model=Tied(tied=False))
    load_weights(untied, "tied")
    assert torch.equal(untied.model.head.weight, untied.model.embed.weight)


class Answered:
    """An evaluation that is over at once."""

    total = 1

    def __init__(self, version: int, replicates: int, problem: int) -> None:
        self.version, self._replicates = version, replicates
        self.answers = {problem: Answers(rewards=[1.0], successes=[True])}

    def wait(self, should_stop: Any) -> bool:
        return True

    def look(self) -> Evaluated:
        about = {"seconds": 1.0, "replicates": self._replicates, "sampling": {}, "first_seq": -1}
        return evaluated(self.answers, {}, ks=(1,), run_id="run-1", step=self.version, **about)


def test_a_resumed_evaluation_tells_what_it_found_now_and_needs_no_common_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where `--eval-replicates` is another one now, or a problem that had failed has its answers."""

    def evaluate(replicates: int) -> None:
        begin = lambda version, sampling: Answered(version, replicates, problem=version)  # noqa: E731
        monkeypatch.setattr(evaluator, "_beginning", lambda server: begin)
        weights = SimpleNamespace(publish=lambda version, model: None)
        of_run = {"run": run, "plan": planned(tmp_path, models=("a", "b")), "state": SimpleNamespace(run_id="run-1")}
        server = SimpleNamespace(**of_run, trainer=object(), weights=weights, should_stop=lambda: False)
        assert evaluator.evaluate_all(server)

    run = RunDir(tmp_path / "evaluation")
    run.root.mkdir()
    evaluate(1)
    evaluate(2)
    assert [(one.step, one.replicates) for one in read(run.evaluations)] == [(0, 2), (1, 2)]
    assert json.loads(run.comparison.read_text()) == {"differences": [{"sampling": EVAL_SAMPLING, "figures": {}}]}


def test_an_adapter_that_is_scaled_otherwise_is_refused(tmp_path: Path) -> None:
    """Its weights have the same names and shapes, so they would be taken and give other figures."""
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8, "lora_alpha": 32}')
    model = SimpleNamespace(peft_config={"default": SimpleNamespace(r=8, lora_alpha=16)})
    with pytest.raises(UsageError, match="another adapter than the setup file's: lora_alpha is 32 there and 16 here"):
        load_weights(SimpleNamespace(model=model), str(tmp_path))  # type: ignore[arg-type]
