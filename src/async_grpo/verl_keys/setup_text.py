"""The setup file that the keys come to. It is an ordinary one, which anybody can read and change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from async_grpo.errors import UsageError
from async_grpo.rundir.paths import RunDir
from async_grpo.setup.generated import GENERATED
from async_grpo.verl_keys.devices import Devices
from async_grpo.verl_keys.keys import ACTOR, MODEL, ROLLOUT, Keys
from async_grpo.verl_keys.steps import Steps

RUN = "run"  # the run directory, in the folder of checkpoints
LOSSES = {  # verl's loss_agg_mode, and TRL's loss_type
    "token-mean": "dapo",
    "seq-mean-token-mean": "grpo",
    "seq-mean-token-sum": "luspo",
    "seq-mean-token-sum-norm": "dr_grpo",
}
TRACKERS = {"console": None, "tensorboard": "tensorboard", "wandb": "wandb"}

_TEXT = '''"""The setup file that scripts/main_ppo.py wrote for these keys of verl."""

{keys}

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
        train_dataset=within(load(TRAINING), {fits}),
        eval_dataset={evaluated},
{more}        args={config}(
{fields}
        ),
    )
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupText:
    """What a setup file is made of.

    Args:
        total: steps of verl.
        folder: of checkpoints; the run directory is in it.
        training, held_out: absolute paths by task.
        has_tasks: whether each batch has each task.
    """

    keys: Keys
    steps: Steps
    devices: Devices
    total: int
    folder: Path
    training: Mapping[str, list[str]]
    held_out: Mapping[str, list[str]] | None
    has_tasks: bool

    @property
    def is_ppo(self) -> bool:
        return is_ppo(self.keys)

    def text(self) -> str:
        """Raises `UsageError` for a logger that there is not."""
        keys, config = self.keys, "PPOConfig" if self.is_ppo else "GRPOConfig"
        trainer = config.replace("Config", "Trainer")
        reports, seed, some = trackers(keys), seed_of(keys), keys["data.val_max_samples"]
        fits = f"tokenizer, {keys['data.max_prompt_length']}, drop={keys['data.filter_overlong_prompts']}"
        evaluated = f"{{task: within(rows, {fits}) for task, rows in load(HELD_OUT, separate=True).items()}}"
        if some > 0:
            evaluated = f"sampled(\n            {evaluated},\n            {some},\n            seed={seed},\n        )"
        project = keys["trainer.project_name"]
        more, fields = self._arguments(), self.fields()
        return (GENERATED + _TEXT).format(
            keys="\n".join(f"# {name}: {value!r}" for name, value in sorted(keys.given.items())),
            imports="\n".join(self._imports(config, trainer, with_wandb="wandb" in reports)),
            model=model_of(keys[f"{MODEL}.path"]),
            training=dict(self.training),
            held_out=None if self.held_out is None else dict(self.held_out),
            wandb=f'os.environ.setdefault("WANDB_PROJECT", {project!r})\n' if "wandb" in reports else "",
            bases=f"MultiTask, {trainer}" if self.has_tasks else trainer,
            fits=fits,
            evaluated="None" if self.held_out is None else evaluated,
            more="".join(f"        {name}={value},\n" for name, value in more.items()),
            config=config,
            fields="\n".join(f"            {name}={value!r}," for name, value in fields.items()),
        )

    def _imports(self, config: str, trainer: str, *, with_wandb: bool) -> list[str]:
        stops = self.keys["trainer.early_stopping_patience"] > 0
        used = [
            *("load", "score", "within"),
            *(["MultiTask"] if self.has_tasks else []),
            *(["sampled"] if self.keys["data.val_max_samples"] > 0 else []),
        ]
        return [
            *(["import os"] if with_wandb else []),
            *(["from pathlib import Path"] if stops else []),
            "from transformers import AutoTokenizer",
            *([] if self.is_ppo else [f"from trl import {config}, {trainer}"]),
            *([f"from async_grpo.credit import {config}, {trainer}"] if self.is_ppo else []),
            f"from async_grpo.tasks import {', '.join(sorted(used))}",
            *(["from async_grpo.verl_keys.stop_early import StopEarly"] if stops else []),
        ]

    def _arguments(self) -> dict[str, str]:
        """Further arguments of the trainer, as code."""
        keys, more = self.keys, {}
        if self.has_tasks:
            more["mtl"] = repr(keys["mtl.method"])
            for name in ("num_tasks_expected", "ensure_all_tasks_per_step"):
                more[name] = repr(keys[f"mtl.{name}"])
        patience, threshold = (keys[f"trainer.early_stopping_{name}"] for name in ("patience", "threshold"))
        if patience > 0:
            file = str(RunDir(self.folder / RUN).evaluations)
            more["callbacks"] = f"[StopEarly(Path({file!r}), {patience}, {threshold!r})]"
        return more

    def fields(self) -> dict[str, Any]:
        """Fields of the configuration."""
        keys, steps, devices = self.keys, self.steps, self.devices
        on_gpu = devices.trainers > 0
        both = keys[f"{ACTOR}.clip_ratio"]
        low, high = (keys[f"{ACTOR}.clip_ratio_{side}"] for side in ("low", "high"))
        warmup, save = keys[f"{ACTOR}.optim.lr_warmup_steps"], keys["trainer.save_freq"]
        fields: dict[str, Any] = {
            "output_dir": str(self.folder),
            "max_steps": self.total * steps.updates,
            **steps.fields(),
            "max_completion_length": keys["data.max_response_length"],
            "temperature": keys[f"{ROLLOUT}.temperature"],
            "top_p": keys[f"{ROLLOUT}.top_p"],
            "top_k": max(0, keys[f"{ROLLOUT}.top_k"]),
            "learning_rate": keys[f"{ACTOR}.optim.lr"],
            "lr_scheduler_type": "constant_with_warmup" if warmup > 0 else "constant",
            "warmup_steps": max(0, warmup) * steps.updates,
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
            "seed": seed_of(keys),
            **({"save_strategy": "steps", "save_steps": save * steps.updates} if save > 0 else {"save_strategy": "no"}),
            "save_total_limit": keys["trainer.max_actor_ckpt_to_keep"],
            "logging_steps": 1,
            "report_to": trackers(keys) or "none",
            "run_name": keys["trainer.experiment_name"],
            "disable_tqdm": True,
            "bf16": on_gpu,
            "use_cpu": not on_gpu,
        }
        if (attention := keys[f"{MODEL}.override_config.attn_implementation"]) is not None:
            fields["model_init_kwargs"] = {"attn_implementation": attention}
        if self.is_ppo:
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


def is_ppo(keys: Keys) -> bool:
    return bool(keys["algorithm.adv_estimator"] == "gae")


def _of_the_critic(keys: Keys) -> dict[str, Any]:
    path = keys["critic.model.path"]
    fields = {
        "gamma": keys["algorithm.gamma"],
        "lam": keys["algorithm.lam"],
        "critic_model": None if path is None else model_of(path),
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


def seed_of(keys: Keys) -> int:
    seed = keys["data.seed"]
    return 42 if seed is None else int(seed)


def model_of(name: str) -> str:
    """A folder as an absolute path; else the name of a model of the hub."""
    folder = Path(name).expanduser()
    return str(folder.absolute()) if folder.exists() else name


def trackers(keys: Keys) -> list[str]:
    """`report_to`, of `console`, `['console','wandb']` and the like."""
    text = keys["trainer.logger"]
    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        found = None
    named = [found] if isinstance(found, str) else found
    if not isinstance(named, list) or not all(isinstance(name, str) and name in TRACKERS for name in named):
        raise UsageError(f"trainer.logger must be of {', '.join(TRACKERS)}, such as ['console','wandb'], got {text!r}.")
    trackers = [tracker for name in named if (tracker := TRACKERS[name]) is not None]
    for tracker in trackers:
        if find_spec(tracker) is None:
            raise UsageError(
                f"trainer.logger: {tracker} is not installed here. pip install {tracker}, or give "
                "trainer.logger=console."
            )
    return trackers
