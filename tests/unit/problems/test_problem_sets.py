"""The named sets of problems: rows of files and of what is made, and their rewards."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import GenerationConfig, Qwen3Config, Qwen3ForSequenceClassification

from async_grpo.errors import UnsupportedError, UsageError
from async_grpo.evals.asking import SampleRequest
from async_grpo_experiments.algorithms.protocols import Continuations, Cut, Plan
from async_grpo_experiments.cut_plans import requests_of
from async_grpo_experiments.problems.table import BOXED, load
from async_grpo_experiments.reward_models import score
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


# --- An algorithm's plan of cuts, asked for as requests ----------------------------------------------------------


def sampler(**changes: Any) -> Any:
    """A trainer with its sampling."""
    own = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0, **changes}
    args = SimpleNamespace(**own, generation_kwargs=None, vllm_structured_outputs_regex=None)
    model = SimpleNamespace(generation_config=GenerationConfig())
    return SimpleNamespace(args=args, generation_config=GenerationConfig(do_sample=True, **own), model=model)


@pytest.mark.parametrize(
    ("changes", "named"), [({"top_p": 0.9}, "top_p=0.9"), ({"top_k": 20}, "top_k=20"), ({"min_p": 0.1}, "min_p=0.1")]
)
def test_values_are_of_the_untruncated_sampler(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{named} with a plan of values: values are of the untruncated sampler"):
        requests_of(lambda problems: iter(()), sampler(**changes))  # type: ignore[arg-type,return-value]


def test_cuts_become_requests_and_groups_become_answers() -> None:
    seen: list[Any] = []

    def plan(problems: int) -> Plan:
        seen.append((yield [Cut(problem=problem, greedy=True, guided=True) for problem in range(problems)]))
        seen.append((yield [Cut(problem=1, prefix=(5, 6), count=2)]))

    def group(*completions: list[int]) -> Any:
        return SimpleNamespace(
            prompt_ids=np.array([1, 2]),
            completion_lengths=np.array([len(ids) for ids in completions]),
            completion_ids=np.array([token for ids in completions for token in ids]),
            rewards=np.array([[0.25, 0.5]] * len(completions), np.float32),
        )

    asked = requests_of(plan, sampler(), unguided={"eta": 0.0})(2)
    greedy = {"temperature": 0.0}
    assert next(asked) == [SampleRequest(problem=0, sampling=greedy), SampleRequest(problem=1, sampling=greedy)]
    second = asked.send([None, group([5, 6, 7])])
    assert second == [SampleRequest(problem=1, samples=2, prefix_ids=(5, 6), sampling={"eta": 0.0})]
    with pytest.raises(StopIteration):
        asked.send([group([5, 6, 7, 8], [5, 6, 9])])
    first, last = seen
    cut = Cut(problem=1, greedy=True, guided=True)
    assert first == [Continuations(cut=cut, prompt=(1, 2), completions=((5, 6, 7),), rewards=(0.75,))]
    assert last[0].completions == ((7, 8), (9,)) and last[0].rewards == (0.75, 0.75)


# --- Scores of a reward model do not depend on the batch ---------------------------------------------------------

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def reward_model(labels: int = 1) -> Qwen3ForSequenceClassification:
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=8, num_key_value_heads=2, head_dim=16, pad_token_id=0, num_labels=labels, **SHAPE)
    return Qwen3ForSequenceClassification(config).eval()


def test_batches_of_2_and_32_agree() -> None:
    """Also for texts that use every token, and where padding and end are one."""
    model = reward_model()
    lengths = torch.randint(1, 60, (70,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [{"prompt_ids": [*range(8)], "completion_ids": [7, 0] * length} for length in lengths]
    small, large = score(rows, model, 2), score(rows, model, 32)
    assert small == pytest.approx(large, abs=1e-5) and len({round(value, 4) for value in small}) > 30
    with torch.no_grad():
        alone = model.score(model.base_model(torch.tensor([[*range(8), *[7, 0] * lengths[5]]])).last_hidden_state)
    assert small[5] == pytest.approx(float(alone[0, -1, 0]), abs=1e-5)


def test_a_model_of_several_labels_is_no_reward_model() -> None:
    with pytest.raises(UsageError, match="has one label, and Qwen3ForSequenceClassification has 2"):
        score([], reward_model(2))
