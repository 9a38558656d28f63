"""The trainer that verl's keys come to: the setup file of `scripts/main_ppo.py` calls `trainer_from`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from accelerate.utils import broadcast_object_list
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from async_grpo.credit import PPOConfig, PPOTrainer
from async_grpo.evals.early_stopping import ImprovementWatch
from async_grpo.log import logger
from async_grpo.settings import CPU
from async_grpo.tasks import MultiTask, load, sampled, score, within
from async_grpo.verl_keys.keys import ACTOR, KEYS, LOSSES, MODEL, ROLLOUT, Keys
from async_grpo.verl_keys.run import watch_of
from async_grpo.verl_keys.steps import Steps


def trainer_from(values: Mapping[str, Any], **more: Any) -> GRPOTrainer:
    """Build the trainer of a `VerlRun`'s keys; `more` replaces arguments of it, such as `reward_funcs`."""
    keys = Keys(values)
    if "wandb" in keys["trainer.logger"]:
        os.environ.setdefault("WANDB_PROJECT", keys["trainer.project_name"])
    config, kind = (PPOConfig, PPOTrainer) if keys.is_ppo else (GRPOConfig, GRPOTrainer)
    known = {field.name for field in dataclasses.fields(config)}
    tokenizer = AutoTokenizer.from_pretrained(keys[f"{MODEL}.path"])

    def fitting(rows: Dataset) -> Dataset:
        return within(rows, tokenizer, keys["data.max_prompt_length"], drop=keys["data.filter_overlong_prompts"])

    arguments: dict[str, Any] = {
        "model": keys[f"{MODEL}.path"],
        "reward_funcs": [score],
        "train_dataset": fitting(load(keys["data.train_files"])),
        "args": config(**{name: value for name, value in fields_of(keys).items() if name in known}),
    }
    if (files := keys["data.val_files"]) is not None:
        held_out = {task: fitting(rows) for task, rows in load(files, separate=True).items()}
        some = keys["data.val_max_samples"]
        arguments["eval_dataset"] = sampled(held_out, some, seed=keys["data.seed"]) if some > 0 else held_out
    if keys.has_tasks:
        kind = type("Trainer", (MultiTask, kind), {})
        arguments["mtl"] = keys["mtl.method"]
        arguments |= {name: keys[f"mtl.{name}"] for name in ("num_tasks_expected", "ensure_all_tasks_per_step")}
    if keys["trainer.early_stopping_patience"] > 0:
        arguments["callbacks"] = [StopEarly(watch_of(keys))]
    return kind(**arguments | more)


def fields_of(keys: Keys) -> dict[str, Any]:
    """Fields of a `PPOConfig`; those that a `GRPOConfig` has not are of the critic."""
    steps = Steps.of(keys, keys["async.trainer_gpus_per_node"] * (keys["trainer.trainer_nodes"] or 1))
    on_gpu, in_reward = keys["trainer.device"] != CPU, keys["algorithm.use_kl_in_reward"]
    low, high = (keys[f"{ACTOR}.clip_ratio_{side}"] for side in ("low", "high"))
    warmup, save = keys[f"{ACTOR}.optim.lr_warmup_steps"], keys["trainer.save_freq"]
    attention = keys[f"{MODEL}.override_config.attn_implementation"]
    in_loss = keys[f"{ACTOR}.kl_loss_coef"] if keys[f"{ACTOR}.use_kl_loss"] else 0.0
    fields = {
        key.field: keys[name]
        for name, key in KEYS.items()
        if key.field and (in_reward or not name.startswith("algorithm.kl_"))
    } | {
        **steps.fields(),
        "max_steps": keys["trainer.total_training_steps"] * steps.updates,
        "top_k": max(0, keys[f"{ROLLOUT}.top_k"]),
        "lr_scheduler_type": "constant_with_warmup" if warmup > 0 else "constant",
        "warmup_steps": max(0, warmup) * steps.updates,
        "epsilon": keys[f"{ACTOR}.clip_ratio"] if low is None else low,
        "epsilon_high": keys[f"{ACTOR}.clip_ratio"] if high is None else high,
        "loss_type": LOSSES[keys[f"{ACTOR}.loss_agg_mode"]],
        "beta": keys["algorithm.kl_ctrl.kl_coef"] if in_reward else in_loss,
        "scale_rewards": "group" if keys.is_ppo or keys["algorithm.norm_adv_by_std_in_grpo"] else "none",
        **({"save_strategy": "steps", "save_steps": save * steps.updates} if save > 0 else {"save_strategy": "no"}),
        "model_init_kwargs": None if attention is None else {"attn_implementation": attention},
        "logging_steps": 1,
        "disable_tqdm": True,
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
    }
    if on_gpu and keys[f"{ROLLOUT}.name"] != "hf":
        fields |= {
            "vllm_gpu_memory_utilization": keys[f"{ROLLOUT}.gpu_memory_utilization"],
            "vllm_max_model_length": keys["data.max_prompt_length"] + keys["data.max_response_length"],
            "vllm_tensor_parallel_size": keys[f"{ROLLOUT}.tensor_model_parallel_size"],
        }
    return fields


class StopEarly(TrainerCallback):
    """Ends the training, with a checkpoint, when its evaluations no longer improve.

    The workers evaluate while the training goes on, so a run may end some steps after the evaluation that decides.
    """

    def __init__(self, watch: ImprovementWatch) -> None:
        self._watch = watch

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        reasons = [self._watch.reason_to_stop() if state.is_world_process_zero else ""]
        if args.world_size > 1:  # all processes end at the same step
            broadcast_object_list(reasons)
        if reasons[0]:
            logger.info("stopped early: {}", reasons[0])
            control.should_training_stop = control.should_save = True
