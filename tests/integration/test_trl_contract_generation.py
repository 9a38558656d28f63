"""What our hooks rely on in TRL's generation, its rewards and its counting, checked against the installed version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from trl import GRPOTrainer
from trl_contract import PROMPTS, ROLLOUT, TRAINING, moved, scripted_rollout, twice

from async_grpo.rollout.trl_view import COUNTED_BY_TRL
from async_grpo.training import trl_trainer as training_hooks
from kit.tiny_trainer import QWEN3_CHAT_TEMPLATE, build_trainer, letters, plain_rows


def test_generate_returns_eight_things(tmp_path: Path) -> None:
    trainer: Any = build_trainer(tmp_path, arguments={"rollout_func": scripted_rollout})
    prompts = ["a", "a", "bc", "bc"]
    result = trainer._generate(prompts)
    expected = scripted_rollout(prompts, trainer)
    completions = trainer.processing_class.batch_decode(expected["completion_ids"], skip_special_tokens=True)
    values = {
        "prompt_ids": expected["prompt_ids"],
        "completion_ids": expected["completion_ids"],
        "tool_mask": expected["env_mask"],
        "completions": completions,
        "logprobs": expected["logprobs"],
        "extra_fields": {"score": expected["score"]},
        "images": None,
        "tool_images": [],
    }
    change = f"returns {len(result)} things, not {[*values]}"
    assert len(result) == len(values), moved("GRPOTrainer._generate", change, TRAINING, ROLLOUT)
    for (name, right), value in zip(values.items(), result, strict=True):
        change = f"has {value!r} in the place of {name}"
        assert value == right, moved("GRPOTrainer._generate", change, TRAINING, ROLLOUT)


class Recording(GRPOTrainer):
    """Samples two tokens, and notes each call with what it was given or returns."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.calls: list[tuple[str, Any]] = []

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        tokenized = super()._tokenize_prompts(prompts)
        self.calls.append(("_tokenize_prompts", tokenized[0]))
        return tokenized

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.calls.append(("_generate_single_turn", prompt_ids))
        return [[1, 2] for _ in prompt_ids], [[-1.0, -2.0] for _ in prompt_ids]

    def _generate(self, prompts: list[Any]) -> Any:
        result = super()._generate(prompts)
        self.calls.append(("_generate", result))
        return result

    def _calculate_rewards(self, *args: Any) -> torch.Tensor:
        self.calls.append(("_calculate_rewards", args))
        return super()._calculate_rewards(*args)


def test_a_batch_is_tokenized_sampled_and_scored_through_our_overrides(tmp_path: Path) -> None:
    trainer: Any = build_trainer(tmp_path, trainer_class=Recording)
    rows = twice(plain_rows(4))
    output = trainer._generate_and_score_completions(rows)
    names = [name for name, _ in trainer.calls]
    expected = ["_tokenize_prompts", "_generate_single_turn", "_generate", "_calculate_rewards"]
    change = f"does not tokenize, sample and score once each, but calls {names}"
    assert names == expected, moved("GRPOTrainer._generate_and_score_completions", change, TRAINING, ROLLOUT)
    (_, tokenized), (_, sampled), (_, (_, completion_ids, _, completions, *_)), (_, scored) = trainer.calls
    prompts = [row["prompt"] for row in rows]
    prompt_ids = trainer.processing_class(prompts)["input_ids"]
    assert tokenized == prompt_ids, moved("GRPOTrainer._tokenize_prompts", "returns no token ids", ROLLOUT)
    assert sampled == prompt_ids, moved("GRPOTrainer._generate_single_turn", "gets no list of token ids", ROLLOUT)
    assert output["completion_ids"].tolist() == completion_ids == [[1, 2]] * 8
    assert output["sampling_per_token_logps"].tolist() == [[-1.0, -2.0]] * 8, moved(
        "GRPOTrainer._generate_single_turn", "'s log-probabilities do not reach the loss", ROLLOUT
    )
    assert scored == (rows, prompts, completions, completion_ids), moved(
        "GRPOTrainer._calculate_rewards", f"is called with {scored}", TRAINING, ROLLOUT
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
    """The trainer side counts it again; a metric of another name is taken for one of the user's and comes twice."""
    trainer: Any = build_trainer(tmp_path, reward_funcs=[letters], chat_template=QWEN3_CHAT_TEMPLATE)
    trainer._generate([row["prompt"] for row in twice(trainer.train_dataset)])
    unknown = trainer._metrics["train"].keys() - COUNTED_BY_TRL
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
