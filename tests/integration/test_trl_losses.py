"""TRL's losses and schedules, with rollouts from workers and with the same result.

Most tests run a trainer asynchronously with fresh weights for each batch (staleness 0), then give the recorded
completions to plain TRL and compare all that both have logged.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from async_grpo.training.corrections.rule import Rule, rule
from kit.compared_with_trl import TOLERANCE, largest_difference, run_as_trl_would, settings
from kit.in_process import InProcessRun, training_logs
from kit.recorded_batches import replay_with_trl
from kit.tiny_trainer import letters

pytestmark = pytest.mark.integration

SEQUENCES = [rule("tis", "sequence"), rule("icepop", "sequence"), rule("icepop", "geometric")]
LOSS_TYPES = ("grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")


# --- The key property: staleness 0 is TRL -----------------------------------------------------------------

SCHEDULES = {
    "dapo": {"loss_type": "dapo"},
    "grpo with beta": {"loss_type": "grpo", "beta": 0.1},
    "GSPO": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_twenty_steps_at_staleness_zero_equal_trl(
    name: str, tmp_path: Path, model_folder: str, record_property: Any
) -> None:
    get_trainer = settings(tmp_path, model=model_folder, max_steps=20, reward_funcs=[letters], **SCHEDULES[name])
    run = InProcessRun(get_trainer).train()
    plain = replay_with_trl(get_trainer, run.batches)

    assert len(run.logs) == 20
    taken = zip(run.batches, run.versions, strict=True)
    assert all(group.policy_version == version for batch, version in taken for group in batch)
    assert sum(entry["grad_norm"] > 0.1 for entry in run.logs) > 10, "the comparison must see gradients"
    record_property("largest_difference", largest_difference(run.logs, training_logs(plain)))
    weights = zip(run.trainer.model.parameters(), plain.model.parameters(), strict=True)
    record_property("largest_weight_difference", max((a - b).abs().max().item() for a, b in weights))


def test_the_comparison_sees_stale_groups(tmp_path: Path) -> None:
    """Plain TRL takes stale completions for fresh ones, so the comparison must fail: else it would show nothing."""
    get_trainer = settings(tmp_path, max_steps=3)
    run = InProcessRun(get_trainer, fresh_every=3).train()
    plain = replay_with_trl(get_trainer, run.batches)
    with pytest.raises(AssertionError, match="but TRL has"):
        largest_difference(run.logs, training_logs(plain))


# --- Losses and schedules ---------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_type(loss_type: str, tmp_path: Path) -> None:
    run_as_trl_would(settings(tmp_path, loss_type=loss_type))


@pytest.mark.parametrize("correction", [*map(rule, ("decoupled", "tis", "icepop", "none")), *SEQUENCES], ids=str)
@pytest.mark.parametrize("loss_type", ["dapo", "vespo"])
def test_corrections_change_nothing_of_fresh_groups(loss_type: str, correction: Rule, tmp_path: Path) -> None:
    if loss_type == "dapo" or correction.level == "token":  # vespo takes no other
        run_as_trl_would(settings(tmp_path, loss_type=loss_type), correction=correction)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_type_on_stale_groups(loss_type: str, tmp_path: Path) -> None:
    run = InProcessRun(settings(tmp_path, loss_type=loss_type, max_steps=4, learning_rate=1e-2), fresh_every=3)
    logs = run.train().logs
    assert [entry["async/staleness_max"] for entry in logs] == [0, 1, 2, 0]
    assert all(math.isfinite(entry["loss"]) and math.isfinite(entry["grad_norm"]) for entry in logs)


def test_the_ratio_of_a_stale_group_is_against_the_policy_that_sampled_it(tmp_path: Path) -> None:
    run = InProcessRun(settings(tmp_path, max_steps=3, learning_rate=3e-2), fresh_every=3).train()
    clipped = [entry["clip_ratio/region_mean"] for entry in run.logs]
    assert clipped[0] == 0
    assert clipped[2] > 0


SCHEDULING = {
    "several iterations": {"num_iterations": 2, "max_steps": 4},
    "accumulation": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
    "generation for several steps": {
        "steps_per_generation": 4,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 2,
        "max_steps": 4,
    },
    "all of it": {
        "num_iterations": 2,
        "steps_per_generation": 4,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 2,
        "max_steps": 8,
    },
    "logging every other step": {"logging_steps": 2, "max_steps": 4},
}


@pytest.mark.parametrize("name", SCHEDULING)
@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_schedules(name: str, loss_type: str, tmp_path: Path) -> None:
    run, _ = run_as_trl_would(settings(tmp_path, loss_type=loss_type, **SCHEDULING[name]))
    arguments = run.trainer.args
    micro_steps = arguments.max_steps * arguments.gradient_accumulation_steps
    assert len(run.batches) == micro_steps / (arguments.steps_per_generation * arguments.num_iterations)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_lora(beta: float, tmp_path: Path) -> None:
    peft = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    run, _ = run_as_trl_would(settings(tmp_path, {"peft_config": peft}, beta=beta))
    fresh = settings(tmp_path, {"peft_config": peft})().model.state_dict()
    changed = {name for name, value in run.trainer.model.state_dict().items() if not value.equal(fresh[name])}
    assert changed
    assert all("lora" in name for name in changed)


def test_truncated_completions_are_masked(tmp_path: Path) -> None:
    run, _ = run_as_trl_would(settings(tmp_path, mask_truncated_completions=True, seed=0, max_steps=4))
    end = run.trainer.eos_token_ids
    for groups, inputs in zip(run.batches, run.inputs, strict=True):
        lengths = [size for group in groups for size in group.completion_lengths.tolist()]
        last = [ids[size - 1] for ids, size in zip(inputs["completion_ids"].tolist(), lengths, strict=True)]
        kept = [size if token in end else 0 for token, size in zip(last, lengths, strict=True)]
        assert inputs["completion_mask"].sum(1).tolist() == kept
    assert any(0 < entry["completions/clipped_ratio"] < 1 for entry in run.logs)


# --- The sampler's log-probabilities ----------------------------------------------------------------------

SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature 0.7": {"temperature": 0.7},
    "a nucleus": {"top_p": 0.8, "top_k": 20, "min_p": 0.01},
    "another temperature and a penalty": {"generation_kwargs": {"temperature": 0.5, "repetition_penalty": 1.2}},
    "LoRA": {"given": {"peft_config": LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)}},
}


@pytest.mark.parametrize("name", SAMPLING)
def test_logprobs_of_worker_and_trainer_agree_at_equal_weights(name: str, tmp_path: Path, record_property: Any) -> None:
    run = InProcessRun(settings(tmp_path, **SAMPLING[name], max_completion_length=32)).train()
    trainer: Any = run.trainer
    inputs = trainer._generate_and_score_completions([])  # one more batch, at the weights of now
    with torch.no_grad():
        logprobs_BC, *_ = trainer._get_per_token_logps_and_entropies(
            trainer.model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].shape[1],
        )
    assert not inputs["prompt_mask"].all(), "the prompts must differ in length, so that some are padded"
    differences = (logprobs_BC - inputs["sampling_per_token_logps"])[inputs["completion_mask"].bool()].abs()
    record_property("largest_difference", differences.max().item())
    assert differences.max() < TOLERANCE
    assert logprobs_BC.std() > 0.5, "the comparison must see a distribution that is not uniform"
