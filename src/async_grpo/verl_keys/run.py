"""What the keys come to: a setup file, options of `train`, and a few lines that say what will happen."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from datasets import Dataset

from async_grpo.errors import UsageError
from async_grpo.evals.early_stopping import ImprovementWatch
from async_grpo.formatting import counted
from async_grpo.rundir.folders import check_own, make_folder
from async_grpo.rundir.paths import RunDir
from async_grpo.settings import CPU
from async_grpo.setup.generated import GENERATED
from async_grpo.tasks import load
from async_grpo.tasks.task_files import cut, files_by_task
from async_grpo.verl_keys.keys import ACTOR, KEYS, MODEL, ROLLOUT, Keys
from async_grpo.verl_keys.steps import Steps, total_steps

_TRAIN, _MACHINES = "async.trainer_gpus_per_node", "trainer.trainer_nodes"
_FSDP2 = """\
distributed_type: FSDP
num_machines: {machines}
num_processes: {processes}
gpu_ids: "{gpus}"
mixed_precision: "no"
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: true
  fsdp_cpu_ram_efficient_loading: false
  fsdp_offload_params: false
  fsdp_state_dict_type: SHARDED_STATE_DICT
"""
TRACKERS = ("console", "tensorboard", "wandb")
_TEXT = '''"""The trainer of these keys of verl. Arguments of it may follow KEYS below: `reward_funcs=[…]`."""

from async_grpo.verl_keys.trainer import trainer_from

KEYS = {{
{keys}}}


def get_trainer():
    return trainer_from(KEYS)
'''


@dataclass(frozen=True, slots=True)
class VerlRun:
    """A run that has not begun."""

    keys: Keys  # with what was decided: absolute paths, devices, steps, trackers
    options: Mapping[str, Any]  # of `train` by name, but for the setup file and the run directory
    lines: Sequence[str]  # printed before it begins

    @property
    def setup(self) -> str:
        """The text of the setup file, which names all keys: another version's defaults do not change it."""
        return GENERATED + _TEXT.format(keys="".join(f"    {name!r}: {self.keys[name]!r},\n" for name in KEYS))

    @property
    def setup_file(self) -> Path:
        """Named after its text: a later run with other keys leaves this one's file as it is."""
        digest = hashlib.sha256(self.setup.encode()).hexdigest()[:8]
        return _accelerate_file(self.keys).with_name(f"main_ppo_{digest}.py")

    def write(self) -> None:
        """Write the files. `RunDirError`: the folder is another user's, who could change what the run imports."""
        check_own(_folder(self.keys).resolve())
        make_folder(self.setup_file.parent)
        self.setup_file.write_text(self.setup)
        ranks, machines = self.keys[_TRAIN], self.keys[_MACHINES]
        if (processes := ranks * machines) > 1:
            gpus = ",".join(map(str, range(ranks)))
            text = _FSDP2.format(machines=machines, processes=processes, gpus=gpus)
            _accelerate_file(self.keys).write_text(text)


def run_dir(keys: Keys) -> RunDir:
    return RunDir(_folder(keys) / "run")


def watch_of(keys: Keys) -> ImprovementWatch:
    """The rule that ends the run early; without trainer.early_stopping_patience it never does."""
    patience, threshold = (keys[f"trainer.early_stopping_{name}"] for name in ("patience", "threshold"))
    return ImprovementWatch(run_dir(keys).evaluations, max(0, patience), threshold)


def planned(keys: Keys, visible_gpus: Callable[[], int]) -> VerlRun:
    """What a run with these keys is.

    `UsageError`: a value cannot be used, or two do not go together; a file of rows cannot be read.
    """
    training = _files(keys["data.train_files"])
    if training is None or keys[f"{MODEL}.path"] is None:
        missing = f"{MODEL}.path" if training is not None else "data.train_files"
        raise UsageError(f"{missing} is needed: verl's default is a folder of its authors.")
    held_out = _files(keys["data.val_files"])
    _refuse_contradictions(keys)
    devices = Devices.of(keys, visible_gpus)
    nodes = keys["trainer.nnodes"]
    machines = keys[_MACHINES] or nodes
    steps = Steps.of(keys, devices.ranks * machines)
    rows = load(training)
    total, whence = total_steps(keys, len(rows))
    decided = {
        "data.train_files": training,
        "data.val_files": held_out,
        **{name: model_of(keys[name]) for name in (f"{MODEL}.path", "critic.model.path")},
        "trainer.default_local_dir": str(_folder(keys)),
        "trainer.total_training_steps": total,
        "trainer.logger": trackers(keys),
        "trainer.device": "cuda" if devices.trainers else CPU,
        _TRAIN: devices.ranks,
        _MACHINES: machines,
    }
    complete = Keys({**keys.given, **decided})
    lines = [
        *keys.without_effect,
        *(f"{name} has no effect here: {why}" for name, why in _idle(keys.given, complete)),
        f"devices: {devices.sentence}",
        *([f"nodes: Ray has {nodes}, the trainer is on {machines} ({_MACHINES})"] if nodes > 1 else []),
        f"batch: {steps.prompts:,} prompts × {counted(steps.completions, 'completion')}, "
        f"{counted(steps.updates, 'optimizer step')} for each step of verl",
        f"training: {steps.both(total)} ({whence})",
        *_frequencies(keys, steps),
    ]
    if held_out is not None:
        lines += _seen_in_training(rows, load(held_out, separate=True))
    return VerlRun(complete, _options(complete, steps, devices), lines)


def _idle(given: Iterable[str], keys: Keys) -> Iterator[tuple[str, str]]:
    """Keys that were given and change nothing beside the others, and why."""
    on_cpu = keys["trainer.device"] == CPU
    in_reward, is_fixed = keys["algorithm.use_kl_in_reward"], keys["algorithm.kl_ctrl.type"] == "fixed"
    both_sides = all(keys[f"{ACTOR}.clip_ratio_{side}"] is not None for side in ("low", "high"))
    is_greedy = keys.evaluates and not keys[f"{ROLLOUT}.val_kwargs.do_sample"]
    sampling = f"{ROLLOUT}.val_kwargs.temperature {ROLLOUT}.val_kwargs.top_*"
    of_evaluations = f"{ROLLOUT}.val_kwargs.* trainer.val_before_train data.val_max_samples"
    for is_idle, patterns, why in (
        (not keys.is_ppo, "critic.* algorithm.gamma algorithm.lam", "algorithm.adv_estimator=grpo has no critic"),
        (keys.is_ppo, "algorithm.norm_adv*", "it is of algorithm.adv_estimator=grpo"),
        (not in_reward, "algorithm.kl_*", "algorithm.use_kl_in_reward is false"),
        (in_reward and is_fixed, "algorithm.kl_ctrl.horizon algorithm.kl_ctrl.target_kl", "kl_ctrl.type is fixed"),
        (not keys[f"{ACTOR}.use_kl_loss"], f"{ACTOR}.kl_loss_coef", "use_kl_loss is false"),
        (both_sides, f"{ACTOR}.clip_ratio", "clip_ratio_low and clip_ratio_high are given"),
        (not keys.has_tasks, "mtl.method mtl.num_* mtl.ensure_*", "mtl.enabled is false, or there is one task"),
        (keys["data.val_files"] is None, "trainer.test_freq", "there are no data.val_files"),
        (keys["trainer.test_freq"] <= 0, "data.val_files", "trainer.test_freq evaluates nothing"),
        (not keys.evaluates, of_evaluations, "nothing is evaluated"),
        (is_greedy, sampling, "val_kwargs.do_sample is false, so evaluations are greedy"),
        (keys["trainer.early_stopping_patience"] <= 0, "trainer.early_stopping_threshold", "there is no patience"),
        (keys["trainer.save_freq"] <= 0, "trainer.max_actor_ckpt_to_keep", "trainer.save_freq saves nothing"),
        (keys[f"{ROLLOUT}.name"] == "hf" or on_cpu, f"{ROLLOUT}.gpu_memory_utilization", "it is of vLLM on a GPU"),
        (on_cpu, f"trainer.n_gpus_per_node async.* {ROLLOUT}.tensor_model_parallel_size", "all is on the CPU"),
    ):
        if is_idle:
            yield from ((name, why) for name in given if any(fnmatchcase(name, it) for it in patterns.split()))


def _seen_in_training(training: Dataset, held_out: Mapping[str, Dataset]) -> Iterator[str]:
    known = {*map(_text, training["prompt"][:])}
    prompts = [_text(prompt) for rows in held_out.values() for prompt in rows["prompt"][:]]
    if again := [text for text in prompts if text in known]:
        yield (
            f"warning: {len(again):,} of the {len(prompts):,} rows of data.val_files have a prompt of "
            f"data.train_files (the first: {cut(repr(again[0]))}): their figures say nothing of new problems"
        )


def _text(prompt: str | list[dict[str, str]]) -> str:
    """As text: messages with one turn of the user are the text of that turn."""
    if isinstance(prompt, str):
        return prompt
    return prompt[0]["content"] if len(prompt) == 1 else json.dumps(prompt)


def _files(text: str | None) -> dict[str, list[str]] | None:
    """The files of each task, absolute: a resume may be started in another folder."""
    if text is None:
        return None
    return {task: [str(path.absolute()) for path in paths] for task, paths in files_by_task(text).items()}


def _accelerate_file(keys: Keys) -> Path:
    """In a folder of the setup file alone: what is beside a setup file is taken for a part of it."""
    return _folder(keys) / "setup" / "accelerate.yaml"


def _folder(keys: Keys) -> Path:
    default = Path("checkpoints") / keys["trainer.project_name"] / keys["trainer.experiment_name"]
    return Path(keys["trainer.default_local_dir"] or default).expanduser().absolute()


def _refuse_contradictions(keys: Keys) -> None:
    in_reward, in_loss = keys["algorithm.use_kl_in_reward"], keys[f"{ACTOR}.use_kl_loss"]
    engine, patience = f"{ROLLOUT}.tensor_model_parallel_size", "trainer.early_stopping_patience"
    served, nodes, machines = keys[engine] > 1, keys["trainer.nnodes"], keys[_MACHINES] or 1
    for is_wrong, why in (
        (in_reward and in_loss, f"there is one coefficient: algorithm.use_kl_in_reward, or {ACTOR}.use_kl_loss."),
        (in_reward and not keys.is_ppo, f"algorithm.use_kl_in_reward is of gae. With grpo take {ACTOR}.use_kl_loss."),
        (not keys.is_ppo and keys[f"{ROLLOUT}.n"] == 1, f"grpo compares completions: {ROLLOUT}.n must be at least 2."),
        (served and keys[f"{ROLLOUT}.name"] == "hf", f"{engine} is of a vLLM server: take {ROLLOUT}.name=vllm."),
        (machines > nodes, f"{_MACHINES}={machines} are more than trainer.nnodes={nodes}."),
        (served and nodes > 1, f"{engine} is of a vLLM server on one machine: take trainer.nnodes=1."),
        (keys[patience] > 0 and not keys.evaluates, f"{patience} needs data.val_files and trainer.test_freq."),
    ):
        if is_wrong:
            raise UsageError(why)


def _frequencies(keys: Keys, steps: Steps) -> Iterator[str]:
    """How often a run evaluates and saves, in both counts of steps; -1 and 0 are never."""
    test, save, patience = (keys[f"trainer.{name}"] for name in ("test_freq", "save_freq", "early_stopping_patience"))
    yield f"evaluation: every {steps.both(test)}" if keys.evaluates else "evaluation: never"
    none = f"none, also not at the end (trainer.save_freq={save})"
    yield f"checkpoints: {f'every {steps.both(save)}' if save > 0 else none}"
    if patience > 0:
        yield f"early stopping: after {patience} evaluations, {steps.both(patience * test)}, without improvement"


def _options(keys: Keys, steps: Steps, devices: Devices) -> dict[str, Any]:
    options = {
        "steps": keys["trainer.total_training_steps"] * steps.updates,
        **devices.options(keys["trainer.nnodes"], keys[_MACHINES], _accelerate_file(keys)),
        "generator": "vllm-server" if devices.of_a_server > 1 else keys[f"{ROLLOUT}.name"],
    }
    if not keys.evaluates:
        return {**options, "eval_every": 0}
    asked = {name: keys[f"{ROLLOUT}.val_kwargs.{name}"] for name in ("n", "do_sample", "temperature", "top_p", "top_k")}
    return {
        **options,
        "eval_every": keys["trainer.test_freq"] * steps.updates,
        "eval_replicates": asked["n"],
        "eval_temperature": asked["temperature"] if asked["do_sample"] else 0.0,
        "eval_top_p": asked["top_p"],
        "eval_top_k": max(0, asked["top_k"]),
        "no_eval_first": not keys["trainer.val_before_train"],
    }


def model_of(name: str | None) -> str | None:
    """A folder as an absolute path; else the name of a model of the hub."""
    return name if name is None or not (folder := Path(name).expanduser()).exists() else str(folder.absolute())


def trackers(keys: Keys) -> list[str]:
    """`report_to`, of `console`, `['console','wandb']` and the like."""
    text = keys["trainer.logger"]
    named = re.findall(r"\w+", text)
    if not named or not {*named} <= {*TRACKERS}:
        raise UsageError(f"trainer.logger must be of {', '.join(TRACKERS)}, such as ['console','wandb'], got {text!r}.")
    trackers = [name for name in named if name != "console"]
    if absent := [name for name in trackers if find_spec(name) is None]:
        raise UsageError(f"trainer.logger: {absent[0]} is not installed here. pip install it, or take console.")
    return trackers


@dataclass(frozen=True, slots=True)
class Devices:
    """GPUs 0 to `trainers` - 1 train, the others generate; with one GPU it does both.

    In verl all GPUs do both by turns; here a process has its own.
    """

    trainers: int  # 0: all is on the CPU
    generators: int
    of_a_server: int  # GPUs of a vLLM server; 1: an engine in each worker
    sentence: str

    @classmethod
    def of(cls, keys: Keys, visible: Callable[[], int]) -> Devices:
        """The share of each, of the GPUs that `visible` counts. `UsageError`: they are too few."""
        device, asked = keys["trainer.device"], keys["trainer.n_gpus_per_node"]
        there = 0 if device == CPU else visible()
        gpus = 0 if device == CPU else asked or max(there, int(device is not None))
        if gpus > there:
            wanted = f"trainer.n_gpus_per_node={asked}" if asked else f"trainer.device={device}"
            raise UsageError(f"{wanted}, and this machine has {there or 'no GPU'}. trainer.device=cpu needs none.")
        return cls._shared(keys, gpus) if gpus else cls(0, 0, 1, "the CPU trains and generates")

    @classmethod
    def _shared(cls, keys: Keys, gpus: int) -> Devices:
        served = keys[f"{ROLLOUT}.tensor_model_parallel_size"]
        if gpus == 1 and served == 1 and keys[_TRAIN] in (None, 1):
            return cls(1, 0, 1, "GPU 0 trains and generates")
        trainers = keys[_TRAIN] or (gpus - served if served > 1 else gpus // 2)
        generators = gpus - trainers
        if trainers < 1 or generators < served:
            raise UsageError(
                f"{counted(gpus, 'GPU')} cannot be {trainers} that train ({_TRAIN}) and {served} that generate "
                f"({ROLLOUT}.tensor_model_parallel_size): the sum must be at most trainer.n_gpus_per_node."
            )
        idle = f", {generators - served} are idle" if 1 < served < generators else ""
        how = f"a vLLM server on {served}" if served > 1 else f"{generators} generate"
        return cls(trainers, generators, served, f"of {gpus} GPUs {trainers} train ({_TRAIN}), {how}{idle}")

    @property
    def ranks(self) -> int:
        return max(1, self.trainers)

    def options(self, nodes: int, machines: int, accelerate: Path) -> dict[str, Any]:
        """Options of `train` by name, of a trainer on `machines` of the nodes, `accelerate` being its configuration."""
        options = self._on_ray(nodes, machines) if nodes > 1 else {}
        if not self.trainers:
            return {"master_device_id": CPU, **options, **({"accelerate_config": accelerate} if machines > 1 else {})}
        generating = [*range(self.trainers, self.trainers + self.generators)] or [0]
        if self.of_a_server > 1:
            options["server_devices"] = generating[: self.of_a_server]
            generating = generating[:1]
        options["worker_device_ids"] = generating
        if self.ranks * machines == 1:
            return {"master_device_id": 0, **options}
        # With --weights ipc the first GPU would have the published versions of the whole model beside its shard.
        return {**options, "accelerate_config": accelerate, "weights": "host"}

    def _on_ray(self, nodes: int, machines: int) -> dict[str, Any]:
        """On other nodes each GPU that trains nothing has a worker."""
        only_train = machines - 1 if self.trainers and not self.generators else 0
        workers = {1: self.trainers + self.generators, nodes: self.generators}.get(
            machines
        )  # else as many as there are
        own = {"trainer_nodes": machines} if machines > 1 else {}
        return {"ray": "auto", "nodes": nodes - only_train, "workers_per_node": workers or None, **own}
