"""The private names of TRL and transformers that the code touches: what is relied on, and the test that shows it.

`HOOKS` has those of the trainer, `ELSEWHERE` those of other classes and modules. `test_trl_contract` checks the
installed TRL against both, and that no module touches a name that is missing here; `scripts/trl_hooks.py` makes
docs/trl_hooks.md of them. The modules that touch a name are found in their sources (`users`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "async_grpo"
EXPERIMENTS = ROOT / "src" / "async_grpo_experiments"
I = "tests/integration/"  # noqa: E741
GENERATION, LOSS = I + "test_trl_contract_generation.py::", I + "test_trl_contract_loss.py::"
COMPARED = I + "test_trl_differential.py::test_a_row_trains_as_trl_does"
BATCH = GENERATION + "test_a_batch_is_tokenized_sampled_and_scored_through_our_overrides"
CONTRACT, RUNS = I + "test_trl_contract.py::", I + "test_trl_training.py::"

PENDING = GENERATION + "test_what_reward_functions_log_is_pending_until_the_batch_is_scored"
WITH_TOOLS = CONTRACT + "test_a_trainer_with_tools_has_those_of_each_completion_by_name"
POOL = CONTRACT + "test_a_trainer_with_environments_keeps_them_in_a_pool"
PARAMETERS = CONTRACT + "test_hook_has_its_parameters"
TYPES = CONTRACT + "test_the_types_of_what_we_read"
DIALOGUES = I + "test_dialogues.py::test_dialogues_are_as_in_plain_trl"
CLIENT = I + "test_vllm_server.py::test_trls_client_is_as_we_know_it"
METHODS_OF_GENERATE = I + "test_changed_sampling.py::test_the_methods_of_generate_are_there"
CHECKPOINTS = RUNS + "test_checkpoints_are_told_and_rotated"
OLD_LOGPS = LOSS + "test_the_loss_takes_old_per_token_logps_as_the_policy_that_sampled"
FILLED_IN = LOSS + "test_the_loss_weighs_by_a_ratio_that_is_filled_in_after_its_forward_pass"
RESUMED = I + "test_ppo_trainer.py::test_a_resumed_training_is_as_one_that_was_never_stopped"
TASKS = I + "test_multi_task.py::test_a_run_is_what_plain_trl_does_and_each_batch_has_each_task"

EVERY = "every trainer"
GENERATING_WITH_TOOLS = "with tools, while it generates"
WITH_ENVIRONMENTS = "with environments"
GENERATING_WITH_ENVIRONMENTS = "with environments, while it generates"


class Hook(NamedTuple):
    """A private name.

    Attributes:
        test: fails when what we rely on has changed.
        parameters: the first ones of a method, in their order; TRL may have optional ones after them. None: it is an
            attribute.
        where: which trainers have the attribute.
    """

    test: str
    parameters: tuple[str, ...] | None = None
    where: str = EVERY


def method(test: str, parameters: str) -> Hook:
    return Hook(test, tuple(parameters.split()))


HOOKS: dict[str, Hook] = {
    "_generate": method(GENERATION + "test_generate_returns_eight_things", "prompts"),
    "_generate_and_score_completions": method(BATCH, "inputs"),
    "_generate_single_turn": method(BATCH, "prompt_ids images multimodal_fields num_generations has_tool_images"),
    "_tokenize_prompts": method(BATCH, "prompts"),
    "_tool_call_loop": method(
        DIALOGUES, "prompts prompt_ids completion_ids completions logprobs images multimodal_fields"
    ),
    "_get_tool_suffix_ids": method(DIALOGUES, "tool_messages"),
    "_calculate_rewards": method(
        GENERATION + "test_rewards_are_one_column_a_function", "inputs prompts completions completion_ids_list"
    ),
    "_log_metric": method(PENDING, "name value"),
    "_log_completion_extra": method(PENDING, "column values"),
    "_compute_loss": method(OLD_LOGPS, "model inputs"),
    "_get_per_token_logps_and_entropies": method(
        FILLED_IN, "model input_ids attention_mask logits_to_keep batch_size compute_entropy"
    ),
    "_get_train_sampler": method(GENERATION + "test_the_sampler_repeats_rows_and_batches", "dataset"),
    "_get_dataloader": method(COMPARED + "[a dataloader]", "dataset description batch_size"),
    "_get_collator_with_removed_columns": method(COMPARED + "[a dataloader]", "data_collator"),
    "_remove_unused_columns": method(COMPARED + "[columns that are removed]", "dataset description"),
    "_save_checkpoint": method(CHECKPOINTS, "model trial"),
    "_get_output_dir": method(CHECKPOINTS, "trial"),
    "_push_from_checkpoint": method(PARAMETERS, "checkpoint_folder"),
    "_load_rng_state": method(PARAMETERS, "checkpoint"),
    "_load_optimizer_and_scheduler": method(PARAMETERS, "checkpoint"),
    "_load_best_model": method(PARAMETERS, ""),
    "_prepare_inputs": method(TASKS, "generation_batch"),
    "_prepare_for_training": method(RESUMED, "max_steps train_dataloader resume_from_checkpoint"),
    "_metrics": Hook(GENERATION + "test_metrics_are_averaged_over_a_logging_interval"),
    "_logs": Hook(I + "test_trl_rewards.py::test_all_that_training_changes_has_a_stand_in"),
    "_step": Hook(TYPES),
    "_buffered_inputs": Hook(TYPES),
    "_tokenizer": Hook(TYPES),
    "_image_pad_token_id": Hook(CONTRACT + "test_trainer_has_the_attribute"),
    "_video_pad_token_id": Hook(CONTRACT + "test_trainer_has_the_attribute"),
    "_standalone_tools": Hook(WITH_TOOLS),
    "_sync_tool_dicts": Hook(WITH_TOOLS, where=GENERATING_WITH_TOOLS),
    "_async_tool_dicts": Hook(WITH_TOOLS, where=GENERATING_WITH_TOOLS),
    "_environment_pool": Hook(POOL, where=WITH_ENVIRONMENTS),
    "_batch_environments": Hook(POOL, where=GENERATING_WITH_ENVIRONMENTS),
    "_multi_environment": Hook(POOL, where=GENERATING_WITH_ENVIRONMENTS),
}
"""Hooks of `trl.GRPOTrainer` and the classes below it."""

METHODS = {name: hook.parameters for name, hook in HOOKS.items() if hook.parameters is not None}
ATTRIBUTES = [name for name, hook in HOOKS.items() if hook.parameters is None]

ELSEWHERE: dict[str, tuple[str, str]] = {
    "trl.GRPOTrainer.__init__": (
        "replaced while a trainer is built, so that it has no engine, or is a worker's",
        I + "test_worker_build.py::test_a_patched_constructor_is_given_what_a_worker_needs",
    ),
    "trl.GRPOConfig.__post_init__": (
        "replaced while a configuration is made, so that `--set` comes before TRL's own checks",
        "tests/unit/setup/test_config_values.py::test_it_reaches_the_configuration_before_it_checks_itself",
    ),
    "trl.trainer.utils._ChunkedLogProbFunction": (
        "replaced by a torch version on a CPU, and by the loss over kept tokens",
        LOSS + "test_the_log_probability_function_that_we_replace",
    ),
    "trl.trainer.utils._use_triton": (
        "asked where TRL has a torch version of its own",
        LOSS + "test_a_function_can_take_the_place_of_trls_log_probabilities",
    ),
    "trl.generation.vllm_client.VLLMClient._get": ("asked for the state of a server", CLIENT),
    "trl.generation.vllm_client.VLLMClient._post": ("asked for completions and to drop what it has cached", CLIENT),
    "trl.generation.vllm_generation.VLLMGeneration._init_vllm": (
        "overridden: a server is started before it is asked",
        I + "test_vllm_server_started.py::test_trl_has_the_methods_that_are_replaced",
    ),
    "trl.DPOTrainer._prepare_dataset": (
        "overridden: rows are token ids, and TRL tokenises text there",
        I + "test_trl_contract.py::test_trainers_of_pairs_take_the_token_ids_that_we_give",
    ),
    "transformers.PreTrainedTokenizerFast._encode_plus": (
        "wrapped, so that threads take turns",
        LOSS + "test_a_tokenizer_encodes_in_the_one_method_that_threads_take_turns_in",
    ),
    "transformers.GenerationMixin._sample": ("a model's own is refused", METHODS_OF_GENERATE),
    "transformers.GenerationMixin._get_logits_processor": ("a model's own is refused with vLLM", METHODS_OF_GENERATE),
    "transformers.GenerationMixin._get_stopping_criteria": ("a model's own is refused with vLLM", METHODS_OF_GENERATE),
}
"""Hooks of other classes and modules: what is done with each, and its test."""


@cache
def touched(module: Path) -> frozenset[str]:
    """The private names that a module reads, calls, overrides or has as a text, and the constructors that it replaces.

    Its own are left out: a class of it assigns the name to `self` or defines it, and only `self` is asked for it.
    """
    tree = ast.parse(module.read_text())
    own = {*assigned_to_self(tree), *_methods(tree)}
    return frozenset(name for name, of_self in _private_names(tree) if not (of_self and name in own))


def _private_names(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Each private name in a text or behind a dot, and whether it is an attribute of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            replaces = isinstance(node.ctx, ast.Store) and node.attr.startswith("__")
            if is_private(node.attr) or replaces:
                yield node.attr, _is_self(node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and is_private(node.value):
            yield node.value, False
        elif isinstance(node, ast.keyword) and node.arg is not None and node.arg.startswith("__"):
            yield node.arg, False  # `instead(GRPOTrainer, __init__=…)`


def assigned_to_self(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr


def _methods(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from (one.name for one in node.body if isinstance(one, ast.FunctionDef))


def _is_self(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id == "self"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def modules() -> list[Path]:
    return sorted([*PACKAGE.rglob("*.py"), *EXPERIMENTS.rglob("*.py")])


def users(name: str) -> list[str]:
    """The modules that touch a private name, such as `_generate` or `trl.GRPOTrainer.__init__`.

    Their paths are below `async_grpo`, or begin with `async_grpo_experiments`.
    """
    last = name.rpartition(".")[2]
    found = [module for module in modules() if last in touched(module)]
    return [str(module.relative_to(PACKAGE if module.is_relative_to(PACKAGE) else PACKAGE.parent)) for module in found]
