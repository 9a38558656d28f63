"""`TurnGRPOTrainer`: the same in plain TRL and in a run, where turn rewards travel with the group."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trl import GRPOTrainer
from trl_contract import moved

from async_grpo.credit import TurnGRPOTrainer
from async_grpo.credit import trainer as hooks
from async_grpo.errors import UnsupportedError
from async_grpo.roles import replay
from async_grpo.settings import TrainingSettings
from async_grpo.setup.overrides import overridden
from async_grpo.training.corrections.rule import rule
from async_grpo.training.groups_for_trl import require_columns
from async_grpo.training.trl_trainer import uniform_rewards
from kit.compared_with_trl import equal_weights, own_names, settings
from kit.in_process import InProcessRun, InProcessWorker, jobs_of, training_logs
from kit.scripted import ScriptedEngine
from kit.tiny_trainer import QWEN3_CHAT_TEMPLATE, chat_rows
from kit.tools import Adder, double
from kit.turns import Script, called, reply, says_eight


class Scripted(TurnGRPOTrainer):
    """In plain TRL, the model writes the script."""

    batches: list[dict[str, Any]]

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return Script(reply).generate(prompt_ids)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        self.batches = [*getattr(self, "batches", []), output]
        return output


async def each_turn(completions: list[Any], **_: Any) -> list[list[float | None]]:
    turns = [[message for message in completion if message["role"] == "assistant"] for completion in completions]
    return [[0.1 * (at + 1) if "tool_calls" in turn else None for at, turn in enumerate(own)] for own in turns]


def turn_trainer(folder: Path, turn_reward_funcs: Any = (called, each_turn), credit: str = "turn", **more: Any) -> Any:
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
    return settings(folder, given, **{**settled, **more})


def served(get_trainer: Any) -> InProcessRun:
    return InProcessRun(get_trainer, engine=ScriptedEngine(Script(reply))).train()


def test_a_run_gives_the_advantages_of_plain_trl(tmp_path: Path) -> None:
    """One credit; `tests/unit/credit` has what each makes of turns. TRL calls async functions after all others."""
    weights = {"turn_reward_funcs": (each_turn, called), "reward_weights": [1.0, 0.5, 2.0]}
    get_trainer = turn_trainer(tmp_path, mask_truncated_completions=True, **weights)
    run = served(get_trainer)
    plain = get_trainer(trainer_class=Scripted)
    plain.train()
    mine, theirs = run.inputs[0]["advantages"], plain.batches[0]["advantages"]
    assert mine.shape == run.inputs[0]["completion_ids"].shape
    assert torch.allclose(mine, theirs, atol=1e-6)
    assert bool((mine[run.inputs[0]["tool_mask"] == 0] == 0).all())
    lost = run.inputs[0]["completion_mask"].sum(dim=1) == 0
    assert 0 < lost.sum() < len(lost)
    assert mine.any(dim=1).tolist() == (~lost).tolist()
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


def test_the_reward_of_turns_is_the_sum_over_all_of_them(tmp_path: Path) -> None:
    rewards, turns = torch.tensor([[1.0, 0.5, 0.1]]), [[0.2, 0.4]]
    [of_two] = turn_trainer(tmp_path, credit="cae")()._completions(rewards, turns, masks=[[1, 0, 1]])
    assert (of_two.outcome, of_two.total) == pytest.approx((1.0, 0.6))


def test_no_turn_reward_measures_and_does_not_train(tmp_path: Path) -> None:
    measured = served(turn_trainer(tmp_path, no_turn_reward=True))
    outcome = served(turn_trainer(tmp_path, credit="outcome"))
    assert measured.inputs[0]["advantages"].tolist() == outcome.inputs[0]["advantages"].tolist()
    assert measured.logs[0]["reward/turn"] > 0


def test_a_replay_trains_on_the_turn_rewards_again_and_shows_them(tmp_path: Path) -> None:
    get_trainer = turn_trainer(tmp_path)
    run, again = served(get_trainer), get_trainer()
    (tmp_path / "replay").mkdir()
    replay._train(again, iter(run.batches), rule("bypass"), TrainingSettings(), tmp_path / "replay")
    assert equal_weights(run.trainer.model, again.model)
    step = json.loads((tmp_path / "replay" / "metrics.jsonl").read_text().splitlines()[0])
    shown = ["reward/turn", "reward/outcome", "reward_std/turn", "rewards/turn/called/mean", "completions/turns_mean"]
    assert [step[name] for name in shown] == [run.logs[0][name] for name in shown]
    assert step["reward/turn"] > 0


class Judge:
    """An object with an async `__call__`, and numbers of other libraries."""

    async def __call__(self, completions: list[Any], **_: Any) -> list[Any]:
        return [np.float32(0.5) for _ in completions]


def test_turn_rewards_of_every_form(tmp_path: Path) -> None:
    """The dialogues are stepped: our class is no override of the user's."""

    def of_turns(value: Any) -> Any:
        return lambda completions, **_: [value] * len(completions)  # functions of one name

    given = [of_turns(torch.tensor([2.0])), of_turns(np.array([1.0])), of_turns([float("nan")]), Judge(), of_turns(4)]
    trainer = turn_trainer(tmp_path, turn_reward_funcs=given, reward_weights=[1.0, 1.0, 10.0, 100.0, 1000.0, 0.1])()
    worker = InProcessWorker(trainer, ScriptedEngine(Script(lambda *_: "no")))
    assert worker.trl.goes_by_turns
    (group,) = worker.rollouts(jobs_of(chat_rows(1), group_size=4))
    assert group.rewards_of_turns() == [pytest.approx([2 + 10 + 500 + 0.4])] * 4


def test_turn_rewards_of_groups_that_shared_a_call(tmp_path: Path) -> None:
    def numbers(completions: list[Any], **_: Any) -> list[float]:
        return [float(sum(map(ord, str(completion)))) for completion in completions]

    trainer = turn_trainer(tmp_path, turn_reward_funcs=[numbers, Judge()], reward_weights=[1.0, 1.0, 1.0])()
    worker = InProcessWorker(trainer, ScriptedEngine(Script(reply)))
    groups = worker.generate(jobs_of(chat_rows(3), group_size=4))
    together = worker.trl.score(groups)
    alone = [worker.trl.score([group])[0] for group in groups]
    ours, theirs = ([str(scores.columns) for scores in made] for made in (together, alone))  # there are NaN
    assert ours == theirs
    assert all(torch.equal(one.rewards, other.rewards) for one, other in zip(together, alone, strict=True))


WRONG = {"gave 3 rewards for a completion of 1 turns": [1.0, 2.0, 3.0], "gave a str to a completion": "abc"}


@pytest.mark.parametrize(("message", "given"), WRONG.items())
def test_turn_rewards_of_the_wrong_form_fail_their_group(given: Any, message: str, tmp_path: Path) -> None:
    def wrong(completions: list[Any], **_: Any) -> list[Any]:
        return [given for _ in completions]

    worker = InProcessWorker(turn_trainer(tmp_path, turn_reward_funcs=wrong)(), ScriptedEngine(Script(reply)))
    with pytest.raises(ValueError, match=f"'wrong' {message}"):
        worker.rollouts(jobs_of(chat_rows(1), group_size=4))


def test_recursive_credit_refuses_turns_that_the_model_decides(tmp_path: Path) -> None:
    class Fixed(Adder):
        fixed_turns = True

    with pytest.raises(ValueError, match=r"recursive.*reward_to_go"):
        turn_trainer(tmp_path, credit="recursive")()
    given = {"tools": None, "environment_factory": Fixed, "credit": "recursive", "turn_reward_funcs": (called,)}
    assert turn_trainer(tmp_path)(arguments=given).credit.kind == "recursive"


def test_a_run_says_once_that_turn_has_two_levels(tmp_path: Path, warnings: list[str]) -> None:
    def every_turn(completions: list[Any], **_: Any) -> list[list[float]]:
        return [[0.1 for message in completion if message["role"] == "assistant"] for completion in completions]

    for _ in range(2):
        served(turn_trainer(tmp_path, credit="turn", turn_reward_funcs=every_turn))
    assert ["reward_to_go" in line for line in warnings if "several turns" in line] == [True]


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"credit": "last"}, "credit must be one of outcome"),
        ({"scale_rewards": "batch"}, 'scale_rewards="batch"'),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "multi_objective_aggregation"),
        ({"turn_reward_funcs": ["org/reward-model"]}, "turn_reward_funcs are functions, got a str"),
    ],
)
def test_what_a_turn_trainer_refuses(settings_: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        turn_trainer(tmp_path, **settings_)()


def test_which_groups_teach_nothing(tmp_path: Path) -> None:
    """Turn rewards that make up for the outcome's: the sums are equal, and the advantages are not."""

    def makes_up(completions: list[Any], **_: Any) -> list[float]:
        return [1.0 - reward for reward in says_eight(completions)]

    nothing = {"outcome": False, "merged": True, "turn": False}
    for credit, right in nothing.items():
        trainer = turn_trainer(tmp_path, turn_reward_funcs=makes_up, credit=credit)()
        worker = InProcessWorker(trainer, ScriptedEngine(Script(reply)))
        (group,) = worker.rollouts(jobs_of(chat_rows(1), group_size=4))
        assert uniform_rewards(trainer)(group) == right, credit
    with pytest.raises(UnsupportedError, match=r"group 0 has no turn rewards: .*another trainer than TurnGRPOTrainer"):
        require_columns(trainer, [replace(group, turn_counts=None, turn_rewards=None)])


def test_the_hooks_of_turn_credit(tmp_path: Path) -> None:
    for name in hooks.HOOKS:
        assert hasattr(GRPOTrainer, name), moved(f"GRPOTrainer.{name}", "is gone", "async_grpo.credit.trainer")
    trainer = turn_trainer(tmp_path)()
    assert set(hooks.HOOKS) - set(overridden(trainer)) == {"_generate"}, "which is noted, not overridden"
    assert isinstance(trainer._metrics["train"]["x"], list)
