"""The named sets of problems: rows of files and of what is made, and their rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from async_grpo.errors import UsageError
from async_grpo_experiments.problems.table import BOXED, load
from async_grpo_experiments.worlds.enumerable import ascents_reward

ROWS: list[dict[str, Any]] = [{"question": "1+1?", "answer": "so\n#### 2"}, {"question": "2+2?", "answer": "#### 4"}]


@pytest.fixture(params=["rows.jsonl", "rows.parquet", "folder"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    file, rows = tmp_path / request.param, Dataset.from_list(ROWS)
    {".jsonl": rows.to_json, ".parquet": rows.to_parquet, "": rows.save_to_disk}[file.suffix](file)
    return file


def test_a_set_of_the_hub_is_read_from_a_path(path: Path) -> None:
    problems = load("GSM8K", path=path, chat=True, max_examples=1)
    assert problems.rows == [{"prompt": [{"role": "user", "content": f"1+1?\n{BOXED}"}], "answer": "so\n#### 2"}]
    assert problems.reward is not None and problems.verified
    assert problems.reward([r"\boxed{2}", "3"], answer=["so\n#### 2"] * 2) == [1.0, 0.0]


def test_where_a_reward_model_scores_there_is_no_function(tmp_path: Path) -> None:
    (tmp_path / "posts.jsonl").write_text('{"prompt": "POST: long. TL;DR:", "completion": " short"}\n')
    problems = load("TLDR", path=tmp_path / "posts.jsonl")
    assert problems.rows == [{"prompt": "POST: long. TL;DR:"}] and problems.reward is None and not problems.verified


@pytest.mark.parametrize(
    ("name", "how", "words"),
    [
        ("GSM", {}, "GSM is not the name .* GSM8K, MATH, AIME, TLDR, sums, star, sentiment, ascents"),
        ("sums", {"path": "x"}, "sums is made here, and takes no path"),
        ("GSM8K", {"seed": 1}, "GSM8K takes no seed"),
        ("sums", {"branches": 2}, "sums is not made by branches. Its keys are below, seed"),
        ("star", {"branches": 6}, "6 branches of 3 nodes need 13 names, and there are 12"),
    ],
)
def test_what_cannot_be_loaded_says_why(name: str, how: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load(name, **how)


def test_a_file_of_other_columns_or_without_rows_or_with_large_ones_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(UsageError, match="has no column 'problem', but prompt"):
        load("MATH", path=tmp_path / "other.jsonl")
    with pytest.raises(UsageError, match="TLDR has no rows"):
        load("TLDR", path=tmp_path / "other.jsonl", max_examples=0)
    monkeypatch.setattr("async_grpo.tasks.unpacked.LARGEST", 50)
    Dataset.from_list(ROWS).to_parquet(tmp_path / "rows.parquet")
    with pytest.raises(UsageError, match=r"rows\.parquet: its 2 rows take \d+ bytes when unpacked"):
        load("GSM8K", path=tmp_path / "rows.parquet")


def test_aime_is_read_from_a_path_and_judged_by_its_number(tmp_path: Path) -> None:
    (tmp_path / "aime.jsonl").write_text('{"problem": "How many?", "answer": "204"}\n')
    problems = load("AIME", path=tmp_path / "aime.jsonl")
    assert problems.rows == [{"prompt": f"How many?\n{BOXED}", "answer": "204"}]
    assert problems.reward is not None
    assert problems.reward([r"\boxed{204}", "240"], answer=["204"] * 2) == [1.0, 0.0]


def test_ascents_are_rewarded_as_in_the_world_of_this_name() -> None:
    texts, tokens = ["a b d d e", "a c e g h", "b a h g f"], [[0, 1, 3, 3, 4], [0, 2, 4, 6, 7], [1, 0, 7, 6, 5]]
    for graded in (False, True):
        problems = load("ascents", max_examples=9, graded=graded)
        assert problems.reward is not None
        assert problems.reward(texts) == ascents_reward(np.array(tokens), graded=graded).tolist()
        assert problems.reward([""]) == [0.0]
    assert [row["prompt"] for row in problems.rows] == [*"abcdefgha"]


def test_sums_are_those_of_the_seed() -> None:
    problems = load("sums", max_examples=3, below=10, seed=1)
    assert problems.rows == load("sums", max_examples=3, below=10, seed=1).rows != load("sums", max_examples=3).rows
    answers = [row["answer"] for row in problems.rows]
    assert [f"{sum(map(int, row['prompt'][:-1].split('+'))):03d}" for row in problems.rows] == answers
    assert problems.reward is not None and problems.reward([answers[0], "9"], answer=answers[:2]) == [1.0, 0.0]


@pytest.mark.parametrize(("name", "right"), [("star", "answer"), ("sentiment", None)])
def test_the_problems_of_a_world(name: str, right: str | None) -> None:
    problems = load(name, max_examples=2)
    texts = [row[right] if right else "good" for row in problems.rows]
    columns = {"answer": texts} if right else {}
    assert problems.reward is not None and problems.reward(texts, **columns) == [1.0, 1.0]
