"""Each option of `train`, in one process and distributed: it arrives where it is used, or is refused."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_grpo.checks.plan.trainer_facts import Question
from async_grpo.cli import main, options
from async_grpo.cli.compute import server, worker
from async_grpo.cli.compute import train as train_command
from async_grpo.rundir.run_plan import RunPlan
from async_grpo.settings import ArchiveLimit, TrainingSettings, WorkerSettings, as_flags
from async_grpo.setup import process
from async_grpo.setup.devices import CPU
from kit.commands import Says

REFUSED = "refused"
HERE = Path("/") / "here"
SERVED = ["--generator", "vllm-server", "--run-dir", str(HERE)]

ROWS: dict[str, tuple[list[str], Any, str, Any]] = {
    # dest: arguments; in one process: what is seen of it; distributed: the attribute, and its value
    "config": ([], ("config", "setup.py"), "plan.config.name", "setup.py"),
    "device": (["--device", "cpu"], ("device", CPU), REFUSED, "--device is for one process"),
    "dry_run": (["--dry-run"], ("planned", True), "planned", True),
    "gpu_memory": (["--dry-run", "--gpu-memory", "40GB"], ("gpu_memory", 40 * 10**9), "gpu_memory", 40 * 10**9),
    "steps": (["--steps", "5"], ("steps", 5), "plan.training.steps", 5),
    "seed": (["--seed", "7"], ("seed", 7), "plan.training.seed", 7),
    "set": (["--set", "beta=0.1"], ("config_values", {"beta": "0.1"}), "plan.training.set", {"beta": "0.1"}),
    "run_name": (["--run-name", "a"], ("run_name", "a"), "plan.training.run_name", "a"),
    "run_group": (["--run-group", "b"], ("run_group", "b"), "plan.training.run_group", "b"),
    "run_tags": (["--run-tags", "c,d"], ("run_tags", ("c", "d")), "plan.training.run_tags", ("c", "d")),
    "run_dir": (["--run-dir", str(HERE)], ("run_dir", HERE), "run_dir", HERE),
    "log_level": (["--log-level", "debug"], ("log_level", "DEBUG"), "plan.launch.log_level", "DEBUG"),
    "eval_every": (["--eval-every", "3"], ("eval_every", 3), "plan.training.eval_every", 3),
    "generator": (SERVED, ("server", (HERE, None)), "plan.work.generator", "vllm-server"),
    "server_devices": (["--server-devices=1,2", *SERVED], ("server", (HERE, "1,2")), "plan.work.server_devices", "1,2"),
    "server_timeout": (["--server-timeout=60", *SERVED], ("server_timeout", 60.0), "plan.work.server_timeout", 60.0),
    # of a distributed run alone
    "distributed": (["--distributed"], None, "plan.worker_devices", (CPU, CPU)),
    "num_workers": (["-n", "3"], None, "plan.worker_devices", (CPU,) * 3),
    "master_device_id": (["--master-device-id", "cpu"], None, "plan.master_device", CPU),
    "worker_device_ids": (["--worker-device-ids", "cpu"], None, "plan.worker_devices", (CPU,)),
    "accelerate_config": (["--accelerate-config", "none"], None, "plan.launch.accelerate_config", None),
    "machine_rank": (["--machine-rank", "1"], REFUSED, REFUSED, "the trainer is on one machine"),
    "main_process": (["--main-process", "gpu0:29500"], REFUSED, REFUSED, "the trainer is on one machine"),
    "ray": (["--ray", "local", "--nodes", "2"], None, "plan.launch.ray", "local"),
    "nodes": (["--nodes", "3", "--ray", "local"], None, "plan.launch.nodes", 3),
    "trainer_nodes": (["--trainer-nodes", "2"], REFUSED, REFUSED, "without --ray all processes are here"),
    "workers_per_node": (["--workers-per-node", "4", "--ray", "auto"], None, "plan.launch.workers_per_node", 4),
    "node_wait": (["--node-wait", "5", "--ray", "gpu1:6379"], None, "plan.launch.node_wait", 5.0),
    "node_dir": (["--node-dir", "/scratch", "--ray", "auto"], None, "plan.launch.node_dir", "/scratch"),
    "resume": (["--resume"], None, "plan.training.resume", True),
    "overwrite": (["--overwrite"], REFUSED, "plan.launch.overwrite", True),
    "worker_timeout": (["--worker-timeout", "9"], REFUSED, "plan.launch.worker_timeout", 9.0),
    "stop_grace": (["--stop-grace", "8"], REFUSED, "plan.launch.stop_grace", 8.0),
    "quiet": (["--quiet"], REFUSED, "plan.launch.quiet", True),
    "no_eval_first": (["--no-eval-first"], REFUSED, "plan.training.no_eval_first", True),
    "max_staleness": (["--max-staleness", "0"], REFUSED, "plan.training.max_staleness", 0),
    "correction": (["--correction", "tis"], REFUSED, "plan.training.correction", "tis"),
    "correction_level": (["--correction-level", "token"], REFUSED, "plan.training.correction_level", "token"),
    "correction_min": (["--correction-min", "0.5"], REFUSED, "plan.training.correction_min", 0.5),
    "correction_max": (["--correction-max", "4"], REFUSED, "plan.training.correction_max", 4.0),
    "padding": (["--padding", "trl"], REFUSED, "plan.training.padding", "trl"),
    "accept_mismatch": (["--accept-mismatch"], REFUSED, "plan.training.accept_mismatch", True),
    "choose_prompts": (["--choose-prompts"], REFUSED, "plan.training.choose_prompts", True),
    "filter_zero_variance": (["--filter-zero-variance"], REFUSED, "plan.training.filter_zero_variance", True),
    "train_of_group": (["--train-of-group", "4"], REFUSED, "plan.training.train_of_group", 4),
    "weights": (["--weights", "auto"], REFUSED, "plan.training.weights", "auto"),
    "deterministic": (["--deterministic"], REFUSED, "plan.training.deterministic", True),
    "max_attempts": (["--max-attempts", "2"], REFUSED, "plan.training.max_attempts", 2),
    "keep_done": (["--keep-done", "50"], REFUSED, "plan.training.keep_done.amount", 50),
    "eval_replicates": (["--eval-replicates", "2"], REFUSED, "plan.training.eval_replicates", 2),
    "eval_k": (["--eval-k", "1"], REFUSED, "plan.training.eval_k", (1,)),
    "eval_temperature": (["--eval-temperature", "0"], REFUSED, "plan.training.eval_temperature", 0.0),
    "eval_top_p": (["--eval-top-p", "1"], REFUSED, "plan.training.eval_top_p", 1.0),
    "eval_top_k": (["--eval-top-k", "0"], REFUSED, "plan.training.eval_top_k", 0),
    "publish_dtype": (["--publish-dtype", "bf16"], REFUSED, "plan.training.publish_dtype", "bf16"),
    "delta_every": (["--delta-every", "2"], ("delta_every", 2), "plan.training.delta_every", 2),
    "delta_keep": (["--delta-keep", "4", "--delta-every", "1"], ("delta_keep", 4), "plan.training.delta_keep", 4),
    "delta_dir": (["--delta-dir", "/d", "--delta-every", "1"], ("delta_dir", "/d"), "plan.training.delta_dir", "/d"),
    "stall_warning": (["--stall-warning", "6"], REFUSED, "plan.training.stall_warning", 6.0),
    "groups_per_claim": (["--groups-per-claim", "2"], REFUSED, "plan.work.groups_per_claim", 2),
    "score_concurrency": (["--score-concurrency", "2"], REFUSED, "plan.work.score_concurrency", 2),
    "score_alone": (["--score-alone"], REFUSED, "plan.work.score_alone", True),
    "tool_timeout": (["--tool-timeout", "2"], REFUSED, "plan.work.tool_timeout", 2.0),
    "in_flight_update": (["--in-flight-update", "on"], REFUSED, "plan.work.in_flight_update", "on"),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOG_LEVEL", raising=False)
    (tmp_path / "setup.py").write_text("def get_trainer(): ...\n")
    monkeypatch.setattr(train_command, "choose_generator", lambda *asked, **how: None)  # vLLM is not installed here
    monkeypatch.setattr("async_grpo.setup.devices.visible_gpus", lambda: 0)
    monkeypatch.setattr("async_grpo.nodes.request.require_ray", lambda: None)  # nor is Ray


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What plain TRL in one process was told."""
    seen: dict[str, Any] = {}

    def keep(callback: Any) -> None:
        kept = callback._keeping
        seen.update(delta_every=kept.every, delta_keep=kept.keep, delta_dir=str(kept.folder))

    trainer = SimpleNamespace(
        train=lambda: seen.update(trained=True),
        reward_funcs=[],
        args=SimpleNamespace(output_dir="out", use_vllm=True),
        add_callback=keep,
    )

    def load(config: Path, **given: Any) -> Any:
        seen.update(given, config=config.name)
        return trainer

    def note(trainer: Any, settings: Any) -> None:
        seen.update({name: getattr(settings, name) for name in ("run_name", "run_group", "run_tags")})

    @contextmanager
    def own_server(run_dir: Path, devices: str | None, ready_s: float) -> Iterator[Any]:
        seen["server"], seen["server_timeout"] = (run_dir, devices), ready_s
        yield

    def plan(question: Question, run_dir: Path | None, gpu_memory: int | None) -> None:
        seen.update(planned=True, gpu_memory=gpu_memory)

    monkeypatch.setattr(train_command, "hold_to_device", lambda device, env: seen.update(device=device))
    monkeypatch.setattr(train_command, "check_torch_sees", lambda device: None)
    monkeypatch.setattr(process, "set_up_log", lambda level, rank=0: seen.update(log_level=level))
    for name in ("keep_freed_memory", "own_compile_cache"):
        monkeypatch.setattr(process, name, lambda *given: None)
    monkeypatch.setattr("async_grpo.setup.setup_file.load_trainer", load)
    monkeypatch.setattr("async_grpo.telemetry.trackers.name_for_wandb", lambda settings, env: None)
    monkeypatch.setattr("async_grpo.telemetry.trackers.name_run", note)
    monkeypatch.setattr("async_grpo.roles.plain_trl.held", lambda run_dir: nullcontext())
    monkeypatch.setattr("async_grpo.roles.plain_trl.train", lambda trainer, run_dir: seen.update(run_dir=run_dir))
    monkeypatch.setattr(
        "async_grpo.roles.plain_trl.evaluate_every", lambda trainer, every: seen.update(eval_every=every)
    )
    monkeypatch.setitem(sys.modules, "async_grpo.roles.served_trl", SimpleNamespace(own_server=own_server))
    monkeypatch.setattr("async_grpo.checks.plan.dry_run.plan_single", plan)
    return seen


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The distributed runs that were launched or planned."""
    runs: list[Any] = []

    def plan(root: Path, plan: RunPlan, gpu_memory: int | None) -> None:
        runs.append(SimpleNamespace(planned=True, gpu_memory=gpu_memory))

    monkeypatch.setattr(
        "async_grpo.launch.launcher.launch",
        lambda root, plan: runs.append(SimpleNamespace(run_dir=root, plan=plan)) or 0,
    )
    monkeypatch.setattr("async_grpo.checks.plan.dry_run.plan_distributed", plan)
    return runs


def test_every_option_has_a_row() -> None:
    assert {action.dest for action in train_command.build_parser()._actions} - {"help"} == ROWS.keys()


@pytest.mark.parametrize("option", [name for name, row in ROWS.items() if row[1] is not None])
def test_in_one_process(option: str, alone: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    arguments, expected, *_ = ROWS[option]
    code = main(["train", "setup.py", *arguments])
    said = capsys.readouterr().err
    if expected == REFUSED:
        assert (code, alone) == (2, {}), "nothing was begun"
        assert f"--{option.replace('_', '-')}" in said and "add --distributed" in said
    else:
        name, value = expected
        assert (code, alone[name]) == (0, value), said


@pytest.mark.parametrize("option", ROWS)
def test_distributed(option: str, launched: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    arguments, _, attribute, value = ROWS[option]
    code = main(["train", "setup.py", "--distributed", *arguments])
    if attribute == REFUSED:
        assert code == 2 and not launched and value in capsys.readouterr().err
        return
    assert code == 0, capsys.readouterr().err
    found = launched[0]
    for name in attribute.split("."):
        found = getattr(found, name)
    assert found == value


@pytest.mark.parametrize("option", [name for name, row in ROWS.items() if row[1] is None and name != "resume"])
def test_what_implies_a_distributed_run(option: str, launched: list[Any]) -> None:
    assert main(["train", "setup.py", *ROWS[option][0]]) == 0
    assert len(launched) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "cpu", "--quiet"], "--quiet: for distributed runs only; .* take --distributed in place of --dev"),
        (["--generator", "hf"], "--generator hf: in one process TRL itself generates.*--set use_vllm=false"),
        (["--generator", "vllm"], "--set use_vllm=true --set vllm_mode=colocate"),
        (["--server-devices", "1"], "--server-devices is of a server that is started for the run"),
        (["--server-timeout", "9"], "--server-timeout is of a server that is started for the run"),
        (["--distributed", "--server-timeout", "9"], "--server-timeout is of a server that is started for the run"),
        (["--dry-run", "--generator", "vllm-server"], "say where the server's output goes, --run-dir DIR"),
        (["--device", "cpu", "--delta-dir", "d"], "--delta-dir: no versions are kept without --delta-every"),
        (["--distributed", "--delta-keep", "5", "--delta-dir", "d"], "--delta-keep, --delta-dir: no versions are kept"),
        (["--distributed", "--eval-every", "0", "--eval-k", "1", "--eval-top-p", "1"], "--eval-k, --eval-top-p: --"),
        (["--distributed", "--deterministic", "--groups-per-claim", "2"], "generates and scores each group alone"),
        (["--distributed", "--generator", "hf", "--in-flight-update", "on"], "the weights that began it"),
        (["--distributed", "--gpu-memory", "40GB"], "add --dry-run"),
        (["--distributed", "--nodes", "2", "--node-dir", "d"], "--nodes, --node-dir: without --ray all processes are"),
        (["-n", "0"], "--num-workers: 0 leaves nobody to generate, without --ray"),
    ],
)
def test_what_would_change_nothing_is_refused(
    arguments: list[str], words: str, launched: list[Any], alone: dict[str, Any], refused: Says
) -> None:
    assert re.search(words, refused("train", "setup.py", *arguments))
    assert not launched and not alone


def test_a_trainer_that_asks_for_no_server_gets_none(
    alone: dict[str, Any], monkeypatch: pytest.MonkeyPatch, refused: Says
) -> None:
    trainer = SimpleNamespace(args=SimpleNamespace(use_vllm=False))
    monkeypatch.setattr("async_grpo.setup.setup_file.load_trainer", lambda *given, **named: trainer)
    assert "says use_vllm=False. Add --set use_vllm=true" in refused(
        "train", "setup.py", "-d", "cpu", "--generator", "vllm-server", "--run-dir", HERE
    )
    assert "run_dir" not in alone


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["sweep", "setup.py", "--generator", "hf", "--in-flight-update", "on"], "the weights that began it"),
        (["server", "--config", "setup.py", "-d", "cpu", "--delta-keep", "5"], "--delta-keep: no versions are kept"),
    ],
)
def test_other_commands_refuse_the_same(command: list[str], words: str, refused: Says, tmp_path: Path) -> None:
    assert words in refused(*command)
    assert [path.name for path in tmp_path.iterdir()] == ["setup.py"], "nothing was begun"


def parsed(settings: TrainingSettings | WorkerSettings) -> TrainingSettings | WorkerSettings:
    flags = [text for field in fields(settings) for text in as_flags(field.name, getattr(settings, field.name))]
    if isinstance(settings, TrainingSettings):
        return options.gathered(TrainingSettings, server.build_parser().parse_args(flags))
    return options.gathered(WorkerSettings, worker.build_parser().parse_args(flags))


OTHERS = {row[2].rpartition(".")[2]: row[3] for row in ROWS.values()}
OTHERS |= {"keep_done": ArchiveLimit(2 * 10**9, in_bytes=True), "weights": "host", "run_tags": ("a", "b c")}


@pytest.mark.parametrize("kind", [TrainingSettings, WorkerSettings])
def test_the_flags_of_settings_are_read_back_as_the_same_settings(kind: type[Any]) -> None:
    default, changed = kind(), kind(**{field.name: OTHERS[field.name] for field in fields(kind)})
    assert parsed(default) == default
    assert parsed(changed) == changed
    for field in fields(changed):
        value = getattr(changed, field.name)
        assert value != field.default, f"{field.name} is not tried"
        one = replace(default, **{field.name: value})
        assert parsed(one) == one
