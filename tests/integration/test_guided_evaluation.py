"""`async-grpo evaluate` of a guided setup file, whose worker is killed in the middle."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import SETUP, command

from async_grpo_experiments.algorithms.protocols import collect, configured
from async_grpo_experiments.algorithms.qsharp import QSharp, QSharpSettings
from async_grpo_experiments.worlds.sampler import CutSampler
from async_grpo_experiments.worlds.star import star_graphs, star_reward, star_rows, star_tokenizer, train_reference
from async_grpo_experiments.worlds.tiny import save, small_transformer

pytestmark = pytest.mark.integration

GUIDED = SETUP.with_name("guided_model.py")
STAR = Path(__file__).parents[2] / "benchmarks" / "setups" / "guided_star.py"


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
        queue = folder / "evaluation" / "queue"

        def busy() -> list[int]:
            return [n for n in (1, 2) if any(queue.glob(f"9*_processing_by_dev{n}.safetensors"))]

        [number, *_] = run.wait_until(busy, "an evaluation on a worker")
        worker = run.worker(number)
        assert worker is not None
        worker.kill()
        (folder / "marker").touch()
        assert run.wait() == 0, run.output
    lines = [json.loads(line) for line in (folder / "evaluation" / "evaluations.jsonl").read_text().splitlines()]
    untruncated = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    assert [one["sampling"] for one in lines] == [{**untruncated, "eta": eta} for eta in (0.1, 0.5, "off")]
    assert [(one["step"], one["failed"], one["figures"]["pass@1"]["problems"]) for one in lines] == [(0, {}, 12)] * 3
    strong, weak, off = (one["figures"] for one in lines)
    assert strong["avg_kl"]["low"] > weak["avg_kl"]["high"] > weak["avg_kl_per_token"]["value"] > 0
    assert "avg_kl" not in off
    assert "sampled with temperature 1.0, top_p 1.0, top_k 0, eta 0.1" in run.output
    named = json.loads((folder / "out.json").read_text())["models"]
    assert named.keys() == {f"model, eta {eta}" for eta in (0.1, 0.5, "off")}


@pytest.mark.slow
def test_a_trained_head_evaluates_star_graphs_though_a_worker_is_killed(tmp_path: Path) -> None:
    """G(2,2), whose reference takes the right branch half of the time; a head that learned by Q# from its samples."""
    tokenizer = star_tokenizer(5)
    model = small_transformer(tokenizer, width=32, layers=2)
    train_reference(model, tokenizer, 2, 2, steps=300, nodes=5, batch=64)
    reference = save(tmp_path / "reference", model, tokenizer)
    graphs = [*star_graphs(2, 2, 1024, nodes=5, seed=6)]
    sampler = CutSampler(model, tokenizer, star_rows(graphs), star_reward, max_new_tokens=3)
    keys = {"batch_size": 128, "micro_batch_size": 128, "lr": 4e-3, "max_steps": 600, "gradient_checkpointing": False}
    bernoulli = {"loss_type": "bce", "guidance": {"mode": "bernoulli"}}
    qsharp = QSharp(configured(QSharpSettings, {"reference": reference, "num_workers": 0, **keys, **bernoulli}))
    torch.manual_seed(0)
    trained = qsharp.train(qsharp.rows(collect(qsharp.plan(len(graphs)), sampler.answer)), out=tmp_path)
    assert trained.folder == tmp_path / "head"
    asked = ("evaluate", "reference", "--config", str(STAR), "-n", "2", "--eval-replicates", "8", "--eval-k", "1,8")
    with command(*asked, "--eval-eta", "0.1,0.5,1", "--json", "out.json", cwd=tmp_path, STAR="2 2 5") as run:
        queue = tmp_path / "evaluation" / "queue"
        run.wait_until(lambda: any(queue.glob("9*_processing_by_dev1.*")), "an evaluation on worker 1")
        worker = run.worker(1)
        assert worker is not None
        worker.kill()
        assert run.wait() == 0, run.output
    assert "worker 1 ended (killed by SIGKILL); starting it again" in run.output
    assert all(f"{name} " in run.output for name in ("pass@1", "maj@8", "avg_kl"))
    figures = [one["figures"] for one in json.loads((tmp_path / "out.json").read_text())["models"].values()]
    for closer, further in pairwise(figures):
        assert closer["avg_kl"]["low"] > further["avg_kl"]["high"], "KL falls as eta grows"
    assert figures[0]["pass@1"]["value"] > max(0.75, figures[2]["pass@1"]["value"] + 0.1)
    assert figures[0]["maj@8"]["value"] > 0.85
