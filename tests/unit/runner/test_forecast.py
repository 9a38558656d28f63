"""What stages need, by models that are built without weights: held against the models themselves."""

from __future__ import annotations

import subprocess
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from experiment_yard import tree

from async_grpo.errors import UsageError
from async_grpo_experiments.runner import experiment, stages
from async_grpo_experiments.runner.config import checked
from async_grpo_experiments.runner.graph import graph_of, kind_of
from async_grpo_experiments.worlds.tiny import save, small_transformer, words_tokenizer

KEYS = {
    "datasets": {"ascents": {}},
    "training": {"datasets": ["ascents"], "micro_batch_size": 4, "gradient_checkpointing": False},
    "generation": {"max_new_tokens": 7, "batch_size": 16},
    "data_collection": {"max_examples": 10},
    "algos": {"QSharp": {}, "DPO": {}, "GRPO": {}},
}


@pytest.fixture(autouse=True)
def answers_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child that is asked is a call: as a process it imports torch for seconds."""

    def run(command: list[str], *, input: str, **_: Any) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr("sys.stdin", StringIO(input))
        with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as errors:
            code = stages.main(command[len(experiment.STAGES) :])
        return subprocess.CompletedProcess(command, code, out.getvalue(), errors.getvalue())

    monkeypatch.setattr(experiment.subprocess, "run", run)


def test_a_stage_holds_its_models_as_often_as_it_needs_them(tmp_path: Path) -> None:
    tokenizer = words_tokenizer("abcdefgh")
    model = small_transformer(tokenizer)
    weights, backbone = (
        sum(tensor.nbytes for tensor in (*one.parameters(), *one.buffers())) for one in (model, model.base_model)
    )
    config = checked(tree(models={"tiny": {"ref": save(tmp_path / "reference", model, tokenizer)}}, **KEYS))
    found = experiment.ask_forecast(config)
    needs = {name: found[kind_of(stage, config)] for name, stage in graph_of(config).items()}
    assert {*found} == {kind_of(stage, config) for stage in graph_of(config).values()}
    assert all(one.needed > 0 for one in found.values())
    evaluation = needs["reference_tiny_ascents.evaluate"]
    layers, tokens = 2, 1 + 7
    cache = 16 * tokens * layers * 2 * 64 * 4  # a key and a value of 64 numbers
    assert evaluation.memory == [(rows, 3 * weights + cache * rows // 16) for rows in (16, 8, 4, 2, 1)]
    assert needs["QSharp_tiny_ascents_r1.evaluate"].needed == 3 * weights + cache + backbone
    head, dpo, grpo = (needs[f"{algo}_tiny_ascents_r1.train"] for algo in ("QSharp", "DPO", "GRPO"))
    assert grpo.needed - dpo.needed == 2 * weights
    assert 4 * backbone < head.needed < 5 * weights < dpo.needed
    assert [rows for rows, _ in head.memory] == [4, 2, 1]
    assert (head.disk, dpo.disk) == (2 * backbone, 2 * weights)


def test_a_model_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match="nowhere/model"):
        experiment.ask_forecast(checked(tree(models={"tiny": {"ref": "nowhere/model"}}, **KEYS)))
