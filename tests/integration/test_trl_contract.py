"""What our hooks rely on in TRL and transformers, checked against the installed versions.

A failure names the hook that moved and the module of ours that must follow. `make test-trl-next` runs this with the
next TRL.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
from in_process import QWEN3_CHAT_TEMPLATE, build_trainer, chat_rows, letters
from trl import GRPOConfig, GRPOTrainer
from trl_contract import LOSS, ON_CPU, PROMPTS, ROLLOUT, SHARDING, TRAINING, moved, twice

from async_grpo.rollout import trl_trainer as rollout_hooks
from async_grpo.setup.grpo_config.values import field_types, parsed
from async_grpo.setup.overrides import HONOURED
from async_grpo.training import trl_trainer as training_hooks
from async_grpo.training.corrections import trl_loss as loss_hooks

pytestmark = pytest.mark.integration

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
    "_get_output_dir": ("trial",),
    "_push_from_checkpoint": ("checkpoint_folder",),
    "_load_rng_state": ("checkpoint",),
    "_load_optimizer_and_scheduler": ("checkpoint",),
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
    "_tokenizer": (LOSS, ROLLOUT),
    "_step": (TRAINING,),
    "_buffered_inputs": (TRAINING,),
    "_image_pad_token_id": (ROLLOUT,),
    "_video_pad_token_id": (ROLLOUT,),
    "_pending_metrics": (ROLLOUT,),
    "_pending_extra_logs": (ROLLOUT,),
    "environments": (TRAINING, ROLLOUT),
    "environment_factories": (TRAINING, ROLLOUT),
    "rollout_func": (TRAINING, ROLLOUT),
    "tools": (TRAINING, ROLLOUT),
    "generation_config": ("async_grpo.setup.sampling",),
    "eos_token_ids": (ROLLOUT,),
    "reward_func_names": (ROLLOUT,),
    "ref_model": (ROLLOUT,),
    "num_generations": (TRAINING, PROMPTS),
    "num_iterations": (LOSS, PROMPTS, "async_grpo.training.loop"),
    "importance_sampling_level": (LOSS,),
    "epsilon_low": (LOSS,),
    "epsilon_high": (LOSS,),
    "use_vllm": (LOSS,),
    "vllm_importance_sampling_correction": (LOSS,),
    "shuffle_dataset": (PROMPTS,),
    "train_dataset": (TRAINING, PROMPTS),
    "is_deepspeed_enabled": (TRAINING, SHARDING),
    "is_fsdp_enabled": (SHARDING,),
    "callback_handler": (TRAINING,),
    "_load_best_model": (ON_CPU,),
    "accelerator": (TRAINING, ROLLOUT),
    "state": (TRAINING, ROLLOUT),
}

WITH_ENVIRONMENTS = {"_environment_pool": ROLLOUT}
"""Attributes of a trainer that has environments."""

WHILE_GENERATING_WITH_ENVIRONMENTS = {"_batch_environments": TRAINING, "_multi_environment": TRAINING}
"""Attributes of a trainer that has environments, which say the one of each row."""

WHILE_GENERATING_WITH_TOOLS = {"_sync_tool_dicts": ROLLOUT}
"""Attributes of a trainer with tools, made for each batch."""


def modules_with(hook: str) -> list[str]:
    names = [(TRAINING, training_hooks.HOOKS), (LOSS, loss_hooks.HOOKS), (ROLLOUT, rollout_hooks.HOOKS)]
    return [module for module, hooks in names if hook in hooks]


@pytest.fixture
def trainer(tmp_path: Path) -> GRPOTrainer:
    return build_trainer(tmp_path)


# --- Names and signatures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", sorted({*training_hooks.HOOKS, *loss_hooks.HOOKS, *rollout_hooks.HOOKS}))
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


def test_of_every_method_it_is_known_what_an_override_does() -> None:
    methods = {
        name for cls in GRPOTrainer.__mro__[:-1] for name, value in vars(cls).items() if inspect.isfunction(value)
    }
    for name in methods - set(HONOURED):
        pytest.fail(moved(f"GRPOTrainer.{name}", "is new", "async_grpo.setup.overrides"))


@pytest.mark.parametrize("attribute", ATTRIBUTES)
def test_trainer_has_the_attribute(attribute: str, trainer: GRPOTrainer) -> None:
    assert hasattr(trainer, attribute), moved(f"GRPOTrainer.{attribute}", "is gone", *ATTRIBUTES[attribute])


def test_a_trainer_with_environments_keeps_them_in_a_pool(tmp_path: Path) -> None:
    class Environment:
        def reset(self, **row: Any) -> str:
            return ""

    trainer: Any = build_trainer(
        tmp_path,
        chat_template=QWEN3_CHAT_TEMPLATE,
        train_dataset=chat_rows(),
        arguments={"environment_factory": Environment},
        reward_funcs=[letters],
    )
    for name, module in WITH_ENVIRONMENTS.items():
        assert isinstance(getattr(trainer, name, None), dict), moved(f"GRPOTrainer.{name}", "is no dict", module)
    trainer._generate_and_score_completions(twice(chat_rows(2)))
    for name, module in WHILE_GENERATING_WITH_ENVIRONMENTS.items():
        right = False if name == "_multi_environment" else [None] * 4
        assert getattr(trainer, name, "gone") == right, moved(f"GRPOTrainer.{name}", f"is not {right}", module)


def test_a_trainer_with_tools_has_those_of_each_completion_by_name(tmp_path: Path) -> None:
    seen: list[Any] = []

    def add(a: int, b: int) -> int:
        """Add.

        Args:
            a: One.
            b: Another.
        """
        return a + b

    class Recording(GRPOTrainer):
        def _generate(self, prompts: list[Any]) -> Any:
            seen.extend(getattr(self, name, None) for name in WHILE_GENERATING_WITH_TOOLS)
            raise InterruptedError

    trainer: Any = build_trainer(
        tmp_path, trainer_class=Recording, chat_template=QWEN3_CHAT_TEMPLATE, arguments={"tools": [add]}
    )
    with pytest.raises(InterruptedError):
        trainer._generate_and_score_completions(twice(chat_rows(2)))
    for name, value, module in zip(
        WHILE_GENERATING_WITH_TOOLS, seen, WHILE_GENERATING_WITH_TOOLS.values(), strict=True
    ):
        assert value == [{"add": add}] * 4, moved(f"GRPOTrainer.{name}", f"is {value} while it generates", module)


@pytest.mark.parametrize("module", [training_hooks, loss_hooks, rollout_hooks], ids=[TRAINING, LOSS, ROLLOUT])
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
    unpinned -= set(WHILE_GENERATING_WITH_TOOLS) | set(WHILE_GENERATING_WITH_ENVIRONMENTS)
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
    ends = tuple(inspect.signature(trainer.callback_handler.on_train_end).parameters)
    assert ends[:3] == ("args", "state", "control"), moved("CallbackHandler.on_train_end", f"takes {ends}", TRAINING)


def test_the_fields_of_a_configuration_are_in_the_sources_where_we_read_them() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    assert field_types().keys() == fields.keys(), "setup/grpo_config/values.py: SOURCES"
    plain = {name: default for name, default in fields.items() if type(default) in (bool, int, float)}
    given = {name: str(default) for name, default in plain.items() if name not in ("max_steps", "seed")}
    found = parsed(given)
    assert {name: found[name] for name in given} == {name: plain[name] for name in given}
    assert len(given) > 80
