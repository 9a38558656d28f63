"""Which of the rows are used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from parquet_files import parquet, row

from async_grpo.errors import UsageError
from async_grpo.tasks import load, sampled, within


class Words:
    """A tokenizer with one token a word, whose template adds two."""

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[str]]]:
        return {"input_ids": [text.split() for text in texts]}

    def apply_chat_template(self, prompts: list[Any], *, tokenize: bool, add_generation_prompt: bool) -> list[str]:
        assert not tokenize and add_generation_prompt
        return [f"<user> {prompt[0]['content']} <assistant>" for prompt in prompts]


@pytest.mark.parametrize(("templated", "longest"), [(False, 3), (True, 5)])
def test_prompts_that_are_too_long_are_refused_or_left_out(
    tmp_path: Path, templated: bool, longest: int, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["one two three", "one two three four", "one"]
    dataset = load(parquet(tmp_path / "a.parquet", *(row(prompt=it, apply_chat_template=templated) for it in texts)))
    assert within(dataset, Words(), longest + 1) is dataset
    with pytest.raises(UsageError, match=rf"row 2 of the data \(math__sums\) has {longest + 1} tokens, and at most"):
        within(dataset, Words(), longest)
    assert within(dataset, Words(), longest, drop=True)["extra_info"] == dataset.select([0, 2])["extra_info"]
    assert len(within(dataset, Words(), longest, drop=True)) == 2
    assert f"1 of 3 rows have over {longest} tokens, and are left out" in capsys.readouterr().out
    with pytest.raises(UsageError, match="Every prompt has over 0 tokens"):
        within(dataset, Words(), 0, drop=True)


def test_a_sample_has_of_each_task_its_share(tmp_path: Path) -> None:
    files = {
        "math": parquet(tmp_path / "m.parquet", *(row(prompt=f"{number}") for number in range(30))),
        "logic": parquet(tmp_path / "l.parquet", *(row(prompt=f"{number}") for number in range(10))),
        "code": parquet(tmp_path / "c.parquet"),
    }
    tasks = load(files, separate=True)
    some = sampled(tasks, 20, seed=1)
    assert {task: len(own) for task, own in some.items()} == {"math": 14, "logic": 4, "code": 1}
    assert some["math"]["prompt"] == sampled(tasks, 20, seed=1)["math"]["prompt"] != tasks["math"]["prompt"][:14]
    assert sampled(tasks, 41, seed=1) == tasks
