"""`async-grpo evaluate` of a guided setup file, whose worker is killed in the middle."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.runs import SETUP, command, lines_of

pytestmark = pytest.mark.integration

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
