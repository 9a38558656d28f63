"""What of TRL works distributed, and how: every field of `GRPOConfig`, every argument of the trainer, every method.

Each name is once in `SHOWN`, `DRAWN` or `IRRELEVANT`, or in `REFUSED` alone; `test_trl_contract` checks it, and
`scripts/trl_table.py` makes docs/trl.md of it.
"""

from __future__ import annotations

from typing import Any

from differential_rows import ROWS
from random_configurations import ARGUMENTS, FIELDS, TOGETHER

I, U = "tests/integration/", "tests/unit/"  # noqa: E741
DIFFERENTIAL = I + "test_trl_differential.py::test_a_random_configuration_trains_as_trl_does"


def compared(row: str) -> str:
    """The test of a row of the differential."""
    assert row in ROWS, row
    return I + f"test_trl_differential.py::test_a_row_trains_as_trl_does[{row}]"


# Tests that the tables name.
ENGINE_SETTINGS = U + "engines/test_engine_vllm.py::test_engine_settings_are_those_of_the_config"
EVALUATES = I + "test_trl_training.py::test_evaluation_generates_in_the_trainer"
CHECKPOINTS = I + "test_trl_training.py::test_checkpoints_are_told_and_rotated"
NOISE = I + "test_trl_training.py::test_noise_in_embeddings_that_workers_do_not_have_is_told"
NO_ENGINE = I + "test_trl_contract_loss.py::test_a_file_with_use_vllm_is_built_without_an_engine"
SERVER_OR_ENGINE = U + "setup/test_generator_choice.py::test_a_server_generates_where_the_file_asks_for_vllm"
REGEX = U + "setup/test_sampling.py::test_a_regex_needs_vllm_and_changes_what_is_drawn"
BEST = I + "test_trl_training.py::test_a_checkpoint_that_is_written_aside_names_its_place_as_the_best_one"
REFUSALS = I + "test_rollout_groups.py::test_refusals_name_the_setting_and_the_way_out"
LENGTHENED = I + "test_changed_sampling.py::test_a_callback_that_raises_the_length_is_followed_from_the_next_batch_on"

DRAWN: frozenset[str] = frozenset({*FIELDS, *TOGETHER})
"""Fields of which random values are compared with plain TRL."""

# How a field has its effect, the test that shows it, and the fields.
SHOWN_FIELDS: list[tuple[str, str, str]] = [
    ("TRL's own loss, in the server", compared("a mixture of experts"), "router_aux_loss_coef"),
    (
        "the model is built by TRL, in the server and in each worker",
        compared("a model that TRL builds"),
        "model_init_kwargs trust_remote_code",
    ),
    ("in the workers", compared("a model that TRL builds"), "cache_implementation"),
    ("the workers generate with vLLM; the server starts no engine", NO_ENGINE, "use_vllm"),
    ("an engine in each worker, or one server for one worker", SERVER_OR_ENGINE, "vllm_mode"),
    (
        "of each worker's engine; several GPUs need `--generator vllm-server`, and are refused otherwise",
        ENGINE_SETTINGS,
        "vllm_model_impl vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size",
    ),
    ("with vLLM, where the correction admits it; with transformers refused", REGEX, "vllm_structured_outputs_regex"),
    (
        "of the server that the worker feeds",
        I + "test_vllm_server.py::test_the_group_port_and_the_world_are_trls",
        "vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port",
    ),
    (
        "with `--correction trl`; else the start says what the loss is",
        I + "test_trl_corrections.py::test_trl_at_staleness_zero_is_trl_with_use_vllm",
        "vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max "
        "vllm_importance_sampling_clip_min vllm_importance_sampling_cap",
    ),
    ("in the workers, where tools run", compared("a limit of tool calls"), "max_tool_calling_iterations"),
    (
        "in the server, of the workers' completions",
        compared("completions that are logged"),
        "log_completions num_completions_to_print log_multimodal",
    ),
    (
        "the Hub is the server's alone",
        I + "test_worker_build.py::test_the_hub_is_the_servers_alone",
        "log_completions_hub_repo push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push "
        "hub_revision",
    ),
    (
        "evaluation is the trainer's own, where nothing else is said (`--eval-every`)",
        EVALUATES,
        "eval_strategy eval_steps eval_delay eval_on_start per_device_eval_batch_size num_generations_eval do_eval "
        "prediction_loss_only eval_do_concat_batches eval_use_gather_object eval_accumulation_steps "
        "include_for_metrics batch_eval_metrics bf16_full_eval fp16_full_eval",
    ),
    (
        "checkpoints are TRL's, with the state of the rollouts added",
        CHECKPOINTS,
        "output_dir save_strategy save_steps save_total_limit save_only_model save_on_each_node",
    ),
    ("in the server, which issues the rows left", compared("columns that are removed"), "remove_unused_columns"),
    ("in the server", BEST, "load_best_model_at_end metric_for_best_model greater_is_better"),
    (
        "what is reported to gets all that the server logs",
        I + "test_trl_training.py::test_what_report_to_names_is_told_everything",
        "report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id",
    ),
    (
        "the length of the training, and so of the schedules of the learning rate and of rewards",
        compared("reward functions"),
        "num_train_epochs",
    ),
    (
        "the trainer may span several processes",
        I + "test_ranks.py::test_sharded_ranks_train_an_adapter_as_one_process_does",
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout "
        "local_rank",
    ),
    ("version 2; version 1 is refused", REFUSALS, "fsdp fsdp_config"),
    ("in the server; workers sample without, as without dropout, and the start says so", NOISE, "neftune_noise_alpha"),
    ("the workers sample in the trainer's precision", ENGINE_SETTINGS, "bf16 fp16"),
]

# Why it makes no difference, and the fields.
IRRELEVANT: list[tuple[str, str]] = [
    ("the workers generate, and TRL's evaluation follows it", "ds3_gather_for_generation"),
    ("a worker's engine shares its memory with no training", "vllm_enable_sleep_mode"),
    (
        "the workers batch with continuous batching of their own; TRL's evaluation follows it",
        "use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged",
    ),
    (
        "transformers' own training loop, which runs unchanged in the server",
        "optim_args optim_target_modules adam_epsilon lr_scheduler_kwargs tf32 gradient_checkpointing_kwargs "
        "torch_compile torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config "
        "torch_empty_cache_steps include_num_input_tokens_seen full_determinism data_seed use_cpu "
        "accelerator_config skip_memory_metrics debug",
    ),
    (
        "how transformers writes its log; the step line of a run takes the place of its progress bar",
        "logging_strategy logging_first_step log_on_each_node logging_nan_inf_filter log_level log_level_replica "
        "disable_tqdm",
    ),
    (
        "the server draws the prompts itself, in TRL's order, and a resumed run knows which are left",
        "ignore_data_skip restore_callback_states_from_checkpoint dataloader_drop_last dataloader_num_workers "
        "dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor "
        "dataloader_multiprocessing_context dataloader_in_order",
    ),
    (
        "not read by GRPOTrainer in plain TRL either",
        "label_smoothing_factor label_names train_sampling_strategy length_column_name do_train do_predict "
        "resume_from_checkpoint",
    ),
    ("TRL refuses it", "auto_find_batch_size"),
]

# A field, the value that provokes the refusal, and what it says.
REFUSED: list[tuple[str, Any, str]] = [
    ("enable_jit_checkpoint", True, r"enable_jit_checkpoint.*Remove it"),
    ("parallelism_config", object(), r"parallelism_config.*FSDP2"),
    ("deepspeed", "zero3.json", r"deepspeed.*--accelerate-config"),
]

SHOWN_ARGUMENTS: list[tuple[str, str, str]] = [
    ("as in TRL", DIFFERENTIAL, " ".join(ARGUMENTS)),
    ("the server evaluates", EVALUATES, "eval_dataset"),
    ("in the workers", compared("a reward model"), "reward_processing_classes"),
    ("in the server; what they change of the sampling goes to the workers", LENGTHENED, "callbacks"),
    ("in the server", compared("an optimizer"), "optimizers"),
    ("shared like all frozen weights", I + "test_lora.py::test_qlora_shares_the_quantised_base", "quantization_config"),
    ("in the workers", compared("tools"), "tools"),
    ("in the workers", compared("a rollout_func"), "rollout_func"),
    ("in the workers", compared("an environment"), "environment_factory"),
]

# The test that shows an override at work, of each effect in `setup.overrides`, by one of its methods.
SHOWN_METHODS: dict[str, str] = {
    "__init__": compared("overrides"),
    "_generate": I + "test_rollout_groups.py::test_an_override_of_generate_runs_once",
    "_generate_single_turn": compared("a single turn"),
    "_tokenize_prompts": I + "test_rollout_groups.py::test_a_prompt_that_a_method_changes_stays_the_datasets",
    "_calculate_rewards": compared("overrides"),
    "_generate_and_score_completions": I + "test_rollout_groups.py::test_a_loop_of_the_users_own_runs_as_it_is",
    "get_train_dataloader": compared("a dataloader"),
    "_get_train_sampler": I + "test_rollout_groups.py::test_a_sampler_that_does_not_repeat_rows_is_refused",
    "_prepare_inputs": U
    + "training/test_rollout_source.py::test_a_trainer_that_takes_several_batches_for_one_step_gets_them",
    "compute_loss": compared("overrides"),
    "prediction_step": EVALUATES,
    "_log_metric": compared("overrides"),
    "_save_checkpoint": CHECKPOINTS,
}
