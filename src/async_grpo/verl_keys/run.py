"""What the keys come to: a setup file that anybody can read and change, the options of `train`, and a few lines."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from async_grpo.errors import UsageError
from async_grpo.tasks.files import files_by_task
from async_grpo.tasks.overview import count_rows, seen_in_training
from async_grpo.verl_keys.devices import Devices
from async_grpo.verl_keys.keys import ACTOR, MODEL, ROLLOUT, Keys
from async_grpo.verl_keys.steps import Steps, total_steps

LOSSES = {  # verl's loss_agg_mode, and TRL's loss_type
    "token-mean": "dapo",
    "seq-mean-token-mean": "grpo",
    "seq-mean-token-sum": "luspo",
    "seq-mean-token-sum-norm": "dr_grpo",
}
TRACKERS = {"console": None, "tensorboard": "tensorboard", "wandb": "wandb"}

_TEXT = '''"""The setup file that scripts/main_ppo.py wrote for these keys of verl.

{keys}
"""

{imports}

MODEL = {model!r}
TRAINING = {training!r}
HELD_OUT = {held_out!r}
{wandb}

class Trainer({bases}): ...


def get_trainer() -> Trainer:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    return Trainer(
        model=MODEL,
        reward_funcs=[score],
        train_dataset=within(load(TRAINING), tokenizer, {longest}, drop={drop}),
        eval_dataset={evaluated},
{more}        args={config}(
{fields}
        ),
    )
'''


@dataclass(frozen=True, slots=True)
class Run:
    """A run that has not begun.

    Args:
        folder: of checkpoints; the run directory is in it.
        setup: the text of the setup file.
        accelerate: that of a configuration of accelerate; None: the trainer is one process.
        flags: options of `train`, but for the setup file and the run directory.
        lines: what is printed before it begins.
        patience, threshold: of early stopping; a patience of 0: none.
    """

    folder: Path
    setup: str
    accelerate: str | None
    flags: Sequence[str]
    lines: Sequence[str]
    patience: int
    threshold: float
    resumes: bool

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    @property
    def setup_file(self) -> Path:
        """Named after its text: a later run with other keys leaves this one's file as it is."""
        return self.folder / f"main_ppo_{hashlib.sha256(self.setup.encode()).hexdigest()[:8]}.py"

    @property
    def accelerate_file(self) -> Path:
        return accelerate_file(self.folder)

    def write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.setup_file.write_text(self.setup)
        if self.accelerate is not None:
            self.accelerate_file.write_text(self.accelerate)


def accelerate_file(folder: Path) -> Path:
    return folder / "accelerate.yaml"


def planned(keys: Keys, visible_gpus: Callable[[], int]) -> Run:
    """What a run with these keys is.

    Raises:
        UsageError: a value cannot be used, or two do not go together; a file of rows cannot be read.
    """
    training = _files(keys["data.train_files"])
    if training is None or keys[f"{MODEL}.path"] is None:
        missing = f"{MODEL}.path" if training is not None else "data.train_files"
        raise UsageError(f"{missing} is needed: verl's default is a folder of its authors.")
    held_out = _files(keys["data.val_files"])
    _refuse_contradictions(keys, held_out is not None)
    devices = Devices.of(keys, visible_gpus)
    steps = Steps.of(keys, devices.ranks)
    rows = count_rows(training)
    total, whence = total_steps(keys, sum(rows.values()))
    folder = _folder(keys)
    lines = [
        *keys.without_effect,
        f"devices: {devices.sentence}",
        f"batch: {steps.prompts:,} prompts × {steps.completions} completions, {steps.updates:,} optimizer steps for "
        "each step of verl",
        f"training: {steps.both(total)} ({whence})",
        *_frequencies(keys, steps, evaluates=held_out is not None),
    ]
    if held_out is not None and (again := seen_in_training(training, held_out)):
        lines.append(
            f"warning: {len(again):,} of the {sum(count_rows(held_out).values()):,} rows of data.val_files have a "
            f"prompt of data.train_files (the first: {again[0]}): their figures say nothing of new problems"
        )
    return Run(
        folder=folder,
        setup=_setup_text(keys, steps, devices, total, folder, training, held_out, is_multi_task(keys, rows)),
        accelerate=devices.accelerate(),
        flags=_flags(keys, steps, devices, total, folder, evaluates=held_out is not None),
        lines=lines,
        patience=max(0, keys["trainer.early_stopping_patience"]),
        threshold=keys["trainer.early_stopping_threshold"],
        resumes=keys["trainer.resume_mode"] == "auto",
    )


def is_multi_task(keys: Keys, rows: Mapping[str, int]) -> bool:
    """Whether batches are made of tasks: mtl.enabled decides, else whether there are several."""
    asked = keys["mtl.enabled"]
    return len(rows) > 1 if asked is None else bool(asked)


def _files(text: str | None) -> dict[str, list[str]] | None:
    """The files of each task, absolute: a resume may be started in another folder."""
    if text is None:
        return None
    return {task: [str(path.absolute()) for path in paths] for task, paths in files_by_task(text).items()}


def _folder(keys: Keys) -> Path:
    default = Path("checkpoints") / keys["trainer.project_name"] / keys["trainer.experiment_name"]
    return Path(keys["trainer.default_local_dir"] or default).expanduser().absolute()


def _refuse_contradictions(keys: Keys, evaluates: bool) -> None:
    is_ppo = keys["algorithm.adv_estimator"] == "gae"
    served = keys[f"{ROLLOUT}.tensor_model_parallel_size"]
    patience = keys["trainer.early_stopping_patience"]
    for is_wrong, why in (
        (
            keys["algorithm.use_kl_in_reward"] and keys[f"{ACTOR}.use_kl_loss"],
            f"algorithm.use_kl_in_reward and {ACTOR}.use_kl_loss: there is one coefficient. Leave one of them out.",
        ),
        (
            keys["algorithm.use_kl_in_reward"] and not is_ppo,
            f"algorithm.use_kl_in_reward needs algorithm.adv_estimator=gae. With grpo take {ACTOR}.use_kl_loss=true.",
        ),
        (
            not is_ppo and keys[f"{ROLLOUT}.n"] == 1,
            f"algorithm.adv_estimator=grpo compares completions of a prompt: give {ROLLOUT}.n at least 2.",
        ),
        (
            served > 1 and keys[f"{ROLLOUT}.name"] == "hf",
            f"{ROLLOUT}.tensor_model_parallel_size={served} needs {ROLLOUT}.name=vllm: it is of a vLLM server.",
        ),
        (
            patience > 0 and not (evaluates and keys["trainer.test_freq"] > 0),
            f"trainer.early_stopping_patience={patience} counts evaluations: give data.val_files and trainer.test_freq",
        ),
    ):
        if is_wrong:
            raise UsageError(why)


def _frequencies(keys: Keys, steps: Steps, *, evaluates: bool) -> list[str]:
    """How often a run evaluates and saves, in both counts of steps; -1 and 0 are never."""
    test, save, patience = (keys[f"trainer.{name}"] for name in ("test_freq", "save_freq", "early_stopping_patience"))
    lines = [f"evaluation: every {steps.both(test)}" if evaluates and test > 0 else "evaluation: never"]
    if not evaluates and test > 0:
        lines = [f"evaluation: never, as there are no data.val_files (trainer.test_freq={test})"]
    if evaluates and test <= 0:
        lines = [f"evaluation: never (trainer.test_freq={test}): data.val_files have no effect"]
    lines += [f"checkpoints: every {steps.both(save)}" if save > 0 else f"checkpoints: none (trainer.save_freq={save})"]
    if patience > 0:
        lines.append(
            f"early stopping: after {patience} evaluations, {steps.both(patience * test)}, without improvement"
        )
    return lines


def _flags(keys: Keys, steps: Steps, devices: Devices, total: int, folder: Path, *, evaluates: bool) -> list[str]:
    flags = ["--steps", str(total * steps.updates), *devices.flags(str(accelerate_file(folder)))]
    if keys[f"{ROLLOUT}.name"] is not None or devices.of_a_server > 1:
        flags += ["--generator", "vllm-server" if devices.of_a_server > 1 else keys[f"{ROLLOUT}.name"]]
    test = keys["trainer.test_freq"]
    if not evaluates or test <= 0:
        return [*flags, "--eval-every", "0"]
    asked = {name: keys[f"{ROLLOUT}.val_kwargs.{name}"] for name in ("n", "do_sample", "temperature", "top_p", "top_k")}
    flags += ["--eval-every", str(test * steps.updates), "--eval-replicates", str(asked["n"])]
    flags += ["--eval-temperature", f"{asked['temperature'] if asked['do_sample'] else 0.0:g}"]
    flags += ["--eval-top-p", f"{asked['top_p']:g}", "--eval-top-k", str(max(0, asked["top_k"]))]
    return flags if keys["trainer.val_before_train"] else [*flags, "--no-eval-first"]


def _setup_text(
    keys: Keys,
    steps: Steps,
    devices: Devices,
    total: int,
    folder: Path,
    training: Mapping[str, list[str]],
    held_out: Mapping[str, list[str]] | None,
    has_tasks: bool,
) -> str:
    is_ppo = keys["algorithm.adv_estimator"] == "gae"
    config, trainer = ("PPOConfig", "PPOTrainer") if is_ppo else ("GRPOConfig", "GRPOTrainer")
    reports = _trackers(keys)
    model, some = keys[f"{MODEL}.path"], keys["data.val_max_samples"]
    seed = _seed(keys)
    evaluated = "load(HELD_OUT, separate=True)"
    if some > 0:
        evaluated = f"sampled({evaluated}, {some}, seed={seed})"
    more: dict[str, str] = {}
    if has_tasks:
        for name, field in (("method", "mtl"), ("num_tasks_expected",) * 2, ("ensure_all_tasks_per_step",) * 2):
            more[field] = repr(keys[f"mtl.{name}"])
    patience = keys["trainer.early_stopping_patience"]
    if patience > 0:
        file, threshold = str(folder / "run" / "evaluations.jsonl"), keys["trainer.early_stopping_threshold"]
        more["callbacks"] = f"[StopEarly(Path({file!r}), {patience}, {threshold!r})]"
    used = ["load", "score", "within", *["MultiTask"][: int(has_tasks)], *["sampled"][: int(some > 0)]]
    imports = [
        *(["import os"] if "wandb" in reports else []),
        *(["from pathlib import Path"] if patience > 0 else []),
        "from transformers import AutoTokenizer",
        *([] if is_ppo else [f"from trl import {config}, {trainer}"]),
        *([f"from async_grpo.credit import {config}, {trainer}"] if is_ppo else []),
        *(["from async_grpo.verl_keys.stop_early import StopEarly"] if patience > 0 else []),
        f"from async_grpo.tasks import {', '.join(sorted(used))}",
    ]
    fields = _fields(keys, steps, devices, total, folder, reports, is_ppo=is_ppo)
    return _TEXT.format(
        keys="\n".join(f"{name}={value}" for name, value in sorted(keys.given.items())).replace("\\", "/"),
        imports="\n".join(imports),
        model=_model(model),
        training=dict(training),
        held_out=None if held_out is None else dict(held_out),
        wandb=f'os.environ.setdefault("WANDB_PROJECT", {keys["trainer.project_name"]!r})\n'
        if "wandb" in reports
        else "",
        bases=f"MultiTask, {trainer}" if has_tasks else trainer,
        longest=keys["data.max_prompt_length"],
        drop=keys["data.filter_overlong_prompts"],
        evaluated="None" if held_out is None else evaluated,
        more="".join(f"        {name}={value},\n" for name, value in more.items()),
        config=config,
        fields="\n".join(f"            {name}={value!r}," for name, value in fields.items()),
    )


def _fields(
    keys: Keys, steps: Steps, devices: Devices, total: int, folder: Path, reports: list[str], *, is_ppo: bool
) -> dict[str, Any]:
    """Fields of the configuration."""
    on_gpu = devices.trainers > 0
    both = keys[f"{ACTOR}.clip_ratio"]
    low, high = (keys[f"{ACTOR}.clip_ratio_{side}"] for side in ("low", "high"))
    warmup, save = keys[f"{ACTOR}.optim.lr_warmup_steps"], keys["trainer.save_freq"]
    fields: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": total * steps.updates,
        **steps.fields(),
        "max_completion_length": keys["data.max_response_length"],
        "temperature": keys[f"{ROLLOUT}.temperature"],
        "top_p": keys[f"{ROLLOUT}.top_p"],
        "top_k": max(0, keys[f"{ROLLOUT}.top_k"]),
        "learning_rate": keys[f"{ACTOR}.optim.lr"],
        "lr_scheduler_type": "constant_with_warmup" if warmup > 0 else "constant",
        "warmup_steps": max(0, warmup),
        "weight_decay": keys[f"{ACTOR}.optim.weight_decay"],
        "max_grad_norm": keys[f"{ACTOR}.grad_clip"],
        "epsilon": both if low is None else low,
        "epsilon_high": both if high is None else high,
        "delta": keys[f"{ACTOR}.clip_ratio_c"],
        "loss_type": LOSSES[keys[f"{ACTOR}.loss_agg_mode"]],
        "entropy_coef": keys[f"{ACTOR}.entropy_coeff"],
        "beta": keys[f"{ACTOR}.kl_loss_coef"] if keys[f"{ACTOR}.use_kl_loss"] else 0.0,
        "gradient_checkpointing": keys[f"{MODEL}.enable_gradient_checkpointing"],
        "shuffle_dataset": keys["data.shuffle"],
        "seed": _seed(keys),
        **({"save_strategy": "steps", "save_steps": save * steps.updates} if save > 0 else {"save_strategy": "no"}),
        "save_total_limit": keys["trainer.max_actor_ckpt_to_keep"],
        "logging_steps": 1,
        "report_to": reports or "none",
        "run_name": keys["trainer.experiment_name"],
        "disable_tqdm": True,
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
    }
    if is_ppo:
        fields |= _of_the_critic(keys)
    else:
        fields["scale_rewards"] = "group" if keys["algorithm.norm_adv_by_std_in_grpo"] else "none"
    if on_gpu and keys[f"{ROLLOUT}.name"] != "hf":
        fields |= {
            "vllm_gpu_memory_utilization": keys[f"{ROLLOUT}.gpu_memory_utilization"],
            "vllm_max_model_length": keys["data.max_prompt_length"] + keys["data.max_response_length"],
            "vllm_tensor_parallel_size": devices.of_a_server,
        }
    return fields


def _of_the_critic(keys: Keys) -> dict[str, Any]:
    path = keys["critic.model.path"]
    fields = {
        "gamma": keys["algorithm.gamma"],
        "lam": keys["algorithm.lam"],
        "critic_model": None if path is None else _model(path),
        "critic_learning_rate": keys["critic.optim.lr"],
        "critic_max_grad_norm": keys["critic.grad_clip"],
        "cliprange_value": keys["critic.cliprange_value"],
    }
    if keys["algorithm.use_kl_in_reward"]:
        fields |= {
            "kl_in_reward": True,
            "beta": keys["algorithm.kl_ctrl.kl_coef"],
            "kl_penalty": keys["algorithm.kl_penalty"],
            "kl_ctrl": keys["algorithm.kl_ctrl.type"],
            "target_kl": keys["algorithm.kl_ctrl.target_kl"],
            "horizon": keys["algorithm.kl_ctrl.horizon"],
        }
    return fields


def _seed(keys: Keys) -> int:
    seed = keys["data.seed"]
    return 42 if seed is None else int(seed)


def _model(name: str) -> str:
    """A folder as an absolute path; else the name of a model of the hub."""
    folder = Path(name).expanduser()
    return str(folder.absolute()) if folder.exists() else name


def _trackers(keys: Keys) -> list[str]:
    """`report_to`, of `console`, `['console','wandb']` and the like."""
    text = keys["trainer.logger"]
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:
        found = None
    named = [found] if isinstance(found, str) else found
    if not isinstance(named, list) or not all(name in TRACKERS for name in named):
        raise UsageError(f"trainer.logger must be of {', '.join(TRACKERS)}, such as ['console','wandb'], got {text!r}.")
    trackers = [tracker for name in named if (tracker := TRACKERS[name]) is not None]
    for tracker in trackers:
        if find_spec(tracker) is None:
            raise UsageError(
                f"trainer.logger: {tracker} is not installed here. pip install {tracker}, or give "
                "trainer.logger=console."
            )
    return trackers
