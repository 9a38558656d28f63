"""Groups that leave TRL before the others, and groups that are made in two halves, are the groups that TRL makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import build_trainer, chat_rows, plain_rows
from trl import GRPOTrainer
from trl.chat_template_utils import qwen3_chat_template

from async_grpo.rollout.trl_trainer import GeneratedGroup, make_rollout_trainer

GROUP_SIZE = 2
TOKENS = 200


@pytest.mark.parametrize("chat_template", [None, qwen3_chat_template], ids=["text", "chat"])
def test_early_groups_are_the_groups_that_come_back(chat_template: str | None, tmp_path: Path) -> None:
    rows = plain_rows() if chat_template is None else chat_rows()
    worker: Any = build_trainer(tmp_path, chat_template=chat_template, max_completion_length=TOKENS)
    make_rollout_trainer(worker)
    early: dict[int, GeneratedGroup] = {}
    tokens, told_at = [0], []
    worker.generator.on_step = lambda: tokens.__setitem__(0, tokens[0] + 1)

    def hand_over(groups: dict[int, GeneratedGroup]) -> None:
        assert not early.keys() & groups.keys(), "each of them once"
        told_at.append(tokens[0])
        early.update(groups)

    torch.manual_seed(0)
    groups = worker.generate_groups(list(rows), GROUP_SIZE, hand_over)
    assert len(groups) == len(rows)
    assert 0 < len(early) < len(groups), "the last to end are not early"
    assert told_at[0] < tokens[0]
    for index, group in early.items():
        last = groups[index]
        assert (group.rows, group.prompts, group.completions) == (last.rows, last.prompts, last.completions)
        assert (group.prompt_ids, group.completion_ids, group.logprobs) == (
            last.prompt_ids,
            last.completion_ids,
            last.logprobs,
        )
        assert worker.score(group).rewards.tolist() == worker.score(last).rewards.tolist()
        longest = max(map(len, group.completion_ids))
        assert longest in told_at, "handed over with the last token of its last completion"


def test_nobody_asks_for_early_groups_and_none_are_made(tmp_path: Path) -> None:
    worker: Any = build_trainer(tmp_path, max_completion_length=TOKENS)
    make_rollout_trainer(worker)
    torch.manual_seed(0)
    first = worker.generate_groups(list(plain_rows()), GROUP_SIZE)
    torch.manual_seed(0)
    second = worker.generate_groups(list(plain_rows()), GROUP_SIZE, lambda groups: None)
    assert [group.completion_ids for group in first] == [group.completion_ids for group in second]


@pytest.mark.parametrize("chat_template", [None, qwen3_chat_template], ids=["text", "chat"])
def test_two_halves_make_the_same_groups(chat_template: str | None, tmp_path: Path) -> None:
    rows = list(plain_rows() if chat_template is None else chat_rows())
    worker: Any = build_trainer(tmp_path, chat_template=chat_template, max_completion_length=TOKENS)
    make_rollout_trainer(worker)
    assert worker.samples_whole
    generator = worker.generator
    torch.manual_seed(0)
    whole = worker.generate_groups(rows, GROUP_SIZE)
    prepared = worker.prepare_groups(rows, GROUP_SIZE)
    assert [one.prompt_ids for one in prepared] == [group.prompt_ids for group in whole]
    torch.manual_seed(0)
    ids, logprobs = generator.generate([ids for one in prepared for ids in one.prompt_ids])
    parts = [slice(start, start + GROUP_SIZE) for start in range(0, len(ids), GROUP_SIZE)]
    halves = worker.finish_groups(prepared, [(ids[part], logprobs[part]) for part in parts])
    for one, other in zip(whole, halves, strict=True):
        for field in ("rows", "prompts", "completions", "prompt_ids", "completion_ids", "logprobs", "metrics"):
            assert getattr(one, field) == getattr(other, field)


class Counting(GRPOTrainer):
    """Puts before each prompt how often it was asked to tokenize."""

    asked = 0

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        self.asked += 1
        ids, *others = super()._tokenize_prompts(prompts)
        return [[self.asked, *row] for row in ids], *others


def test_prompts_are_made_once(tmp_path: Path) -> None:
    """A template may ask for the time of day: what is handed back is what was sampled from."""
    worker: Any = build_trainer(tmp_path, trainer_class=Counting, max_completion_length=TOKENS)
    make_rollout_trainer(worker)
    prepared = worker.prepare_groups([plain_rows()[0]], GROUP_SIZE)
    (group,) = worker.finish_groups(prepared, [([[5]] * GROUP_SIZE, [[-1.0]] * GROUP_SIZE)])
    assert worker.asked == 1
    assert [ids[0] for ids in group.prompt_ids] == [1] * GROUP_SIZE


class OwnLoop(GRPOTrainer):
    """Asks for tokens twice, which nobody outside can know."""

    def _generate(self, prompts: list[Any]) -> Any:
        first = super()._generate(prompts)
        super()._generate(prompts)
        return first


class OwnBatch(GRPOTrainer):
    """Sees every batch, and may count them."""

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Any:
        return super()._generate_and_score_completions(inputs)


@pytest.mark.parametrize("kind", [OwnLoop, OwnBatch])
def test_a_loop_of_the_users_own_is_left_alone(kind: type[GRPOTrainer], tmp_path: Path) -> None:
    worker: Any = build_trainer(tmp_path, trainer_class=kind, max_completion_length=TOKENS)
    make_rollout_trainer(worker)
    assert not worker.samples_whole
    early: list[Any] = []
    assert len(worker.generate_groups(list(plain_rows()), GROUP_SIZE, early.append)) == len(plain_rows())
    assert early == [], "what is sampled first may be a part of the completion"
