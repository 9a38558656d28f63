"""The arithmetic of a plan: batches that fit, steps and rounds, memory by optimizer."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_grpo.archive import output_dir
from async_grpo.checks import probe
from async_grpo.checks.plan import dry_run, trainer_facts
from async_grpo.checks.plan.memory import published_bytes, server_bytes, trainer_bytes, trainer_parts
from async_grpo.checks.plan.trainer_facts import Look, Parameters, Question, look_at_trainer
from async_grpo.errors import RunDirError, UnsupportedError, UsageError
from async_grpo.formatting import size
from async_grpo.rundir.folders import check_folder, nearest_existing
from async_grpo.rundir.paths import STOPPED, RunDir, RunState
from async_grpo.rundir.run_plan import RunPlan
from async_grpo.rundir.shape import as_json, shaped
from async_grpo.settings import ArchiveLimit
from async_grpo.setup.accelerate_config import AccelerateConfig
from async_grpo.setup.grpo_config.batch import Batch, misfit, what_to_set
from async_grpo.training import checkpoints
from async_grpo.training.sharding import DEEPSPEED, FSDP, CheckpointLayout
from kit.plans import planned
from kit.trainer_facts import MILLION, batch, facts
from kit.waiting import is_gone, until


def applied(numbers: Batch, change: str) -> Batch:
    """The numbers after a change that `what_to_set` proposes, as TRL would derive them."""
    name, _, value = change.replace("num_processes", "processes").partition("=")
    changed = replace(numbers, **{name: int(value)})
    if name == "gradient_accumulation_steps":
        changed = replace(changed, steps_per_generation=int(value))
    whole = changed.per_device_train_batch_size * changed.processes * changed.steps_per_generation
    return replace(changed, generation_batch_size=whole)


# --- batches


@pytest.mark.parametrize(
    "numbers",
    [
        batch(8, group=3),
        batch(1, group=8),
        batch(4, group=6, passes=2, gradient_accumulation_steps=8),
        batch(4, group=3, processes=4, machines=2),
        batch(1, group=2),
    ],
)
def test_every_proposed_change_alone_makes_the_numbers_fit(numbers: Batch) -> None:
    assert "not divisible" in misfit(numbers)
    proposals = what_to_set(numbers)
    assert any("num_generations" in text for text in proposals) or numbers.generation_batch_size == 1
    assert any("per_device_train_batch_size" in text for text in proposals)
    assert any("num_processes" in text for text in proposals) is (numbers.processes > 1)
    for changed in (applied(numbers, change) for change in proposals):
        assert (misfit(changed), changed.processes % changed.machines) == ("", 0)


def test_a_group_of_one_is_no_group() -> None:
    assert "at least 2" in misfit(batch(8, group=1))
    assert what_to_set(batch(8, group=1)) == ["num_generations=2"]


@pytest.mark.parametrize(
    ("numbers", "limits", "steps", "rounds"),
    [
        (batch(8), {"max_steps": 12, "epochs": 3.0, "epoch_rounds": 64}, 12, 12),
        (batch(8), {"max_steps": -1, "epochs": 3.0, "epoch_rounds": 64}, 192, 192),
        (batch(8, passes=4, num_iterations=2), {"max_steps": 12, "epochs": 1.0, "epoch_rounds": 16}, 12, 6),
        (batch(8, passes=4), {"max_steps": -1, "epochs": 0.5, "epoch_rounds": 16}, 8, 8),
        (batch(8), {"max_steps": -1, "epochs": 1.0, "epoch_rounds": None}, None, None),
    ],
)
def test_steps_and_rounds(numbers: Batch, limits: dict[str, Any], steps: int | None, rounds: int | None) -> None:
    of = facts(batch=numbers, **limits)
    assert (of.steps, of.rounds) == (steps, rounds)


# --- memory


@pytest.mark.parametrize(
    ("optimizer", "nbytes"),
    [
        ("adamw_torch", 4 * MILLION),
        ("paged_adamw_32bit", 8 * MILLION),
        ("adamw_8bit", 2 * MILLION + 2 * (4 * MILLION // 256)),
        ("adafactor", 0),
        ("sgd", 0),
        ("an_optimizer_of_tomorrow", 4 * MILLION),
    ],
)
def test_the_optimizer_named_decides_its_memory(optimizer: str, nbytes: int) -> None:
    assert trainer_parts(facts(optimizer=optimizer))["optimizer"] == nbytes


ADAPTER = Parameters(count=MILLION, trained=10_000, nbytes=4 * MILLION, trained_bytes=40_000, dtypes={"float32": 1})


@pytest.mark.parametrize(
    ("changes", "published", "server"),
    [
        ({}, 3 * 40_000, 4_120_000 + 3 * 40_000),  # the trainer uses the frozen weights that it publishes
        ({"sharded_over": 2}, 3 * 40_000 + 3_960_000, 4_120_000 + 3 * 40_000 + 3_960_000),
        ({"published_in_host_memory": True}, 3 * 40_000 + 3_960_000, 4_120_000),
        ({"published_in_bf16": True}, 3 * 20_000 + 1_980_000, 4_120_000 + 3 * 20_000 + 1_980_000),
    ],
)
def test_frozen_weights_are_held_twice_where_the_trainer_cannot_use_what_it_publishes(
    changes: dict[str, Any], published: int, server: int
) -> None:
    of = facts(parameters=ADAPTER, **changes)
    assert (published_bytes(of), server_bytes(of)) == (published, server)
    assert (trainer_parts(of)["gradients"], trainer_parts(of)["optimizer"]) == (40_000, 80_000)


def test_a_quantised_base_is_published_as_it_is() -> None:
    base = replace(ADAPTER, nbytes=540_000, dtypes={"uint8": 500_000})
    assert published_bytes(facts(parameters=base, published_in_bf16=True)) == 3 * 20_000


def test_a_gradient_of_each_task_is_counted_beside_that_of_the_model() -> None:
    without, of = (facts(parameters=ADAPTER, gradients_besides=tasks) for tasks in (0, 3))
    assert trainer_bytes(of) - trainer_bytes(without) == trainer_parts(of)["gradients of each task"] == 3 * 40_000
    assert server_bytes(of) - server_bytes(without) == 3 * 40_000


def test_a_critic_is_counted_in_fp32_with_its_optimizer() -> None:
    without, of = facts(), facts(trained_besides=MILLION)
    assert trainer_bytes(of) - trainer_bytes(without) == server_bytes(of) - server_bytes(without) == 16 * MILLION
    assert dry_run._parts(of).endswith("optimizer 4.0 MB, critic with its optimizer 16.0 MB")
    assert "critic" not in dry_run._parts(without)


def test_sizes_are_readable() -> None:
    assert [size(n) for n in (0, 999, 1500, 2.5e6, 7e9)] == ["0 bytes", "999 bytes", "1.5 kB", "2.5 MB", "7.0 GB"]


# --- the child that builds the trainer


def question(config: Path, **changes: Any) -> Question:
    return Question(plan=planned(config, **changes))


def test_a_question_survives_json(tmp_path: Path) -> None:
    asked = question(tmp_path / "setup.py", steps=3, keep_done=ArchiveLimit(5), accelerate_config=tmp_path, workers=2)
    asked = replace(asked, run_dir=tmp_path, eval_every=3)
    assert shaped(Question, json.loads(json.dumps(as_json(asked)))) == asked


def test_a_setup_file_that_kills_its_process_is_a_sentence(tmp_path: Path) -> None:
    config = tmp_path / "setup.py"
    config.write_text(
        f"import os\nprint('loading', flush=True)\nos.kill(os.getpid(), {signal.SIGKILL:d})\nget_trainer = 1"
    )
    look = look_at_trainer(question(config))
    assert look.facts is None
    assert "was killed by SIGKILL" in look.error and "memory" in look.error and "loading" in look.error


def test_a_setup_file_that_never_returns_is_a_sentence_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = tmp_path / "python"  # in place of the interpreter, which would take long to import what get_trainer needs
    hangs.write_text(f"#!/bin/sh\nsleep 1000 &\necho $$ $! > {tmp_path}/pids\nsleep 1000\n")
    hangs.chmod(0o700)
    monkeypatch.setattr(probe, "sys", SimpleNamespace(executable=str(hangs)))
    started = tmp_path / "pids"
    pids: list[str] = []

    def time_is_up(*_):
        """Let its time end once both processes are there."""
        pids.extend(until(lambda: started.exists() and len(found := started.read_text().split()) == 2 and found))
        return False

    monkeypatch.setattr(probe, "within", time_is_up)
    assert "did not answer in 5 s" in look_at_trainer(question(tmp_path / "setup.py"), timeout_s=5).error
    until(lambda: all(is_gone(int(pid)) for pid in pids))  # killed, but not our children, so nobody can wait for them


def test_what_a_setup_file_started_does_not_outlive_the_look_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    returns = tmp_path / "python"
    returns.write_text(f"#!/bin/sh\nsleep 1000 &\necho $! > {tmp_path}/pid\nexit 3\n")
    returns.chmod(0o700)
    monkeypatch.setattr(probe, "sys", SimpleNamespace(executable=str(returns)))
    assert "ended with exit code 3" in look_at_trainer(question(tmp_path / "setup.py")).error
    until(lambda: is_gone(int((tmp_path / "pid").read_text())))


# --- the plan


def of_gpus(root: Path, **changes: Any) -> RunPlan:
    return planned(root / "setup.py", **{"master_device": "0", "worker_devices": ("0", "1", "1"), **changes})


@pytest.mark.parametrize(
    ("generator", "engine", "beside_the_server"),
    [("vllm", "vLLM", "1 worker on GPU 0: 2.0 MB each"), ("hf", "transformers", "1 worker on GPU 0: no weights of")],
)
def test_the_plan_of_gpus(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    generator: str,
    engine: str,
    beside_the_server: str,
) -> None:
    look = Look(facts=facts(generator=generator, parts="each of the 2"))
    monkeypatch.setattr(dry_run, "look_at_trainer", lambda *_, **__: look)
    dry_run.plan_distributed(tmp_path / "worker", of_gpus(tmp_path, train_of_group=2, filter_zero_variance=True))
    text = capsys.readouterr().out
    for expected in (
        "1 parameter server and 3 workers",
        "server on GPU 0",
        f"{engine}, in the workers; up to 256 tokens a completion",
        "correction     bypass: the ratio is clipped around the policy that sampled, groups with equal rewards are "
        "replaced, 2 completions of each group are trained on\n",
        "worker 3 on GPU 1",
        "1 prompt x 8 completions = 8 a round",
        "step           each of the 2\n",
        "100 optimizer steps = 100 rounds = 800 completions; 1.6 epochs of 64 prompts",
        "server, on GPU 0: 14.0 MB",
        "weights 2.0 MB, gradients 2.0 MB, optimizer 4.0 MB, published for the workers 6.0 MB (3 versions of 2.0 MB)",
        beside_the_server,
        "2 workers on GPU 1: 2.0 MB each",
        "not counted in the memory above: activations",
        "Nothing was started",
    ):
        assert expected in text, expected
    assert list(tmp_path.iterdir()) == []


def test_workers_that_have_no_room_are_refused_and_many_for_few_cores_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match=r"There is room for .* at most"):
        dry_run.plan_distributed(tmp_path / "worker", of_gpus(tmp_path, worker_devices=("1",) * 10**6))
    monkeypatch.setattr(dry_run, "look_at_trainer", lambda *_, **__: Look(facts=facts()))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    dry_run.plan_distributed(tmp_path / "worker", of_gpus(tmp_path))
    assert "3 workers and the server share 2 cores, so each has less than one" in capsys.readouterr().out


def test_a_folder_where_no_queue_can_be_is_refused_as_at_the_start(tmp_path: Path) -> None:
    root = tmp_path / "worker"
    check_folder(root)
    root.mkdir(mode=0o700)
    root.chmod(0o777)
    with pytest.raises(RunDirError):
        dry_run.plan_distributed(tmp_path / "worker", of_gpus(tmp_path))
    assert nearest_existing(tmp_path / "a" / "b") == tmp_path


# --- What a dry run says of a trainer in several processes, which it builds in one: ------------------------------

EXAMPLES = Path(__file__).parents[3] / "examples" / "accelerate"


def ranks(name: str | None) -> AccelerateConfig:
    return AccelerateConfig() if name is None else AccelerateConfig.read(EXAMPLES / f"{name}.yaml")


def trainer(**args: Any) -> Any:
    settings = SimpleNamespace(output_dir="out", world_size=2, fsdp=None, **args)
    return SimpleNamespace(args=settings, is_deepspeed_enabled=False, is_fsdp_enabled=False)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("zero3", CheckpointLayout(DEEPSPEED, 2)),
        ("fsdp2", CheckpointLayout(FSDP)),
        ("ddp", CheckpointLayout("")),
        (None, CheckpointLayout("")),
    ],
)
def test_a_resume_needs_a_checkpoint_of_its_own_kind_of_sharding(
    name: str | None, layout: CheckpointLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which ones are refused: tests/unit/training/test_sharding.py."""
    (tmp_path / "run").mkdir()
    RunDir(tmp_path / "run").write_state(RunState(run_id="r", state=STOPPED, plan=planned(), started=""))
    found = SimpleNamespace(path=tmp_path / "out" / "checkpoint-2", state=SimpleNamespace(passes_done=0))
    checked: list[Any] = []
    monkeypatch.setattr(output_dir, "find_checkpoint", lambda *given: found)
    monkeypatch.setattr(checkpoints, "refuse_another_model", lambda *given: None)
    monkeypatch.setattr(checkpoints, "check_layout", lambda *given: checked.append(given))
    question = Question(plan=planned(tmp_path / "c.py", resume=True), run_dir=tmp_path / "run")
    assert trainer_facts._checkpoints(trainer(), question, ranks(name))["resumes_from"] == str(found.path)
    assert checked == [(found.path, layout)]


@pytest.mark.parametrize(("name", "over"), [("ddp", 1), ("fsdp2", 2), ("zero3", 2)])
def test_over_how_many_processes_the_weights_are_shared(name: str, over: int) -> None:
    assert ranks(name).sharded_over == over


def test_fsdp_of_version_1_is_refused_where_nothing_else_says_2(tmp_path: Path) -> None:
    text = (EXAMPLES / "fsdp2.yaml").read_text()
    (tmp_path / "fsdp1.yaml").write_text(text.replace("fsdp_version: 2", "fsdp_version: 1"))
    first = AccelerateConfig.read(tmp_path / "fsdp1.yaml")
    with pytest.raises(UnsupportedError, match="FSDP of version 1 cannot run distributed"):
        trainer_facts._refuse_first_fsdp(first, trainer())
    trainer_facts._refuse_first_fsdp(ranks("fsdp2"), trainer())
