"""The search recipe: its dataset, and a dialogue of its environment with a model that a script plays."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from in_process import InProcessWorker, ScriptedEngine, ScriptedGenerator, jobs_of
from runs import command, steps_logged

from async_grpo.errors import SetupFileError
from async_grpo.setup.setup_file import load_trainer

pytestmark = pytest.mark.integration
RECIPE = Path(__file__).parents[2] / "examples" / "triviaqa_search" / "my_trainer.py"


@pytest.mark.parametrize("calls", ["tokenizer", "tags"])
def test_a_dialogue_that_searches_earns_its_rewards(
    calls: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("bm25s", reason="the extra `search` is not installed")
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

    def reply(prompt: str, place: int) -> str:
        if place % 8:
            return "nothing"
        if "<tool_response>" in prompt or "<result>\n" in prompt:
            return f"<reasoning>So.</reasoning><answer>{row['aliases'][0]}</answer>"
        return f"<reasoning>I look.</reasoning>{call}"

    worker = InProcessWorker(trainer, ScriptedEngine(ScriptedGenerator(trainer.processing_class, reply)))
    (group,) = worker.rollouts(jobs_of([row], group_size=8))
    names = [name.rpartition("/")[2] for name in group.reward_names]
    earned = dict(zip(names, group.rewards[0].tolist(), strict=True))
    assert earned == pytest.approx(
        {
            "exact_match": 1.0,
            "contained": 0.5,
            "format_of_messages": 0.2,
            "tags": 0.2,
            "tool_execution": 0.2,
            "answer_in_results": 0.5,
        }
    )
    assert group.rewards[1:].sum() == 0
    assert group.rewards_of_turns()[0][0] == pytest.approx(0.7)


def test_questions_and_an_index_of_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("bm25s", reason="the extra `search` is not installed")
    from async_grpo.envs import Passages

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


@pytest.mark.slow
def test_the_recipe_trains_with_two_workers_of_which_one_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("bm25s", reason="the extra `search` is not installed")
    run_dir = tmp_path / "worker"
    with command("train", str(RECIPE), "-n", "2", "--steps", "6", cwd=tmp_path, MODEL="tiny") as run:
        run.wait_until(lambda: steps_logged(run_dir), "a step")
        run.wait_until(lambda: run.worker(1), "worker 1").kill()
        assert run.wait() == 0, run.output
    assert steps_logged(run_dir) == list(range(1, 7))
    for line, shown in (("audit", "turn rewards"), ("rollouts", "turn rewards"), ("replay", "equal to")):
        with command(line, "worker", cwd=tmp_path, MODEL="tiny") as reader:
            assert reader.wait() == 0, reader.output
        assert shown in reader.output
