"""The keys of verl: what they come to, and what is refused with which sentence."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.api.options import as_flags
from async_grpo.cli.compute.train import build_parser
from async_grpo.credit import PPOConfig
from async_grpo.errors import RunDirError, UsageError
from async_grpo.setup.accelerate_config import AccelerateConfig
from async_grpo.tasks.task_files import files_by_task
from async_grpo.verl_keys import Keys, VerlRun, planned
from async_grpo.verl_keys.keys import ACTOR, KEYS, LOSSES, ONLY, ROLLOUT, WITHOUT_EFFECT, typed
from async_grpo.verl_keys.run import trackers
from async_grpo.verl_keys.steps import Steps
from async_grpo.verl_keys.trainer import fields_of

FOLDER, TRAIN, MACHINES = "trainer.default_local_dir", "async.trainer_gpus_per_node", "trainer.trainer_nodes"
SHARDED = "--accelerate-config=OUT/setup/accelerate.yaml --weights=host"
PAGE = (Path(__file__).parents[3] / "docs" / "ppo.md").read_text()


def rows(path: Path, count: int, start: int = 0, prompt: Callable[[str], Any] = str) -> Path:
    numbers = range(start, start + count)
    right = [{"ground_truth": str(number + 1)} for number in numbers]
    cells = {"data_source": ["math__sums"] * count, "prompt": [prompt(f"{number}+1=") for number in numbers]}
    pq.write_table(pa.table({**cells, "reward_model": right}), path)
    return path


Plan = Callable[..., VerlRun]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """What a run on 160 rows would be, with these keys beside the least that it needs."""
    file = rows(tmp_path / "math.parquet", 160)

    def of(*keys: str, gpus: int = 0) -> VerlRun:
        least = (f"data.train_files={file}", "actor_rollout_ref.model.path=no/model")
        sizes = ("data.train_batch_size=16", f"{ACTOR}.ppo_mini_batch_size=16")
        where = f"{FOLDER}={tmp_path / 'out'}"
        return planned(Keys.read([*least, *sizes, where, *keys]), lambda: gpus)

    return of


def test_verls_defaults(plan: Plan) -> None:
    found = fields_of(plan().keys)
    expected = {"learning_rate": 1e-06, "lr_scheduler_type": "constant", "weight_decay": 0.01, "num_generations": 1}
    expected |= {"epsilon": 0.2, "epsilon_high": 0.2, "delta": 3.0, "beta": 0.0, "loss_type": "dapo", "gamma": 1.0}
    expected |= {"critic_learning_rate": 1e-05, "max_completion_length": 512, "save_strategy": "no", "use_cpu": True}
    expected |= {"max_steps": 300}  # 30 epochs of 10 batches
    assert {name: found.get(name) for name in expected} == expected


def test_a_step_of_verl_is_a_generation_batch_and_ours_an_update(plan: Plan) -> None:
    """16 prompts × 4 in mini-batches of 8 prompts, twice over: 4 updates."""
    run = plan(
        *(f"{ROLLOUT}.n=4", f"{ACTOR}.ppo_mini_batch_size=8", f"{ACTOR}.ppo_epochs=2", "trainer.total_epochs=3"),
        *(f"{ACTOR}.ppo_micro_batch_size_per_gpu=16", "trainer.save_freq=5", "trainer.test_freq=10"),
        *(f"data.val_files={rows(Path(plan().keys[FOLDER]).with_name('v.parquet'), 4, start=1000)}",),
        *("trainer.early_stopping_patience=2", "trainer.val_before_train=False", f"{ACTOR}.optim.lr_warmup_steps=3"),
    )
    found = fields_of(run.keys)
    batch = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "num_iterations")
    assert [found[name] for name in batch] == [16, 2, 4, 2]
    assert (found["max_steps"], found["save_steps"], found["warmup_steps"]) == (120, 20, 12)
    assert {"--steps=120", "--eval-every=40", "--no-eval-first"} <= {*as_flags(run.options)}
    said = "\n".join(run.lines)
    assert "training: 30 steps of verl = 120 optimizer steps (3 epochs of 10 batches)" in said
    assert "evaluation: every 10 steps of verl = 40 optimizer steps" in said
    assert "early stopping: after 2 evaluations, 20 steps of verl = 80 optimizer steps" in said


@pytest.mark.parametrize(
    ("keys", "gpus", "flags"),
    [
        ((), 0, "--master-device-id=cpu"),
        ((), 1, "--master-device-id=0 --worker-device-ids=0"),
        ((), 2, "--master-device-id=0 --worker-device-ids=1"),
        ((f"{TRAIN}=1",), 10, "--master-device-id=0 --worker-device-ids=1,2,3,4,5,6,7,8,9"),
        (("trainer.n_gpus_per_node=8", f"+{TRAIN}=4"), 8, f"--worker-device-ids=4,5,6,7 {SHARDED}"),
        (
            (f"{ROLLOUT}.tensor_model_parallel_size=4",),
            8,
            f"--worker-device-ids=4 --server-devices=4,5,6,7 {SHARDED} --generator=vllm-server",
        ),
        (
            ("trainer.nnodes=2",),
            0,
            f"--master-device-id=cpu --ray=auto --nodes=2 --trainer-nodes=2 {SHARDED.partition(' ')[0]}",
        ),
        (("trainer.nnodes=3", f"{MACHINES}=1"), 0, "--master-device-id=cpu --ray=auto --nodes=3"),
        (
            ("trainer.nnodes=2",),
            8,
            f"--worker-device-ids=4,5,6,7 --ray=auto --nodes=2 --workers-per-node=4 --trainer-nodes=2 {SHARDED}",
        ),
        (
            ("trainer.nnodes=3", f"{MACHINES}=2"),
            1,
            f"--worker-device-ids=0 --ray=auto --nodes=2 --trainer-nodes=2 {SHARDED}",
        ),
        (
            ("trainer.nnodes=3", f"+{TRAIN}=1", f"{MACHINES}=1"),
            8,
            "--master-device-id=0 --worker-device-ids=1,2,3,4,5,6,7 --ray=auto --nodes=3 --workers-per-node=8",
        ),
        ((f"{ROLLOUT}.name=hf", "trainer.device=cpu"), 8, "--master-device-id=cpu --generator=hf"),
    ],
)
def test_gpus_that_train_and_that_generate(plan: Plan, keys: tuple[str, ...], gpus: int, flags: str) -> None:
    run = plan(*keys, gpus=gpus)
    given = as_flags(run.options)
    assert {*given} == {"--steps=300", *flags.replace("OUT", run.keys[FOLDER]).split(), "--eval-every=0"}
    build_parser().parse_args(["FILE", *given])
    run.write()
    sharded = run.options.get("accelerate_config")
    found = AccelerateConfig.read(sharded)
    assert (run.keys[TRAIN] * run.keys[MACHINES], run.keys[MACHINES]) == (found.processes, found.machines)
    assert fields_of(run.keys)["per_device_train_batch_size"] <= 16 / found.processes


TEXTS = st.text(max_size=8) | st.sampled_from(
    ["", "'", "''", "null", "-1", "1e999", "nan", "[]", "{}", "[a, [b]]", "{a: b}", "!!python/name:os.system ''", "\0"]
)


@settings(deadline=None, max_examples=300)
@given(name=st.sampled_from([*KEYS, *ONLY]), text=TEXTS)
def test_any_text_is_a_value_or_a_sentence(name: str, text: str) -> None:
    try:
        keys = Keys.read([f"{name}={text}"])
        trackers(keys)
        Steps.of(keys, ranks=4)
        files_by_task(keys["data.train_files"] or "a.parquet")
    except UsageError as error:
        assert name in str(error) or "data.train_batch_size" in str(error) or "file" in str(error)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (("data.train_batch_sizes=4",), "There is no key data.train_batch_sizes. Did you mean data.train_batch_size?"),
        (("trainer.total_epochs",), "'trainer.total_epochs' is not key=value"),
        (("trainer.total_epochs=three",), "trainer.total_epochs must be a whole number, got 'three'"),
        (("trainer.total_epochs=0",), "trainer.total_epochs must be at least 1, got 0"),
        (("algorithm.adv_estimator=rloo",), "must be one of gae, grpo, got 'rloo'"),
        ((f"{ACTOR}.loss_agg_mode=token-sum",), "token-sum has no counterpart in TRL"),
        (
            ("trainer.nnodes=4", f"{ROLLOUT}.tensor_model_parallel_size=2"),
            "is of a vLLM server on one machine: take trainer.nnodes=1",
        ),
        ((f"{MACHINES}=2",), "trainer.trainer_nodes=2 are more than trainer.nnodes=1"),
        ((f"{ACTOR}.ppo_mini_batch_size=6",), "Nearest: data.train_batch_size=12 or 18, or .*mini_batch_size=4 or 8"),
        ((f"{ACTOR}.ppo_micro_batch_size_per_gpu=5",), "does not divide. Nearest: 4 or 8"),
        (("data.train_batch_size=320",), "the files have 160 rows. Take at most 160"),
        (("algorithm.use_kl_in_reward=true", f"{ACTOR}.use_kl_loss=true"), "there is one coefficient"),
        (("algorithm.adv_estimator=grpo",), "rollout.n must be at least 2"),
        (("trainer.early_stopping_patience=3",), "needs data.val_files and trainer.test_freq"),
        (("custom_reward_function.path=mine.py",), "score.using"),
        (("trainer.logger=['console','mlflow']",), "trainer.logger must be of console, tensorboard, wandb"),
        (("trainer.n_gpus_per_node=8",), "trainer.n_gpus_per_node=8, and this machine has no GPU"),
        (("trainer.device=cuda",), "trainer.device=cuda, and this machine has no GPU"),
        (("data.train_files={math:/a.parquet}",), "YAML needs a space after the colon"),
        (("data.train_files=[nowhere.parquet]",), "There is no file .*nowhere.parquet"),
        (("actor_rollout_ref.model.path=null",), "is needed: verl's default is a folder of its authors"),
    ],
)
def test_what_cannot_be_is_a_sentence(plan: Plan, keys: tuple[str, ...], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        plan(*keys)


def test_gpus_that_do_not_share_a_mini_batch_are_refused(plan: Plan) -> None:
    with pytest.raises(UsageError, match=r"cannot be shared by 3 GPUs that train. Nearest: .*=15 or 18"):
        plan("+async.trainer_gpus_per_node=3", gpus=4)
    with pytest.raises(UsageError, match=r"2 GPUs cannot be 1 that train .* and 2 that generate"):
        plan("+async.trainer_gpus_per_node=1", f"{ROLLOUT}.tensor_model_parallel_size=2", gpus=2)
    with pytest.raises(UsageError, match=r"1 GPU cannot be 2 that train"):
        plan("+async.trainer_gpus_per_node=2", gpus=1)


def test_a_key_without_effect_is_named_in_one_line(plan: Plan) -> None:
    keys = (
        *("ray_init.num_cpus=8", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=4", "critic.model.fsdp_config.x=1"),
        *("algorithm.kl_ctrl.kl_coef=0.1", "mtl.method=pcgrad", f"{ACTOR}.kl_loss_type=low_var_kl"),
    )
    named = [line.partition(" ")[0] for line in plan(*keys).lines if "has no effect here" in line]
    assert named == [key.partition("=")[0] for key in keys[:-1]]


@pytest.mark.parametrize("prompt", [str, lambda text: [{"role": "user", "content": text}]], ids=["text", "messages"])
def test_rows_that_are_trained_and_evaluated_on_are_warned_of(
    plan: Plan, tmp_path: Path, prompt: Callable[[str], Any]
) -> None:
    held_out = rows(tmp_path / "v.parquet", 5, start=158, prompt=prompt)
    said = plan(f"data.val_files={held_out}", "trainer.test_freq=1").lines[-1]
    assert "2 of the 5 rows of data.val_files have a prompt of data.train_files (the first: '158+1=')" in said


def test_several_tasks_are_batched_by_task_unless_it_is_said(plan: Plan, tmp_path: Path) -> None:
    files = f"{{'math':'{rows(tmp_path / 'm.parquet', 16)}',\n 'logic':'{rows(tmp_path / 'l.parquet', 16)}',}}"
    mixed = (f"data.train_files={files}", "mtl.method=pcgrad", "mtl.num_tasks_expected=2")
    assert plan(*mixed).keys.has_tasks
    assert not plan(*mixed, "mtl.enabled=false").keys.has_tasks


def test_the_setup_file_has_all_keys_and_the_configuration_has_their_fields(plan: Plan) -> None:
    run = plan('trainer.experiment_name=a\'b"""c', "algorithm.use_kl_in_reward=true", gpus=2)
    module: dict[str, Any] = {}
    exec(run.setup, module)
    assert module["KEYS"].keys() == KEYS.keys()
    assert fields_of(Keys(module["KEYS"])) == fields_of(run.keys)
    assert fields_of(run.keys).keys() <= {field.name for field in dataclasses.fields(PPOConfig)}


def test_other_keys_leave_the_setup_file_of_a_run_as_it_is(plan: Plan) -> None:
    one, other = plan(), plan("trainer.total_epochs=2")
    assert one.setup_file == plan().setup_file != other.setup_file


@pytest.mark.parametrize("whose", ["out", "out/setup"])
def test_a_folder_of_another_user_gets_no_setup_file(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    """A `trl.py` in it was imported in place of TRL."""
    (tmp_path / "out" / "setup").mkdir(parents=True)
    theirs, fstat = (tmp_path / whose).stat(), os.fstat

    def owned(descriptor: int) -> os.stat_result:
        found = fstat(descriptor)
        return os.stat_result([*found[:4], 65534, *found[5:]]) if os.path.samestat(found, theirs) else found

    monkeypatch.setattr(os, "fstat", owned)
    with pytest.raises(RunDirError, match=f"{whose} belongs to user 65534"):
        plan().write()
    assert not any((tmp_path / "out" / "setup").iterdir())


def test_a_setup_file_goes_through_no_link_and_its_folder_is_our_own(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "out").symlink_to("mine")  # a disk with room, say
    run = plan()
    run.write()
    assert run.setup_file.read_text() == run.setup
    assert (tmp_path / "mine" / "setup").stat().st_mode & 0o777 == 0o700
    (tmp_path / "mine" / "setup").rename(tmp_path / "elsewhere")
    (tmp_path / "mine" / "setup").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunDirError):
        run.write()


def test_each_key_and_each_loss_is_on_the_page() -> None:
    short: dict[str, Any] = {name: name.removeprefix("actor_rollout_ref.") for name in (*KEYS, *ONLY)}
    assert [name for name, part in short.items() if f"`{part}`" not in PAGE and f"`{name}`" not in PAGE] == []
    assert all(f"`{mode}`" in PAGE for mode in LOSSES)
    assert not {*KEYS, *ONLY} & {*" ".join(WITHOUT_EFFECT.values()).split()}


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (bool, {"False": False, "TRUE": True, " 0 ": False, '"true"': True}),
        (float, {" 1e-6 ": 1e-6}),
        (int, {"-1": -1, 3: 3}),
        (str, {'"mt_grpo"': "mt_grpo", "/a=b.parquet": "/a=b.parquet"}),
    ],
)
def test_text_gets_its_type(kind: type, values: dict[object, object]) -> None:
    found = {text: typed("key", text, kind) for text in values}
    assert found == values and {type(value) for value in found.values()} == {kind}


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [("1e3", int, "key must be a whole number, got '1e3'"), ("inf", float, "finite"), (" ", str, "key is empty")],
)
def test_text_of_another_type_is_refused(text: str, kind: type, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        typed("key", text, kind)
