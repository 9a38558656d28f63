"""Which prompts a run takes, in the order of TRL's own sampler; and the trainers that are refused."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trl import GRPOTrainer

from async_grpo.errors import UnsupportedError
from async_grpo.rollout.trl_trainer import RolloutTrainer
from async_grpo.training.prompts import prompt_rows
from async_grpo.training.trl_trainer import refuse_unsupported
from kit.compared_with_trl import settings
from kit.in_process import InProcessRun
from kit.tiny_trainer import PROMPTS, build_trainer, letters, plain_rows

pytestmark = pytest.mark.integration


ORDERS: dict[str, dict[str, Any]] = {
    "one batch a step": {"per_device_train_batch_size": 8, "max_steps": 8},
    "not shuffled": {"per_device_train_batch_size": 8, "max_steps": 8, "shuffle_dataset": False},
    "iterations and steps per generation": {
        "per_device_train_batch_size": 2,
        "num_iterations": 2,
        "steps_per_generation": 4,
        "gradient_accumulation_steps": 4,
        "max_steps": 14,
    },
}


@pytest.mark.parametrize("streamed", [False, True], ids=["dataset", "iterable dataset"])
@pytest.mark.parametrize("name", ORDERS)
def test_prompts_come_in_the_order_of_trl(name: str, streamed: bool, tmp_path: Path) -> None:
    """More than two epochs of 14 rows, of which 3 batches of 4 prompts can be made."""
    drawn: list[str] = []

    def note_prompts(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        drawn.extend(prompts)
        return letters(completions)

    def get_trainer() -> GRPOTrainer:
        rows = plain_rows()
        rows = rows.to_iterable_dataset() if streamed else rows
        return build_trainer(
            tmp_path, train_dataset=rows, reward_funcs=note_prompts, max_completion_length=1, **ORDERS[name]
        )

    plain = get_trainer()
    plain.train()
    expected = drawn[:: plain.num_generations]
    assert plain.state.epoch > 2
    assert set(expected) <= set(PROMPTS)

    rows = list(islice(prompt_rows(get_trainer()), len(expected)))
    assert [row["prompt"] for row in rows] == expected
    assert all(row["target"] == len(row["prompt"]) for row in rows)
    for start in (1, 5, 13, 20):
        later = islice(prompt_rows(get_trainer(), start=start), len(expected) - start)
        assert list(later) == rows[start:]


def test_too_few_rows_for_a_batch(tmp_path: Path) -> None:
    for rows in (plain_rows(3), plain_rows(3).to_iterable_dataset()):
        trainer = build_trainer(tmp_path, train_dataset=rows, per_device_train_batch_size=8)
        with pytest.raises(UnsupportedError, match="fewer than one generation batch"):
            next(prompt_rows(trainer))


def test_a_sampler_that_does_not_repeat_rows_is_refused(tmp_path: Path) -> None:
    """By the name of the user's class, though the trainer has another one by then."""

    class Unrepeated(GRPOTrainer):
        def _get_train_sampler(self, dataset: Any = None) -> Iterator[int]:
            return iter(range(100))

    run = InProcessRun(settings(tmp_path, trainer_class=Unrepeated))
    way_out = r"Change _get_train_sampler.*without --distributed"
    with pytest.raises(UnsupportedError, match=rf"^Unrepeated's.*num_generations=2.*{way_out}"):
        next(prompt_rows(run.trainer))


# --- Refusals ---------------------------------------------------------------------------------------------


def stand_in(**changes: Any) -> Any:
    """What `refuse_unsupported` looks at, of a trainer that needs no such hardware to be built."""
    values = {"use_vllm": False, "deepspeed": None, "fsdp": None, **changes}
    fsdp = values.pop("fsdp")
    return SimpleNamespace(
        args=SimpleNamespace(**values),
        is_deepspeed_enabled=False,
        is_fsdp_enabled=fsdp is not None,
        accelerator=SimpleNamespace(is_fsdp2=fsdp == 2),
    )


@pytest.mark.parametrize(
    ("changes", "setting", "way_out"),
    [
        ({"deepspeed": "zero3.json"}, "`deepspeed` of the GRPOConfig", "--accelerate-config"),
        ({"fsdp": 1}, "FSDP of version 1", "`fsdp_version: 2`"),
        ({"use_vllm": True}, "use_vllm=True", "give it to the GRPOConfig"),
    ],
)
def test_refusals_name_the_setting_and_the_way_out(changes: dict[str, Any], setting: str, way_out: str) -> None:
    with pytest.raises(UnsupportedError) as refusal:
        refuse_unsupported(stand_in(**changes))
    assert setting in str(refusal.value)
    assert way_out in str(refusal.value)


def test_a_real_trainer_is_not_refused(tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path)
    refuse_unsupported(trainer)


def test_a_worker_refuses_vllm_that_is_asked_for_too_late(tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path)
    trainer.args.use_vllm = True
    with pytest.raises(UnsupportedError, match=r"use_vllm=True.*give it to the GRPOConfig"):
        RolloutTrainer(trainer)


def test_a_rollout_func_without_logprobs_is_refused(tmp_path: Path) -> None:
    def rollout_func(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        ids = [[1, 2, 3] for _ in prompts]
        return {"prompt_ids": ids, "completion_ids": ids, "logprobs": None}

    run = InProcessRun(settings(tmp_path, {"rollout_func": rollout_func}))
    with pytest.raises(UnsupportedError, match=r"rollout_func.*'logprobs'"):
        run.train()
