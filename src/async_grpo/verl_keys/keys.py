"""`key=value`, as verl's `main_ppo` takes it: which keys there are, their types and their defaults.

The names and defaults are those of verl 0.9.1 (`trainer/config/_generated_ppo_trainer.yaml`); `mtl.*` and
`trainer.early_stopping_*` are of Reasoning360's fork, `async.*` and `trainer.trainer_nodes` are ours.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from async_grpo.errors import UsageError

_SHOWN = 100  # characters of what an error quotes
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"

LOSSES = {  # verl's loss_agg_mode, and TRL's loss_type
    "token-mean": "dapo",
    "seq-mean-token-mean": "grpo",
    "seq-mean-token-sum": "luspo",
    "seq-mean-token-sum-norm": "dr_grpo",
}


class Count(int):
    """A whole number of at least 1."""


class Key(NamedTuple):
    """What a key may be, and where its value goes."""

    kind: type | Collection[str]  # or the texts that it may be
    default: Any  # None: it is left out, or decided here
    field: str = ""  # of the configuration, which takes the value as it is


KEYS: Mapping[str, Key] = {
    "data.train_files": Key(str, None),
    "data.val_files": Key(str, None),
    "data.train_batch_size": Key(Count, 1024),
    "data.max_prompt_length": Key(Count, 512),
    "data.max_response_length": Key(Count, 512, "max_completion_length"),
    "data.filter_overlong_prompts": Key(bool, False),
    "data.val_max_samples": Key(int, -1),
    "data.shuffle": Key(bool, True, "shuffle_dataset"),
    "data.seed": Key(int, 42, "seed"),
    f"{MODEL}.path": Key(str, None),
    f"{MODEL}.override_config.attn_implementation": Key(str, None),
    f"{MODEL}.enable_gradient_checkpointing": Key(bool, True, "gradient_checkpointing"),
    f"{ACTOR}.optim.lr": Key(float, 1e-6, "learning_rate"),
    f"{ACTOR}.optim.lr_warmup_steps": Key(int, -1),
    f"{ACTOR}.optim.weight_decay": Key(float, 0.01, "weight_decay"),
    f"{ACTOR}.grad_clip": Key(float, 1.0, "max_grad_norm"),
    f"{ACTOR}.ppo_mini_batch_size": Key(Count, 256),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": Key(Count, None),
    f"{ACTOR}.ppo_epochs": Key(Count, 1, "num_iterations"),
    f"{ACTOR}.clip_ratio": Key(float, 0.2),
    f"{ACTOR}.clip_ratio_low": Key(float, None),
    f"{ACTOR}.clip_ratio_high": Key(float, None),
    f"{ACTOR}.clip_ratio_c": Key(float, 3.0, "delta"),
    f"{ACTOR}.loss_agg_mode": Key(LOSSES, "token-mean"),
    f"{ACTOR}.entropy_coeff": Key(float, 0.0, "entropy_coef"),
    f"{ACTOR}.use_kl_loss": Key(bool, False),
    f"{ACTOR}.kl_loss_coef": Key(float, 0.001),
    f"{ROLLOUT}.name": Key(("vllm", "hf"), None),
    f"{ROLLOUT}.n": Key(Count, 1, "num_generations"),
    f"{ROLLOUT}.temperature": Key(float, 1.0, "temperature"),
    f"{ROLLOUT}.top_p": Key(float, 1.0, "top_p"),
    f"{ROLLOUT}.top_k": Key(int, -1),
    f"{ROLLOUT}.gpu_memory_utilization": Key(float, 0.5),
    f"{ROLLOUT}.tensor_model_parallel_size": Key(Count, 1),
    f"{ROLLOUT}.val_kwargs.n": Key(Count, 1),
    f"{ROLLOUT}.val_kwargs.do_sample": Key(bool, False),
    f"{ROLLOUT}.val_kwargs.temperature": Key(float, 0.0),
    f"{ROLLOUT}.val_kwargs.top_p": Key(float, 1.0),
    f"{ROLLOUT}.val_kwargs.top_k": Key(int, -1),
    "critic.model.path": Key(str, None, "critic_model"),
    "critic.optim.lr": Key(float, 1e-5, "critic_learning_rate"),
    "critic.cliprange_value": Key(float, 0.5, "cliprange_value"),
    "critic.grad_clip": Key(float, 1.0, "critic_max_grad_norm"),
    "algorithm.adv_estimator": Key(("gae", "grpo"), "gae"),
    "algorithm.gamma": Key(float, 1.0, "gamma"),
    "algorithm.lam": Key(float, 1.0, "lam"),
    "algorithm.norm_adv_by_std_in_grpo": Key(bool, True),
    "algorithm.use_kl_in_reward": Key(bool, False, "kl_in_reward"),
    "algorithm.kl_penalty": Key(("kl", "abs", "mse", "low_var_kl"), "kl", "kl_penalty"),
    "algorithm.kl_ctrl.type": Key(("fixed", "adaptive"), "fixed", "kl_ctrl"),
    "algorithm.kl_ctrl.kl_coef": Key(float, 0.001),
    "algorithm.kl_ctrl.horizon": Key(int, 10000, "horizon"),
    "algorithm.kl_ctrl.target_kl": Key(float, 0.1, "target_kl"),
    "mtl.enabled": Key(bool, None),
    "mtl.method": Key(str, "equal"),
    "mtl.num_tasks_expected": Key(int, None),
    "mtl.ensure_all_tasks_per_step": Key(bool, True),
    "trainer.total_epochs": Key(Count, 30),
    "trainer.total_training_steps": Key(Count, None),
    "trainer.nnodes": Key(Count, 1),
    "trainer.trainer_nodes": Key(Count, None),
    "trainer.n_gpus_per_node": Key(Count, None),
    "trainer.device": Key(("cuda", "cpu"), None),
    "trainer.val_before_train": Key(bool, True),
    "trainer.test_freq": Key(int, -1),
    "trainer.save_freq": Key(int, -1),
    "trainer.max_actor_ckpt_to_keep": Key(Count, None, "save_total_limit"),
    "trainer.resume_mode": Key(("auto", "disable"), "auto"),
    "trainer.logger": Key(str, "console", "report_to"),
    "trainer.project_name": Key(str, "verl_examples"),
    "trainer.experiment_name": Key(str, "gsm8k", "run_name"),
    "trainer.default_local_dir": Key(str, None, "output_dir"),
    "trainer.early_stopping_patience": Key(int, -1),
    "trainer.early_stopping_threshold": Key(float, 0.0),
    "async.trainer_gpus_per_node": Key(Count, None),
}

ONLY: Mapping[str, tuple[tuple[str, ...], str]] = {  # what else of verl is there with these values alone, and why
    f"{ACTOR}.kl_loss_type": (("low_var_kl", "k3"), "it is the estimator of TRL's loss"),
    f"{ACTOR}.policy_loss.loss_mode": (("vanilla",), "TRL's other losses are --set loss_type=… of async-grpo train"),
    f"{ACTOR}.ppo_micro_batch_size": (("null", "none"), "give ppo_micro_batch_size_per_gpu"),
    f"{ACTOR}.optim.warmup_style": (("constant", "null"), "give --set lr_scheduler_type=cosine"),
    f"{ACTOR}.optim.lr_scheduler_type": (("constant",), "give --set lr_scheduler_type=cosine"),
    f"{ACTOR}.optim.lr_warmup_steps_ratio": (("0", "0.0"), "give optim.lr_warmup_steps"),
    f"{ROLLOUT}.do_sample": (("true",), "training samples"),
    f"{ROLLOUT}.multi_turn.enable": (("false",), "tools and environments are in a setup file of your own"),
    f"{MODEL}.lora_rank": (("0",), "adapters are in a setup file of your own: peft_config"),
    "data.train_max_samples": (("-1",), "give a shorter file"),
    "algorithm.filter_groups.enable": (("false",), "with adv_estimator=grpo give --filter-zero-variance"),
    "trainer.critic_warmup": (("0",), "the critic trains beside the policy from the first step"),
    "trainer.val_only": (("false",), "evaluate a checkpoint with async-grpo evaluate"),
    "custom_reward_function.path": (("null",), "in the setup file give reward_funcs=[score.using({prefix: function})]"),
    "reward_model.enable": (("false",), "rewards are functions here: async_grpo.tasks.score.using"),
}


def _of(names: str, *roles: str) -> str:
    return " ".join(f"{role}.{name}" for role in roles for name in names.split())


_ROLES = (ACTOR, "critic", "critic.model", "critic.optim")
WITHOUT_EFFECT: Mapping[str, str] = {  # what the line says, and keys, or beginnings of keys
    "a cluster of Ray is started before the run, and found (--ray auto)": "ray_init ray_kwargs trainer.ray_wait",
    "trainer and workers are processes of their own": "actor_rollout_ref.hybrid_engine",
    "TRL has the reference model where beta is not 0": "actor_rollout_ref.ref",
    "FSDP2 shards the trainer over async.trainer_gpus_per_node GPUs": (
        f"actor_rollout_ref.nccl_timeout {_of('fsdp strategy ulysses_sequence_parallel_size', *_ROLES)}"
    ),
    "it is of verl's engines and what they hold in memory": f"""
        global_profiler trainer.use_legacy_worker_impl critic.model.use_remove_padding
        {_of("use_dynamic_bsz ppo_max_token_len_per_gpu use_torch_compile", *_ROLES)}
        {_of("checkpoint profiler data_loader_seed shuffle", *_ROLES)}
        {_of("use_remove_padding use_shm use_fused_kernels use_liger", MODEL)}
        {_of("mode dtype enforce_eager free_cache_engine load_format max_num_batched_tokens max_num_seqs", ROLLOUT)}
        {_of("max_model_len enable_chunked_prefill enable_prefix_caching seed calculate_log_probs", ROLLOUT)}
        {_of("log_prob_micro_batch_size log_prob_use_dynamic_bsz log_prob_max_token_len_per_gpu", ROLLOUT)}
        {_of("disable_log_stats engine_kwargs agent ignore_eos prompt_length response_length", ROLLOUT)}
        {_of("layered_summon data_parallel_size", ROLLOUT)}""",
    "the critic has the policy's batches and passes": _of(
        "ppo_micro_batch_size_per_gpu ppo_mini_batch_size forward_micro_batch_size ppo_epochs", "critic"
    ),
    f"it is that of {MODEL}": "critic.model.enable_gradient_checkpointing",
    "the critic has no weight decay, and a constant rate": _of("weight_decay lr_warmup", "critic.optim"),
    "the column is prompt": "data.prompt_key",
    "the column is data_source": "data.reward_fn_key",
    "a prompt that is too long is refused, or left out with data.filter_overlong_prompts=true": "data.truncation",
    "workers take the problems of an evaluation one by one": "data.val_batch_size",
    "a generation batch is data.train_batch_size": "data.gen_batch_size",
    "the files are read at once, by TRL's loader": (
        "data.filter_overlong_prompts_workers data.return_raw data.dataloader_num_workers"
    ),
    "nothing of a model's repository is executed": "data.trust_remote_code",
    "rewards are chosen by data_source (async_grpo.tasks.score)": "reward_model reward custom_reward_function",
    "no groups are filtered": "algorithm.filter_groups",
    "--correction of async-grpo train says how stale rollouts are corrected for": "algorithm.rollout_correction",
    "TRL deals the batch": "trainer.balance_batch",
    "async-grpo rollouts shows what the model wrote": _of(
        "log_val_generations val_generations_to_log_to_wandb rollout_data_dir validation_data_dir", "trainer"
    ),
    "checkpoints, with the critic, are in trainer.default_local_dir and stay": _of(
        "max_critic_ckpt_to_keep default_hdfs_dir del_local_ckpt_after_load", "trainer"
    ),
    "SIGTERM writes a checkpoint": "trainer.esi_redundant_time",
}


@dataclass(frozen=True)
class Keys:
    """The values of all keys.

    Args:
        given: those that are not the default, typed.
        without_effect: a sentence for each that changes nothing here.
    """

    given: Mapping[str, Any]
    without_effect: Sequence[str] = ()

    def __getitem__(self, name: str) -> Any:
        return self.given.get(name, KEYS[name].default)

    @property
    def is_ppo(self) -> bool:
        return bool(self["algorithm.adv_estimator"] == "gae")

    @property
    def evaluates(self) -> bool:
        return self["data.val_files"] is not None and self["trainer.test_freq"] > 0

    @property
    def has_tasks(self) -> bool:
        """Whether each batch has each task: mtl.enabled decides, else whether there are several."""
        return len(self["data.train_files"]) > 1 if self["mtl.enabled"] is None else bool(self["mtl.enabled"])

    @classmethod
    def read(cls, arguments: Sequence[str]) -> Keys:
        """Read `key=value`, `+key=value` and `++key=value`; of a key that comes twice, the last one counts.

        `UsageError`: an argument is none of these, a key is unknown, or its value cannot be used.
        """
        given: dict[str, Any] = {}
        idle: dict[str, str] = {}
        for argument in arguments:
            name, equals, text = argument.partition("=")
            name = name.lstrip("+").strip()
            if not equals:
                raise UsageError(f"{argument!r} is not key=value, such as trainer.total_epochs=3.")
            if name in KEYS:
                given[name] = _value(name, text)
            elif name in ONLY:
                _refuse_other(name, text)
            else:
                idle[name] = _reason(name)
        given = {name: value for name, value in given.items() if value is not None}
        return cls(given, [f"{name} has no effect here: {why}" for name, why in idle.items()])


def _value(name: str, text: str) -> Any:
    """The key's value; None for `null`, which leaves the default."""
    kind = KEYS[name].kind
    if text.strip().lower() in ("null", "none"):
        return None
    if kind in (bool, int, float):
        return typed(name, text, kind)
    if kind is Count:
        if (count := typed(name, text, int)) < 1:
            raise UsageError(f"{name} must be at least 1, got {count}.")
        return count
    value = typed(name, text.strip().strip("'") if text.strip()[:1] == "'" else text, str)
    if not isinstance(kind, type) and value not in kind:
        more = "; verl's token-sum has no counterpart in TRL" if value == "token-sum" else ""
        raise UsageError(f"{name} must be one of {', '.join(kind)}, got {value!r}{more}.")
    return value


def _refuse_other(name: str, text: str) -> None:
    allowed, why = ONLY[name]
    if text.strip().lower() not in allowed:
        raise UsageError(f"{name}={text.strip()} cannot be had here, only {name}={allowed[0]}: {why}.")


def _reason(name: str) -> str:
    """Why a key has no effect. `UsageError`: there is none of this name."""
    for why, keys in WITHOUT_EFFECT.items():
        if any(
            name == key or name.startswith((f"{key}.", *([f"{key}_"] if "." in key else []))) for key in keys.split()
        ):
            return why
    near = difflib.get_close_matches(name, KEYS, n=1)
    hint = f" Did you mean {near[0]}?" if near else " docs/ppo.md has those that there are."
    raise UsageError(f"There is no key {name}.{hint}")


def typed(name: str, value: Any, kind: Any) -> Any:
    """Give a text its type.

    `" 1e-6 "` -> 1e-6, `"TRUE"` -> True, `'"mt_grpo"'` (JSON within JSON, as SageMaker's SDK sends) -> mt_grpo.

    Args:
        name: of the value, for the error.
        value: a text, or a number or a truth of JSON.
        kind: bool, int, float or str.

    Raises:
        UsageError: the value is not of this type.
    """
    if isinstance(value, (dict, list)) or value is None:
        raise UsageError(f"{name} must be a text, a number or true or false, got {json.dumps(value)[:_SHOWN]}.")
    text = str(value).strip()
    if len(text) > 1 and text.startswith('"') and text.endswith('"'):
        try:
            text = str(json.loads(text)).strip()
        except ValueError:
            raise UsageError(f"{name} is in quotes and not valid JSON: {text[:_SHOWN]}.") from None
    if kind is bool:
        if text.lower() not in ("true", "false", "1", "0"):
            raise UsageError(f"{name} must be true or false, got {text!r}.")
        return text.lower() in ("true", "1")
    if kind is str:
        if not text:
            raise UsageError(f"{name} is empty.")
        return text
    try:
        number = kind(text)
    except ValueError:
        raise UsageError(f"{name} must be {'a whole number' if kind is int else 'a number'}, got {text!r}.") from None
    if not math.isfinite(number):
        raise UsageError(f"{name} must be a finite number, got {text!r}.")
    return number
