"""What of the user's trainer a run could ignore: overrides of TRL's methods, and fields of its configuration.

`HONOURED` has every method of `trl.GRPOTrainer` and of the classes below it. A new TRL may have others, whose effect
on a distributed run nobody has looked at: `check_overrides` refuses an override of them, and
`tests/integration/test_trl_contract.py` names them. A method that was patched counts as an override of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from async_grpo.errors import UnsupportedError
from async_grpo.setup.replaced import class_of_trl, is_of_ours, patched, replaced, replaced_by_user, users_class

if TYPE_CHECKING:
    from trl import GRPOTrainer

_BUILT = "builds the trainer, in the server and in each worker"
_SAMPLES = "makes completions, in the workers"
_SCORES = "scores, in the workers: the prompt groups that wait, at most TRL's batch, in one call"
_ASSEMBLES = "runs in the workers up to the completions, and in the server on what the workers made"
_PROMPTS = "decides the prompts and their order, in the server"
_TRAINS = "trains, in the server"
_EVALUATES = "evaluates, in the server, where TRL generates for evaluations"
_LOGS = "logs, in the server"
_SAVES = "saves and loads, in the server"
_UNUSED = "is not called by training, in TRL neither"

EFFECTS: dict[str, str] = {
    _BUILT: """__init__ _validate_args _build_accelerator_args create_accelerator_and_postprocess _hp_search_setup
        add_callback pop_callback remove_callback _move_model_to_device call_model_init init_hf_repo _send_telemetry
        is_local_process_zero is_world_process_zero _get_output_dir""",
    _SAMPLES: "_generate _generate_single_turn _tokenize_prompts _tool_call_loop _get_tool_suffix_ids",
    _SCORES: "_calculate_rewards",
    _ASSEMBLES: "_generate_and_score_completions",
    _PROMPTS: """get_train_dataloader _get_dataloader _get_train_sampler _remove_unused_columns
        _set_signature_columns_if_needed _get_collator_with_removed_columns num_examples""",
    _TRAINS: """train _inner_training_loop _init_training_state _prepare_for_training _run_epoch _finalize_training
        _prepare_inputs _prepare_input _prepare_context_parallel_inputs training_step compute_loss _compute_loss
        compute_loss_context_manager autocast_smart_context_manager _get_per_token_logps_and_entropies
        get_high_entropy_mask get_off_policy_mask get_gamma_weights create_optimizer_and_scheduler create_optimizer
        create_scheduler get_optimizer_cls_and_kwargs get_decay_parameter_names get_optimizer_group
        _get_learning_rate get_learning_rates get_num_trainable_parameters get_batch_samples _get_num_items_in_batch
        set_initial_training_values get_total_train_batch_size get_sp_size get_cp_size get_tp_size _wrap_model
        _update_auto_batch_size _track_num_input_tokens _mixed_mesh_grad_norm _has_mixed_mesh_grads _clip_grad_norm
        _get_grad_norm store_flos floating_point_ops""",
    _EVALUATES: """get_eval_dataloader _get_eval_sampler evaluate _evaluate evaluation_loop prediction_step
        _maybe_log_save_evaluate _determine_best_metric""",
    _LOGS: "log _log_completion_extra _log_metric",
    _SAVES: """_save_checkpoint _save_rng_state _save_optimizer_and_scheduler _save_scaler _load_from_checkpoint
        _load_best_model _load_rng_state _load_optimizer_and_scheduler _load_scaler _load_callback_state
        _issue_warnings_after_load save_model _save save_state create_model_card push_to_hub _push_from_checkpoint
        _finish_current_push""",
    _UNUSED: """get_test_dataloader predict hyperparameter_search _report_to_hp_search _tune_save_checkpoint
        log_metrics metrics_format save_metrics""",
}
HONOURED: dict[str, str] = {name: effect for effect, names in EFFECTS.items() for name in names.split()}
"""By method, what an override of it does in a distributed run."""

_ON_THE_CLASS = (
    *("_generate", "_generate_single_turn", "_tool_call_loop", "_get_tool_suffix_ids"),
    *("_calculate_rewards", "_generate_and_score_completions"),
)
"""Methods that workers call on copies of the trainer: one that was assigned would be of the object that was copied."""
_IN_A_SUBCLASS = ("_generate_single_turn",)
"""Methods whose `super()` is the engine of a worker: a patch would call TRL's own, which has no engine."""
COLLATOR = "data_collator"  # TRL's returns the rows as they are


_NOT_FIELDS: dict[str, tuple[Any, str]] = {
    "enable_jit_checkpoint": (
        False,
        "a server that gets SIGTERM ends with a checkpoint anyway, and the handler would take the place of the run's. "
        "Remove it.",
    ),
    "parallelism_config": (
        None,
        "the weights of parallel parts of a layer cannot be published. Use FSDP2: examples/accelerate/fsdp2.yaml.",
    ),
}
"""By field: the only value that a run can do with, and why with the way out."""


def check_fields(trainer: GRPOTrainer) -> None:
    """Refuse, before anything is started, a value of the configuration that the run would ignore or break on."""
    for name, (allowed, reason) in _NOT_FIELDS.items():
        if getattr(trainer.args, name, allowed) != allowed:
            raise UnsupportedError(f"{name} cannot run distributed: {reason}")


def check_callbacks(trainer: GRPOTrainer) -> None:
    """Refuse a callback that also works in workers, where no callback is called: the server trains, logs and saves."""
    trl: Any = trainer
    uses = {"a reward function": trl.reward_funcs, "a tool": trl.tools or (), "rollout_func": [trl.rollout_func]}
    for what, functions in uses.items():
        of_objects = [getattr(function, "__self__", function) for function in functions]
        for callback in trl.callback_handler.callbacks:
            if any(it is callback for it in of_objects):
                raise UnsupportedError(
                    f"{type(callback).__name__} is a callback and {what}: the server calls callbacks, and workers call "
                    "this one's other half, on a copy that hears of no step. Let it read the step from the argument "
                    "trainer_state of reward functions and make the callback an object of its own, or train in one "
                    "process (without --distributed)."
                )


def overridden(trainer: GRPOTrainer) -> list[str]:
    """The methods of TRL's trainer that the user's code replaces, sorted."""
    return sorted(replaced(trainer))


def check_overrides(trainer: GRPOTrainer) -> None:
    """Refuse, before anything is started, an override that the run would ignore.

    Raises:
        UnsupportedError: with the method's name and the way out.
    """
    for name in overridden(trainer):
        if name not in HONOURED:
            raise UnsupportedError(
                f"{_replaces(trainer, name)}, a method of TRL that this version of Async-GRPO does not know, so the "
                "override might be ignored. Train in one process (without --distributed), or install the tested "
                "version of TRL (`async-grpo doctor` names it)."
            )
    if assigned := sorted(set(_ON_THE_CLASS) & set(vars(trainer))):
        raise UnsupportedError(
            f"{assigned[0]} was assigned to the trainer object, where it and the run's own part of it cannot both "
            "work. Override it in a subclass of GRPOTrainer."
        )
    if changed := sorted(set(_IN_A_SUBCLASS) & patched(trainer)):
        raise UnsupportedError(
            f"{_replaces(trainer, changed[0])}, and the method of TRL that a patch calls samples with no worker's "
            f"engine. Override {changed[0]} in a subclass of GRPOTrainer, where super() samples with it."
        )
    if trainer.args.world_size > 1 and (loading := own_dataloader(trainer)):
        raise UnsupportedError(
            f"{_replaces(trainer, loading)}: with a trainer in several processes, each dataloader has a part of the "
            "prompts only. Override _get_train_sampler instead, or train in one process."
        )


def describe_overrides(trainer: GRPOTrainer) -> str:
    """What the user's code has replaced of TRL's trainer, and what each of it does; empty where that is nothing."""
    by_effect: dict[str, list[str]] = {}
    ours = {name for name, value in replaced(trainer).items() if is_of_ours(value)}  # of `MultiTask`
    for name in sorted(replaced_by_user(trainer) - ours):
        by_effect.setdefault(HONOURED[name], []).append(name)
    return "; ".join(f"{', '.join(names)} ({effect})" for effect, names in by_effect.items())


def _replaces(trainer: GRPOTrainer, name: str) -> str:
    if name == COLLATOR or name in vars(trainer):
        return f"{name} was assigned to the trainer"
    if name in patched(trainer):
        return f"{name} was patched in {class_of_trl(trainer).__name__} or a class below it"
    return f"{users_class(trainer)} overrides {name}"


def own_dataloader(trainer: GRPOTrainer) -> str | None:
    """By what the user's code makes the training dataloader itself, None where TRL's own makes it."""
    loading = ("get_train_dataloader", "_get_dataloader", "_get_collator_with_removed_columns")
    own = replaced(trainer)
    collates = not str(getattr(trainer.data_collator, "__module__", "")).startswith("trl.")
    return next((name for name in loading if name in own), COLLATOR if collates else None)
