"""The search recipe: its dataset, and a dialogue of its environment with a model that a script plays."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Features, Sequence, Value

from async_grpo.envs import Passages
from async_grpo.errors import SetupFileError
from async_grpo.rewards.questions import exact_match
from async_grpo.setup.setup_file import load_trainer
from kit.in_process import InProcessWorker, jobs_of
from kit.scripted import ScriptedEngine, ScriptedGenerator

pytest.importorskip("bm25s", reason="the extra `search` is not installed")
pytestmark = pytest.mark.integration
RECIPE = Path(__file__).parents[2] / "examples" / "triviaqa_search" / "my_trainer.py"


@pytest.mark.parametrize("calls", ["tokenizer", "tags"])
def test_a_dialogue_that_searches_earns_its_rewards(
    calls: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CALLS", calls)
    monkeypatch.setenv("MODEL", "tiny")
    monkeypatch.chdir(tmp_path)
    trainer: Any = load_trainer(RECIPE, engine_here=False)
    monkeypatch.delitem(sys.modules, "tiny")
    trainer.max_completion_length = 600
    row = trainer.train_dataset[0]
    question = row["prompt"][0]["content"].rsplit("\n", 1)[1]
    search = json.dumps({"name": "search", ("args" if calls == "tags" else "arguments"): {"query": question}})
    call = f"<tool>{search}</tool>" if calls == "tags" else f"<tool_call>\n{search}\n</tool_call>"

    def reply(prompt: str, index: int) -> str:
        if index % 8:
            return "nothing"
        if "<tool_response>" in prompt or "<result>\n" in prompt:
            return f"<reasoning>So.</reasoning><answer>{row['aliases'][0]}</answer>"
        return f"<reasoning>I look.</reasoning>{call}"

    worker = InProcessWorker(trainer, ScriptedEngine(ScriptedGenerator(reply, trainer.processing_class)))
    (group,) = worker.rollouts(jobs_of([row], group_size=8))
    earned = {name.rpartition("/")[2]: one for name, one in zip(group.reward_names, group.rewards[0], strict=True)}
    outcome = {"exact_match": 1.0, "contained": 0.5, "format_of_messages": 0.2, "tags": 0.2}
    assert earned == pytest.approx({**outcome, "tool_execution": 0.2, "answer_in_results": 0.5})
    assert group.rewards[1:].sum() == 0
    assert group.rewards_of_turns()[0][0] == pytest.approx(0.7)


def test_questions_and_an_index_of_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "questions.jsonl").write_text(json.dumps({"question": "Who was here?", "aliases": ["Bob", "Bobby"]}))
    Passages.of(["Bob was here.", "Al went away."]).save(tmp_path / "index")
    for name, value in {"MODEL": "tiny", "DATASET": "questions.jsonl", "INDEX": "index"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    trainer: Any = load_trainer(RECIPE, engine_here=False)
    monkeypatch.delitem(sys.modules, "tiny")
    (row,) = trainer.train_dataset
    assert row["aliases"] == ["Bob", "Bobby"]
    assert row["prompt"][0]["content"].endswith("Who was here?")
    (search,) = trainer.environment_factories.values()
    assert search().search("Bob") == "Bob was here."
    monkeypatch.delenv("INDEX")
    with pytest.raises(SetupFileError, match="set INDEX to a folder with passages"):
        load_trainer(RECIPE, engine_here=False)


# Of the card of mandarjoshi/trivia_qa, `rc.nocontext`: its columns, and where its files are.
TRIVIAQA_ANSWER = {
    "aliases": ["(Harry) Sinclair Lewis", "Harry Sinclair Lewis", "Sinclair Lewis"],
    "normalized_aliases": ["harry sinclair lewis", "sinclair lewis"],
    "matched_wiki_entity_name": "",
    "normalized_matched_wiki_entity_name": "",
    "normalized_value": "sinclair lewis",
    "type": "WikipediaEntity",
    "value": "Sinclair Lewis",
}
TRIVIAQA_ROW = {
    "question": "Which American-born Sinclair won the Nobel Prize for Literature in 1930?",
    "question_id": "tc_1",
    "question_source": "http://www.triviacountry.com/",
    "entity_pages": {"doc_source": [], "filename": [], "title": [], "wiki_context": []},
    "search_results": {"description": [], "filename": [], "rank": [], "title": [], "url": [], "search_context": []},
    "answer": TRIVIAQA_ANSWER,
}
TRIVIAQA_CARD = """\
---
configs:
- config_name: rc.nocontext
  data_files:
  - split: train
    path: rc.nocontext/train-*
---
"""


def triviaqa_features() -> Features:
    text = Value("string")
    found = dict.fromkeys(("description", "filename", "title", "url", "search_context"), text)
    names = ("matched_wiki_entity_name", "normalized_matched_wiki_entity_name", "normalized_value", "type", "value")
    answer: dict[str, Any] = dict.fromkeys(names, text)
    return Features(
        {
            **dict.fromkeys(("question", "question_id", "question_source"), text),
            "entity_pages": Sequence(dict.fromkeys(("doc_source", "filename", "title", "wiki_context"), text)),
            "search_results": Sequence({**found, "rank": Value("int32")}),
            "answer": {**answer, "aliases": Sequence(text), "normalized_aliases": Sequence(text)},
        }
    )


@pytest.mark.parametrize("name", ["copy", "copy/rc.nocontext/train-00000-of-00001.parquet", "rows.jsonl"])
def test_rows_in_the_schema_of_triviaqa(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its columns by path: a copy of the dataset, a file of it, and its rows as JSON Lines."""
    dataset = Dataset.from_list([TRIVIAQA_ROW, TRIVIAQA_ROW | {"question": "Who?"}], features=triviaqa_features())
    (tmp_path / "copy" / "rc.nocontext").mkdir(parents=True)
    (tmp_path / "copy" / "README.md").write_text(TRIVIAQA_CARD)
    dataset.to_parquet(tmp_path / "copy" / "rc.nocontext" / "train-00000-of-00001.parquet")
    dataset.to_json(tmp_path / "rows.jsonl")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("INDEX", "index")
    monkeypatch.chdir(tmp_path)
    rows = list(runpy.run_path(str(RECIPE))["rows"](name))
    assert [row["aliases"] for row in rows] == [TRIVIAQA_ANSWER["normalized_aliases"]] * 2
    assert rows[0]["prompt"][0]["content"].endswith("\n\n" + TRIVIAQA_ROW["question"])
    said = [{"role": "assistant", "content": "<answer>Sinclair Lewis</answer>"}]
    assert exact_match([said], [rows[0]["aliases"]]) == [1.0]
