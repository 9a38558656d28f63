"""Evaluations that are killed in the middle: in a run, of its checkpoint afterwards, and guided by a head."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.runs import SETUP, Command, audited, command, finish, lines_of, ran, read

pytestmark = pytest.mark.integration

STALENESS = ("--max-staleness", "2")  # training waits for each evaluation before the next is due: none is skipped
EVALUATED = ("--eval-every", "4", "--eval-replicates", "2", "--eval-k", "1,2")
RUN = ("--distributed", "--num-workers", "2", *STALENESS, *EVALUATED)


def evaluations(folder: Path) -> list[dict[str, Any]]:
    return lines_of(folder / "evaluations.jsonl")


def kill(run: Command, queue: Path) -> None:
    """End the launcher, and with it everything, in the middle of the first evaluation, after a worker died there."""
    run.kill_one_of_two_at_work(queue, "9")
    run.wait_until(lambda: any(queue.glob("9*_processing_by_dev*")), "the job of the dead worker on a live one")
    run.kill()


def test_a_run_killed_during_an_evaluation_has_each_once_and_its_checkpoint_can_be_evaluated(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    env = {"TEST_EVAL": "10", "TEST_STEPS": "8", "TEST_REWARD": "held", "TEST_MARKER": str(marker)}
    with command("train", str(SETUP), *RUN, cwd=tmp_path, **env) as run:
        kill(run, tmp_path / "worker" / "queue")
    assert evaluations(tmp_path / "worker") == []
    marker.touch()
    said = finish(tmp_path, *RUN, "-n", "1", "--resume", **env)
    found = evaluations(tmp_path / "worker")
    assert [one["step"] for one in found] == [0, 4, 8], said
    for one in found:
        assert one["figures"]["pass@2"]["problems"] == 10
        assert one["failed"] == {}
    assert "OK: all 32 groups accounted for (" in audited(tmp_path / "worker")
    metrics = lines_of(tmp_path / "worker" / "metrics.jsonl")
    logged = {int(one["eval_version"]): one["eval_reward_mean"] for one in metrics if "eval_version" in one}
    assert logged == {one["step"]: one["figures"]["reward_mean"]["value"] for one in found}

    checkpoint = ("checkpoints/checkpoint-8", "--against", "checkpoints/checkpoint-4")
    asked = ("evaluate", *checkpoint, "--config", str(SETUP), "-n", "1", "--eval-replicates", "2", "--json", "out.json")
    assert "checkpoint-8 less checkpoints/checkpoint-4, paired: 10 problems" in ran(*asked, cwd=tmp_path, **env)
    result = read(tmp_path / "out.json")
    reward = {name: one["figures"]["reward_mean"]["value"] for name, one in result["models"].items()}
    difference = reward["checkpoints/checkpoint-8"] - reward["checkpoints/checkpoint-4"]
    assert result["difference"]["reward_mean"]["value"] == pytest.approx(difference)


GUIDED = SETUP.with_name("guided_model.py")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a model, and a head on it whose scores are random."""
    from async_grpo_experiments.guidance import HeadRecord, ValueHead

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(SETUP.parent))
    import random_model

    trainer: Any = random_model.get_trainer()
    trainer.model.save_pretrained(tmp_path / "model")
    tokenizer = trainer.processing_class
    record = HeadRecord.of(trainer.model, tokenizer, kind="value", loss="bce", temperature=1.0)
    head = ValueHead.beginning_from(trainer.model, record, tokenizer)
    torch.nn.init.normal_(head.scores.weight)
    head.save(tmp_path / "head")
    sys.modules.pop("random_model")
    return tmp_path


def test_each_strength_is_evaluated_once_and_the_weaker_stays_closer(folder: Path) -> None:
    asked = ("evaluate", "model", "--config", str(GUIDED), "-n", "2", "--eval-replicates", "4", "--json", "out.json")
    env = {"TEST_EVAL": "12", "TEST_REWARD": "held", "TEST_MARKER": str(folder / "marker")}
    with command(*asked, "--eval-eta", "0.1,0.5,off", cwd=folder, **env) as run:
        run.kill_one_of_two_at_work(folder / "evaluation" / "queue", "9")
        (folder / "marker").touch()
        assert run.wait() == 0, run.output
    lines = lines_of(folder / "evaluation" / "evaluations.jsonl")
    untruncated = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    assert [one["sampling"] for one in lines] == [{**untruncated, "eta": eta} for eta in (0.1, 0.5, "off")]
    assert [(one["step"], one["failed"], one["figures"]["pass@1"]["problems"]) for one in lines] == [(0, {}, 12)] * 3
    strong, weak, off = (one["figures"] for one in lines)
    assert strong["avg_kl"]["low"] > weak["avg_kl"]["high"] > weak["avg_kl_per_token"]["value"] > 0
    assert "avg_kl" not in off
    assert "sampled with temperature 1.0, top_p 1.0, top_k 0, eta 0.1" in run.output
    named = json.loads((folder / "out.json").read_text())["models"]
    assert named.keys() == {f"model, eta {eta}" for eta in (0.1, 0.5, "off")}
