"""Groups that have ended are handed over while others are still being generated, and are what comes back in the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import build_trainer, chat_rows, plain_rows
from trl.chat_template_utils import qwen3_chat_template

from async_grpo.rollout.trl_hooks import GeneratedGroup, make_rollout_trainer

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
