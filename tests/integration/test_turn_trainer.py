"""`TurnGRPOTrainer`: the same in plain TRL and in a run, where turn rewards travel with the group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compared_with_trl import own_names, settings
from in_process import (
    QWEN3_CHAT_TEMPLATE,
    InProcessRun,
    InProcessWorker,
    ScriptedEngine,
    ScriptedGenerator,
    build_tokenizer,
    chat_rows,
    jobs_of,
    training_logs,
)
from test_dialogues import double, written
from trl import GRPOTrainer
from trl_contract import moved

from async_grpo.credit import CREDITS, TurnGRPOTrainer
from async_grpo.credit import trainer as hooks
from async_grpo.setup.overrides import overridden

pytestmark = pytest.mark.integration


def reply(prompt: str, place: int) -> str:
    if "<tool_response>" in prompt:
        return "four" if place % 2 else "eight"
    return written(("double", {"number": place % 4 + 1})) if place % 4 else "no"


class Scripted(TurnGRPOTrainer):
    """In plain TRL, the model writes the script."""

    batches: list[dict[str, Any]]

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return ScriptedGenerator(self._tokenizer, reply).generate(prompt_ids)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        self.batches = [*getattr(self, "batches", []), output]
        return output


def says_eight(completions: list[Any], **_: Any) -> list[float]:
    return [float(completion[-1]["content"] == "eight") for completion in completions]


def called(completions: list[Any], **_: Any) -> list[float]:
    return [0.2 * (len(completion) > 1) for completion in completions]


async def each_turn(completions: list[Any], **_: Any) -> list[list[float | None]]:
    turns = [[message for message in completion if message["role"] == "assistant"] for completion in completions]
    return [[0.1 * (at + 1) if "tool_calls" in turn else None for at, turn in enumerate(own)] for own in turns]


def turn_trainer(
    tmp_path: Path, turn_reward_funcs: Any = (called, each_turn), credit: str = "turn", **more: Any
) -> Any:
    given = {"tools": [double], "turn_reward_funcs": turn_reward_funcs, "credit": credit}
    given |= {"no_turn_reward": True} if more.pop("no_turn_reward", False) else {}
    settled: dict[str, Any] = {
        "chat_template": QWEN3_CHAT_TEMPLATE,
        "reward_funcs": [says_eight],
        "max_completion_length": 256,
        "num_generations": 4,
        "max_steps": 1,
        "shuffle_dataset": False,
        "trainer_class": TurnGRPOTrainer,
    }
    return settings(tmp_path, given, **{**settled, **more})


def served(get_trainer: Any) -> InProcessRun:
    engine = ScriptedEngine(ScriptedGenerator(build_tokenizer(QWEN3_CHAT_TEMPLATE), reply))
    return InProcessRun(get_trainer, engine=engine).train()


@pytest.mark.parametrize("credit", [name for name in CREDITS if name != "recursive"])
def test_a_run_gives_the_advantages_of_plain_trl(credit: str, tmp_path: Path) -> None:
    get_trainer = turn_trainer(tmp_path, credit=credit, reward_weights=[1.0, 2.0, 0.5])
    run = served(get_trainer)
    plain = get_trainer(trainer_class=Scripted)
    plain.train()
    mine, theirs = run.inputs[0]["advantages"], plain.batches[0]["advantages"]
    assert mine.shape == run.inputs[0]["completion_ids"].shape
    assert torch.allclose(mine, theirs, atol=1e-6)
    assert bool((mine[run.inputs[0]["tool_mask"] == 0] == 0).all())
    assert bool(mine.any())
    (ours,), (log,) = run.logs, training_logs(plain)
    assert own_names(ours) == set(log)
    for name in log:
        if name.startswith(("reward", "completions/", "tools/")):
            assert ours[name] == pytest.approx(log[name]), name
    assert {"rewards/turn/called/mean", "rewards/outcome/says_eight/mean", "reward_std/combined"} <= log.keys()
    assert log["completions/turns_mean"] == 1.75
    group = run.groups[0]
    assert group.turn_counts is not None
    assert group.turn_counts.tolist() == [1, 2, 2, 2]
    first = [row[0] for row in group.rewards_of_turns()]
    assert first == pytest.approx([0.0, 0.45, 0.45, 0.45]), "2 x 0.2 + 0.5 x 0.1"
    assert [str(row[1:]) for row in group.rewards_of_turns()[1:]] == ["[nan]"] * 3


def test_merged_credit_is_grpo_on_the_sum(tmp_path: Path) -> None:
    get_trainer = turn_trainer(tmp_path, turn_reward_funcs=called, credit="merged")
    run = served(get_trainer)
    rewards = torch.cat([torch.from_numpy(group.rewards) for group in run.groups]).sum(dim=1).view(-1, 4)
    right = (rewards - rewards.mean(dim=1, keepdim=True)) / (rewards.std(dim=1, keepdim=True) + 1e-4)
    assert run.inputs[0]["advantages"][:, 0].tolist() == pytest.approx(right.flatten().tolist(), abs=1e-5)


def test_no_turn_reward_measures_and_does_not_train(tmp_path: Path) -> None:
    measured = served(turn_trainer(tmp_path, no_turn_reward=True))
    outcome = served(turn_trainer(tmp_path, credit="outcome"))
    assert measured.inputs[0]["advantages"].tolist() == outcome.inputs[0]["advantages"].tolist()
    assert measured.logs[0]["reward/turn"] > 0


def test_the_dialogues_of_a_turn_trainer_are_stepped(tmp_path: Path) -> None:
    """Our class is no override of the user's, or its tools would run one after another."""
    worker = InProcessWorker(turn_trainer(tmp_path)())
    assert worker.trl.goes_by_turns


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([1.0, 2.0, 3.0], "'wrong' gave 3 rewards for a completion of 1 turns"),
        ("abc", "'wrong' gave a str to a completion"),
    ],
)
def test_turn_rewards_of_the_wrong_form_fail_their_group(given: Any, message: str, tmp_path: Path) -> None:
    def wrong(completions: list[Any], **_: Any) -> list[Any]:
        return [given for _ in completions]

    engine = ScriptedEngine(ScriptedGenerator(build_tokenizer(QWEN3_CHAT_TEMPLATE), reply))
    worker = InProcessWorker(turn_trainer(tmp_path, turn_reward_funcs=wrong)(), engine)
    with pytest.raises(ValueError, match=message):
        worker.rollouts(jobs_of(chat_rows(1), group_size=4))


def test_recursive_credit_refuses_turns_that_differ(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"recursive.*completions of 1 and 2 turns"):
        served(turn_trainer(tmp_path, credit="recursive"))


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"credit": "last"}, "credit must be one of outcome"),
        ({"scale_rewards": "batch"}, 'scale_rewards="batch"'),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "multi_objective_aggregation"),
    ],
)
def test_what_a_turn_trainer_refuses(settings_: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        turn_trainer(tmp_path, **settings_)()


def test_the_hooks_of_turn_credit(tmp_path: Path) -> None:
    for name in hooks.HOOKS:
        assert hasattr(GRPOTrainer, name), moved(f"GRPOTrainer.{name}", "is gone", "async_grpo.credit.trainer")
    trainer = turn_trainer(tmp_path)()
    assert set(hooks.HOOKS) <= set(overridden(trainer))
    assert isinstance(trainer._metrics["train"]["x"], list)
