"""What our hooks rely on in TRL and transformers, checked against the installed versions.

A failure names the hook that moved and the module of ours that must follow. `make test-trl-next` runs this with the
next TRL.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import trl
from in_process import QWEN3_CHAT_TEMPLATE, InProcessRun, build_trainer, chat_rows, letters, plain_rows
from packaging.version import Version
from torch.testing import assert_close
from transformers.trainer_utils import rotate_checkpoints
from trl import GRPOTrainer
from trl.trainer import utils as trl_utils

from async_grpo.archive.advantages import AdvantageRule
from async_grpo.rollout import trl_trainer as rollout_hooks
from async_grpo.settings import TrainingSettings
from async_grpo.setup import trl_compat
from async_grpo.setup.generator_choice import engines_left_to_workers, wants_vllm
from async_grpo.training import trl_trainer as training_hooks
from async_grpo.training.hyperparameters import hyperparameters

pytestmark = pytest.mark.integration

TRAINING = "async_grpo.training.trl_trainer"
ROLLOUT = "async_grpo.rollout.trl_trainer"
PROMPTS = "async_grpo.training.prompts"
ON_CPU = "async_grpo.setup.trl_compat"
INSTALLED = f"trl {trl.__version__}, transformers {transformers.__version__}"

PARAMETERS: dict[str, tuple[str, ...]] = {
    "_generate": ("prompts",),
    "_tokenize_prompts": ("prompts",),
    "_generate_single_turn": (
        "prompt_ids",
        "images",
        "multimodal_fields",
        "num_generations",
        "has_tool_images",
    ),
    "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
    "_generate_and_score_completions": ("inputs",),
    "_compute_loss": ("model", "inputs"),
    "_save_checkpoint": ("model", "trial"),
    "_get_train_sampler": ("dataset",),
    "_remove_unused_columns": ("dataset", "description"),
    "_log_completion_extra": ("column", "values"),
    "_log_metric": ("name", "value"),
    "_get_per_token_logps_and_entropies": (
        "model",
        "input_ids",
        "attention_mask",
        "logits_to_keep",
        "batch_size",
        "compute_entropy",
    ),
}
"""Of each hook the parameters that we pass, override or rely on; TRL may have more after them."""

ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "_metrics": (TRAINING, ROLLOUT),
    "_tokenizer": (ROLLOUT,),
    "_step": (TRAINING,),
    "_buffered_inputs": (TRAINING,),
    "_pending_metrics": (ROLLOUT,),
    "_pending_extra_logs": (ROLLOUT,),
    "environments": (TRAINING, ROLLOUT),
    "environment_factories": (TRAINING,),
    "rollout_func": (TRAINING,),
    "tools": (TRAINING,),
    "generation_config": (ROLLOUT,),
    "eos_token_ids": (ROLLOUT,),
    "reward_func_names": ("async_grpo.rollout.worker",),
    "ref_model": (ROLLOUT,),
    "num_generations": (TRAINING, PROMPTS),
    "num_iterations": (PROMPTS, "async_grpo.training.loop"),
    "shuffle_dataset": (PROMPTS,),
    "train_dataset": (TRAINING, PROMPTS),
    "is_deepspeed_enabled": (TRAINING,),
    "is_fsdp_enabled": (TRAINING,),
    "callback_handler": (TRAINING,),
    "accelerator": (TRAINING, ROLLOUT),
    "state": (TRAINING, "async_grpo.rollout.batch_worker"),
}

WITH_ENVIRONMENTS = {"_environment_pool": ROLLOUT}
"""Attributes of a trainer that has environments."""

LOSS_INPUTS = {
    "prompt_ids",
    "prompt_mask",
    "completion_ids",
    "completion_mask",
    "advantages",
    "num_items_in_batch",
}


def moved(hook: str, change: str, *modules: str) -> str:
    return f"{INSTALLED}: {hook} {change}. {' and '.join(modules)} must follow."


def modules_with(hook: str) -> list[str]:
    names = [(TRAINING, training_hooks.HOOKS), (ROLLOUT, rollout_hooks.HOOKS)]
    return [module for module, hooks in names if hook in hooks]


@pytest.fixture
def trainer(tmp_path: Path) -> GRPOTrainer:
    return build_trainer(tmp_path)


def twice(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each row once for each of its two completions."""
    return [dict(row) for row in rows for _ in range(2)]


# --- Names and signatures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", sorted({*training_hooks.HOOKS, *rollout_hooks.HOOKS}))
def test_hook_has_its_parameters(hook: str) -> None:
    modules = modules_with(hook)
    method = getattr(GRPOTrainer, hook, None)
    assert callable(method), moved(f"GRPOTrainer.{hook}", "is gone", *modules)
    names = tuple(inspect.signature(method).parameters)[1:]
    expected = PARAMETERS[hook]
    assert names[: len(expected)] == expected, moved(f"GRPOTrainer.{hook}", f"takes {names}, not {expected}", *modules)
    required = [
        name
        for name, parameter in list(inspect.signature(method).parameters.items())[1 + len(expected) :]
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    assert not required, moved(f"GRPOTrainer.{hook}", f"now also requires {required}", *modules)


@pytest.mark.parametrize("attribute", ATTRIBUTES)
def test_trainer_has_the_attribute(attribute: str, trainer: GRPOTrainer) -> None:
    assert hasattr(trainer, attribute), moved(f"GRPOTrainer.{attribute}", "is gone", *ATTRIBUTES[attribute])


def test_a_trainer_with_environments_keeps_them_in_a_pool(tmp_path: Path) -> None:
    class Environment:
        def reset(self, **row: Any) -> str:
            return ""

    trainer = build_trainer(
        tmp_path,
        chat_template=QWEN3_CHAT_TEMPLATE,
        train_dataset=chat_rows(),
        arguments={"environment_factory": Environment},
        reward_funcs=[letters],
    )
    for name, module in WITH_ENVIRONMENTS.items():
        assert isinstance(getattr(trainer, name, None), dict), moved(f"GRPOTrainer.{name}", "is no dict", module)


@pytest.mark.parametrize("module", [training_hooks, rollout_hooks], ids=[TRAINING, ROLLOUT])
def test_every_private_name_that_we_touch_is_pinned_here(module: Any) -> None:
    tree = ast.parse(inspect.getsource(module))
    touched = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_private(node.attr)}
    ours = {
        node.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    } | {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    overridden = set(PARAMETERS) & ours
    unpinned = touched - (ours - overridden) - set(ATTRIBUTES) - set(WITH_ENVIRONMENTS) - set(module.HOOKS)
    assert not unpinned, f"{module.__name__} touches {unpinned}: add them to its HOOKS, or to ATTRIBUTES here"
    unused = set(module.HOOKS) - touched - ours
    assert not unused, f"{module.__name__} names {unused} in its HOOKS but does not touch them"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_the_types_of_what_we_read(trainer: Any) -> None:
    def check(right: bool, attribute: str, change: str) -> None:
        assert right, moved(f"GRPOTrainer.{attribute}", change, *ATTRIBUTES[attribute])

    check(trainer._metrics["train"]["never logged"] == [], "_metrics", "is no dict of defaultdict(list)")
    check(trainer._step == 0, "_step", "does not count forward passes from 0")
    check(trainer._buffered_inputs is None, "_buffered_inputs", "is not None before the first batch")
    check(trainer.environments is None, "environments", "is not None without an environment")
    check(trainer.environment_factories is None, "environment_factories", "is not None without one")
    check(trainer.rollout_func is None, "rollout_func", "is not None without one")
    check(trainer.tools == [], "tools", "is not [] without tools")
    check(trainer.generation_config.max_new_tokens == 8, "generation_config", "is not the trainer's")
    check(trainer.generation_config.temperature == 1.0, "generation_config", "lacks the temperature")
    check(trainer._tokenizer.eos_token_id in trainer.eos_token_ids, "eos_token_ids", "lacks the end token")
    check(trainer.reward_func_names == ["letters"], "reward_func_names", "is no list of function names")
    check(isinstance(trainer.callback_handler.callbacks, list), "callback_handler", "has no list of callbacks")


def test_batch_sizes(tmp_path: Path) -> None:
    trainer = build_trainer(
        tmp_path, per_device_train_batch_size=2, steps_per_generation=4, gradient_accumulation_steps=2
    )
    sizes = trainer.args.generation_batch_size, trainer.num_generations, trainer.args.steps_per_generation
    assert sizes == (8, 2, 4), moved(
        "GRPOConfig.generation_batch_size", "is not batch size x steps per generation", TRAINING, PROMPTS
    )
    assert training_hooks.groups_per_round(trainer) == 4


def test_transformers_functions_that_we_call(trainer: Any) -> None:
    names = tuple(inspect.signature(rotate_checkpoints).parameters)
    assert {"output_dir", "save_total_limit", "best_model_checkpoint", "use_mtime"} <= set(names), moved(
        "transformers.trainer_utils.rotate_checkpoints", f"takes {names}", TRAINING
    )
    ends = tuple(inspect.signature(trainer.callback_handler.on_train_end).parameters)
    assert ends[:3] == ("args", "state", "control"), moved("CallbackHandler.on_train_end", f"takes {ends}", TRAINING)


# --- Generation -------------------------------------------------------------------------------------------


def scripted_rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Three tokens, of which the second is not the model's, for every prompt but the first: that has two."""
    ids = [[1, 2, 3] for _ in prompts]
    ids[0] = [4, trainer.eos_token_ids[0]]
    return {
        "prompt_ids": trainer.processing_class(prompts)["input_ids"],
        "completion_ids": ids,
        "logprobs": [[-0.5 - place for place in range(len(row))] for row in ids],
        "env_mask": [[1, 0, 1][: len(row)] for row in ids],
        "score": [float(place) for place in range(len(prompts))],
    }


def test_generate_returns_eight_things(tmp_path: Path) -> None:
    trainer: Any = build_trainer(tmp_path, arguments={"rollout_func": scripted_rollout})
    prompts = ["a", "a", "bc", "bc"]
    result = trainer._generate(prompts)
    expected = scripted_rollout(prompts, trainer)
    names = (
        "prompt_ids",
        "completion_ids",
        "tool_mask",
        "completions",
        "logprobs",
        "extra_fields",
        "images",
        "tool_images",
    )
    change = f"returns {len(result)} things, not {names}"
    assert len(result) == len(names), moved("GRPOTrainer._generate", change, TRAINING, ROLLOUT)
    values = (
        expected["prompt_ids"],
        expected["completion_ids"],
        expected["env_mask"],
        trainer.processing_class.batch_decode(expected["completion_ids"], skip_special_tokens=True),
        expected["logprobs"],
        {"score": expected["score"]},
        None,
        [],
    )
    for name, value, right in zip(names, result, values, strict=True):
        change = f"has {value!r} in the place of {name}"
        assert value == right, moved("GRPOTrainer._generate", change, TRAINING, ROLLOUT)


def test_rollout_func_gets_each_prompt_repeated(tmp_path: Path) -> None:
    asked: list[list[str]] = []

    def rollout_func(prompts: list[str], trainer: Any) -> dict[str, Any]:
        asked.append(prompts)
        return scripted_rollout(prompts, trainer)

    trainer: Any = build_trainer(tmp_path, arguments={"rollout_func": rollout_func})
    rows = twice(plain_rows(4))
    trainer._generate_and_score_completions(rows)
    assert asked == [[row["prompt"] for row in rows]], moved(
        "rollout_func", "does not get one prompt a completion", TRAINING
    )


def test_a_single_turn_is_tokens_in_tokens_and_logprobs_out(tmp_path: Path) -> None:
    turns: list[Any] = []

    class Recording(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            turns.append(prompt_ids)
            return [[1, 2] for _ in prompt_ids], [[-1.0, -2.0] for _ in prompt_ids]

    trainer: Any = build_trainer(tmp_path, trainer_class=Recording)
    rows = twice(plain_rows(4))
    output = trainer._generate_and_score_completions(rows)
    prompt_ids = trainer.processing_class([row["prompt"] for row in rows])["input_ids"]
    assert turns == [prompt_ids], moved(
        "GRPOTrainer._generate_single_turn", "gets no list of prompt token ids", ROLLOUT
    )
    assert output["completion_ids"].tolist() == [[1, 2]] * 8
    assert output["sampling_per_token_logps"].tolist() == [[-1.0, -2.0]] * 8, moved(
        "GRPOTrainer._generate_single_turn", "'s log-probabilities do not reach the loss", ROLLOUT
    )


def test_prompts_are_tokenized_once_and_then_sampled(tmp_path: Path) -> None:
    calls: list[tuple[str, Any]] = []

    class Recording(GRPOTrainer):
        def _tokenize_prompts(self, prompts: list[Any]) -> Any:
            tokenized = super()._tokenize_prompts(prompts)
            calls.append(("_tokenize_prompts", tokenized[0]))
            return tokenized

        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            calls.append(("_generate_single_turn", prompt_ids))
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)

    trainer: Any = build_trainer(tmp_path, trainer_class=Recording)
    rows = twice(plain_rows(4))
    trainer._generate_and_score_completions(rows)
    prompt_ids = trainer.processing_class([row["prompt"] for row in rows])["input_ids"]
    expected = [("_tokenize_prompts", prompt_ids), ("_generate_single_turn", prompt_ids)]
    assert calls == expected, moved("GRPOTrainer._tokenize_prompts", f"is called so: {calls}", ROLLOUT)


def test_scoring_follows_generation_through_our_overrides(tmp_path: Path) -> None:
    calls: list[tuple[str, Any]] = []

    class Recording(GRPOTrainer):
        def _generate(self, prompts: list[Any]) -> Any:
            result = super()._generate(prompts)
            calls.append(("_generate", result))
            return result

        def _calculate_rewards(self, *args: Any) -> torch.Tensor:
            calls.append(("_calculate_rewards", args))
            return super()._calculate_rewards(*args)

    trainer: Any = build_trainer(tmp_path, trainer_class=Recording)
    rows = twice(plain_rows(4))
    trainer._generate_and_score_completions(rows)
    assert [name for name, _ in calls] == ["_generate", "_calculate_rewards"], moved(
        "GRPOTrainer._generate_and_score_completions", "does not generate, then score", TRAINING, ROLLOUT
    )
    (_, (_, completion_ids, _, completions, *_)), (_, arguments) = calls
    assert arguments == (rows, [row["prompt"] for row in rows], completions, completion_ids), moved(
        "GRPOTrainer._calculate_rewards", f"is called with {arguments}", TRAINING, ROLLOUT
    )


def test_rewards_are_one_column_a_function(trainer: Any) -> None:
    rows = [dict(row) for row in plain_rows(2)]
    rewards = trainer._calculate_rewards(rows, ["a", "bc"], ["xy", "12"], [[1, 2], [3, 4]])
    assert rewards.tolist() == [[1.0], [0.0]], moved(
        "GRPOTrainer._calculate_rewards", "does not return rewards [completions, functions]", TRAINING, ROLLOUT
    )


def test_training_or_evaluation_is_read_off_the_top_of_the_model(trainer: Any) -> None:
    trainer.model.eval()
    trainer.model.training = True
    trainer._generate_and_score_completions(twice(plain_rows(4)))
    assert trainer._metrics["train"]["reward"], moved(
        "GRPOTrainer", "does not take `model.training` as the sign of a training batch", TRAINING, ROLLOUT
    )
    assert not trainer._metrics["eval"]


def test_what_trl_counts_while_generating_is_counted_once(tmp_path: Path) -> None:
    """The trainer side counts again what these prefixes say; a metric of another name would come twice."""
    trainer: Any = build_trainer(tmp_path, reward_funcs=[letters], chat_template=QWEN3_CHAT_TEMPLATE)
    trainer._generate_and_score_completions(twice(trainer.train_dataset))
    counted_again = rollout_hooks._COUNTED_BY_TRL_ON_THE_TRAINER
    unknown = [name for name in trainer._metrics["train"] if not name.startswith(counted_again)]
    assert not unknown, moved("GRPOTrainer._metrics", f"now counts {unknown} with a generation", ROLLOUT)


def test_what_reward_functions_log_is_pending_until_the_batch_is_scored(trainer: Any) -> None:
    trainer._log_metric("metric", 1.0)
    trainer._log_metric("metric", 2.0)
    trainer._log_completion_extra("column", ["x", "y"])
    assert dict(trainer._pending_metrics) == {"metric": [1.0, 2.0]}, moved(
        "GRPOTrainer._log_metric", "does not append to _pending_metrics", TRAINING, ROLLOUT
    )
    assert dict(trainer._pending_extra_logs) == {"column": ["x", "y"]}, moved(
        "GRPOTrainer._log_completion_extra", "does not append to _pending_extra_logs", TRAINING, ROLLOUT
    )


def test_metrics_are_averaged_over_a_logging_interval(trainer: Any) -> None:
    training_hooks.append_metric(trainer, "async/metric", 1.0)
    training_hooks.append_metric(trainer, "async/metric", 4.0)
    trainer.model.train()
    trainer.log({})
    assert trainer.state.log_history[-1]["async/metric"] == 2.5, moved(
        "GRPOTrainer._metrics", "is not averaged into the logs", TRAINING
    )
    assert not trainer._metrics["train"]


def test_the_sampler_repeats_rows_and_batches(tmp_path: Path) -> None:
    trainer: Any = build_trainer(
        tmp_path, per_device_train_batch_size=4, steps_per_generation=2, num_iterations=2, shuffle_dataset=False
    )
    first = list(training_hooks.train_sampler(trainer))[: 8 * 4]
    assert first == [0, 0, 1, 1, 2, 2, 3, 3] * 4, moved(
        "GRPOTrainer._get_train_sampler", "does not repeat rows and batches as before", TRAINING, PROMPTS
    )


# --- The loss ---------------------------------------------------------------------------------------------


@pytest.fixture
def inputs_and_trainer(tmp_path: Path) -> tuple[dict[str, Any], Any]:
    """What the loss consumes for a batch of a `rollout_func`; a loss that weighs each sequence alike."""
    trainer: Any = build_trainer(
        tmp_path,
        arguments={"rollout_func": scripted_rollout},
        reward_funcs=lambda completions, score, **_: score,
        loss_type="grpo",
        epsilon=0.2,
    )
    trainer.current_gradient_accumulation_steps = 1
    inputs = trainer._generate_and_score_completions(twice(plain_rows(4)))
    return inputs, trainer


def test_keys_and_shapes_of_the_loss_inputs(inputs_and_trainer: tuple[dict[str, Any], Any], trainer: Any) -> None:
    plain = trainer._generate_and_score_completions(twice(plain_rows(4)))
    assert set(plain) == LOSS_INPUTS, moved("the loss", f"consumes {sorted(plain)} after generating", TRAINING)

    inputs, trainer = inputs_and_trainer
    expected = LOSS_INPUTS | {"sampling_per_token_logps", "tool_mask"}
    assert set(inputs) == expected, moved("the loss", f"consumes {sorted(inputs)} of a rollout_func", TRAINING)
    completions_BC = (8, 3)
    for name in ("completion_ids", "completion_mask", "sampling_per_token_logps", "tool_mask"):
        assert inputs[name].shape == completions_BC, moved(f"`{name}`", f"has shape {inputs[name].shape}", TRAINING)
    assert inputs["advantages"].shape == (8,)
    assert inputs["num_items_in_batch"].ndim == 0


def test_logprobs_and_env_mask_of_a_rollout_func_reach_the_loss(
    inputs_and_trainer: tuple[dict[str, Any], Any],
) -> None:
    inputs, _ = inputs_and_trainer
    assert inputs["sampling_per_token_logps"].tolist() == [[-0.5, -1.5, 0.0]] + [[-0.5, -1.5, -2.5]] * 7, moved(
        "rollout_func", "'s `logprobs` do not arrive as `sampling_per_token_logps`", TRAINING
    )
    assert inputs["tool_mask"].tolist() == [[1, 0, 1]] * 8, moved(
        "rollout_func", "'s `env_mask` does not arrive as `tool_mask`", TRAINING
    )
    assert inputs["completion_mask"].tolist() == [[1, 1, 0]] + [[1, 1, 1]] * 7


def test_the_loss_takes_old_per_token_logps_as_the_policy_that_sampled(
    inputs_and_trainer: tuple[dict[str, Any], Any],
) -> None:
    inputs, trainer = inputs_and_trainer
    with torch.no_grad():
        logprobs_BC, *rest = trainer._get_per_token_logps_and_entropies(
            trainer.model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            3,
        )
        assert len(rest) == 2, moved(
            "GRPOTrainer._get_per_token_logps_and_entropies", f"returns {1 + len(rest)} things, not 3", ROLLOUT
        )
        shift_BC = torch.linspace(-0.5, 0.5, 24).view(8, 3)
        inputs["old_per_token_logps"] = logprobs_BC - shift_BC
        loss = trainer._compute_loss(trainer.model, inputs)

    ratio_BC = shift_BC.exp()
    advantages_B1 = inputs["advantages"][:, None]
    objective_BC = torch.min(ratio_BC * advantages_B1, ratio_BC.clamp(0.8, 1.2) * advantages_B1)
    mask_BC = inputs["completion_mask"] * inputs["tool_mask"]
    expected = -((objective_BC * mask_BC).sum(1) / mask_BC.sum(1)).mean()
    assert_close(
        loss,
        expected,
        msg=lambda text: moved(
            "GRPOTrainer._compute_loss", f"does not use `old_per_token_logps` and `tool_mask`: {text}", TRAINING
        ),
    )


def test_the_log_probability_function_that_we_replace(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL 1.15 needs a replacement on a CPU; both versions call it with the same nine arguments."""
    name = "trl.trainer.utils._ChunkedLogProbFunction"
    original = getattr(trl_utils, "_ChunkedLogProbFunction", None)
    replaced = original is trl_compat.TorchLogProbs
    needed = Version(trl.__version__) < Version(trl_compat.FIXED_IN) and not torch.cuda.is_available()
    assert replaced == needed, moved(name, "is replaced where it need not be, or not where it must be", ON_CPU)

    calls: list[tuple[Any, ...]] = []

    class Recording:
        @staticmethod
        def apply(*arguments: Any) -> Any:
            calls.append(arguments)
            return trl_compat.TorchLogProbs.apply(*arguments)

    monkeypatch.setattr(trl_utils, "_ChunkedLogProbFunction", Recording)
    ids = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
    with torch.no_grad():
        logprobs_BC, entropies_BC, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, torch.ones_like(ids), 3, compute_entropy=True
        )
        all_logprobs_BCV = trainer.model(input_ids=ids).logits[:, 1:-1].log_softmax(-1)
    expected = len(inspect.signature(trl_compat.TorchLogProbs.apply).parameters)
    counts = [len(arguments) for arguments in calls]
    assert counts == [expected], moved(name, f"is called with {counts} arguments, not {expected}", ON_CPU)
    assert_close(logprobs_BC, all_logprobs_BCV.gather(2, ids[:, 2:, None])[..., 0])
    assert_close(entropies_BC, -(all_logprobs_BCV.exp() * all_logprobs_BCV).sum(-1))
    if not replaced and original is not None:
        assert_close(trl_compat.TorchLogProbs.apply(*calls[0])[0], original.apply(*calls[0])[0])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"reward_weights": [0.5, 2.0], "scale_rewards": "none"},
        {"scale_rewards": "batch"},
        {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 3.0]},
    ],
)
def test_advantages_of_an_archive_are_those_of_trl(tmp_path: Path, changes: dict[str, Any]) -> None:
    def sometimes(completions: list[Any], **_: Any) -> list[float | None]:
        return [None if index % 3 else float(len(text)) for index, text in enumerate(completions)]

    run = InProcessRun(lambda: build_trainer(tmp_path, reward_funcs=[letters, sometimes], **changes)).train()
    told = hyperparameters(run.trainer, TrainingSettings())
    rule = AdvantageRule.from_record(told)
    for batch, inputs in zip(run.batches, run.inputs, strict=True):
        ours = torch.cat([torch.from_numpy(it) for it in rule.advantages([group.rewards for group in batch])])
        assert_close(ours.float(), inputs["advantages"].cpu(), msg=lambda text: f"{INSTALLED}: advantages.py: {text}")
    assert told["reward_functions"] == ["letters", "sometimes"]


def test_hyperparameters_hold_no_secret(tmp_path: Path) -> None:
    private = {"api_key": "secret", "passphrase": "secret", "max_tokens": 3}
    trainer = build_trainer(tmp_path, hub_token="hf_secret", model_init_kwargs=private)
    told = json.dumps(hyperparameters(trainer, TrainingSettings()))
    assert "secret" not in told and '"max_tokens": 3' in told


# --- Engines ----------------------------------------------------------------------------------------------


def test_a_file_with_use_vllm_is_built_without_an_engine(tmp_path: Path) -> None:
    with engines_left_to_workers():
        trainer = build_trainer(tmp_path, use_vllm=True, vllm_gpu_memory_utilization=0.7)
    assert wants_vllm(trainer)
    assert not trainer.use_vllm
    assert trainer.args.vllm_gpu_memory_utilization == 0.7, "its settings are for the workers' engines"
    assert trainer.generation_config is not None, "evaluation generates with transformers"
