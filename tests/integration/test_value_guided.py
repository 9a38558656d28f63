"""Heads trained by Q#, QSharp-HF and PITA on worlds whose values are known, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from async_grpo.errors import UsageError
from async_grpo.log import logger
from async_grpo_experiments.algorithms.heads import UNLABELLED, check_returns, collate
from async_grpo_experiments.algorithms.pita import PITA, PITASettings
from async_grpo_experiments.algorithms.protocols import Cut, GuidanceSettings, collect, configured
from async_grpo_experiments.algorithms.qsharp import QSharp, QSharpSettings
from async_grpo_experiments.algorithms.qsharp_hf import QSharpHF, QSharpHFSettings
from async_grpo_experiments.algorithms.rows import LabelledRow, Rows
from async_grpo_experiments.guidance.head import ValueHead
from async_grpo_experiments.guidance.offsets import offsets
from async_grpo_experiments.worlds.enumerable import Enumerable, Steps, values_of
from async_grpo_experiments.worlds.tiny import save, small_transformer, words_tokenizer

FAST: dict[str, Any] = {"num_workers": 0, "gradient_checkpointing": False, "lr": 5e-3}
FAST |= {"batch_size": 256, "micro_batch_size": 256}
ROUNDING = "Rounding rewards to 11 atoms costs up to"
BERNOULLI: dict[str, Any] = {"loss_type": "bce", "guidance": {"mode": "bernoulli", "eta": 0.3}}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    tokenizer = words_tokenizer("abcdefgh")
    model = small_transformer(tokenizer, width=32, scale=0.1)
    return save(tmp_path_factory.mktemp("reference"), model, tokenizer)


def learned(world: Enumerable, folder: Path, mode: str, eta: float) -> Steps:
    """The policy that a trained head makes of the world's reference."""
    head = ValueHead.load(folder)
    record = head.record
    with torch.no_grad():
        values = values_of(lambda ids: head(ids).logits, world.prompt)
    found = [offsets(mode, torch.tensor(it), eta=eta, levels=record.levels, beta=record.beta).numpy() for it in values]
    return world.guided(found)


def test_qsharp_reaches_the_optimum_of_ascents(reference: str, tmp_path: Path) -> None:
    """20,000 sequences; contrastive with exact values lacks .250."""
    world = Enumerable.ascents()
    qsharp = QSharp(
        configured(QSharpSettings, {"reference": reference, "max_steps": 700, "weight_decay": 0.1, **FAST, **BERNOULLI})
    )
    rows = qsharp.rows(world.answers([Cut(problem=problem, count=4) for problem in range(5000)], seed=1))
    trained = qsharp.train(rows, out=tmp_path)
    assert len(rows.items) == 20_000 and trained.steps == 700 and trained.folder == tmp_path / "head"
    assert world.gap(learned(world, trained.folder, "bernoulli", 0.3), 0.3) <= 0.05


def few(world: Enumerable, algorithm: Any, problems: int = 40) -> Rows:
    return algorithm.rows(collect(algorithm.plan(problems), lambda cuts: world.answers(cuts, seed=len(cuts))))


def test_the_same_seed_gives_the_same_head_and_another_round_goes_on_from_it(reference: str, tmp_path: Path) -> None:
    world = Enumerable.ascents()
    settings = configured(QSharpSettings, {"reference": reference, "max_steps": 5, **FAST, **BERNOULLI})
    settings = replace(settings, batch_size=16, micro_batch_size=8)
    qsharp = QSharp(settings)
    rows = few(world, qsharp)
    assert all(len(group) == 4 for group in rows.groups())
    folders = [qsharp.train(rows, out=tmp_path / name).folder for name in ("a", "b")]
    weights = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert weights[0] == weights[1]
    second = qsharp.train(Rows.together([rows, rows]), folders[0], out=tmp_path / "c")
    assert (second.folder / "model.safetensors").read_bytes() != weights[0]
    with pytest.raises(UsageError, match=r"has loss bce, and this training mle"):
        QSharp(QSharpSettings(reference=reference, **FAST)).train(rows, folders[0], out=tmp_path / "d")
    with pytest.raises(UsageError):
        qsharp.train(rows, out=tmp_path / "a")


def test_micro_batches_add_up_to_the_batch(reference: str, tmp_path: Path) -> None:
    """Tokens weigh alike, whichever micro-batch they are in; bit for bit equality is not to be expected."""
    world = Enumerable.ascents()
    heads = []
    for micro in (4, 16):
        settings = configured(QSharpSettings, {"reference": reference, "max_steps": 3, **FAST, **BERNOULLI})
        qsharp = QSharp(replace(settings, batch_size=16, micro_batch_size=micro))
        heads.append(ValueHead.load(qsharp.train(few(world, qsharp), out=tmp_path / str(micro)).folder))
    for one, other in zip(heads[0].parameters(), heads[1].parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("label", ["both", "sampled"])
def test_pita_labels_pairs_and_trains(reference: str, tmp_path: Path, label: str) -> None:
    world = Enumerable.ascents(graded=True)
    keys = {"reference": reference, "max_steps": 40, "label": label, "bradley_terry_sampling": False, **FAST}
    pita = PITA(configured(PITASettings, keys))
    rows = few(world, pita, 60)
    assert {len(group) for group in rows.groups()} == {2 if label == "both" else 1}
    sums = [sum(row.label for row in group) for group in rows.groups()]
    assert label == "sampled" or np.allclose(sums, 1)
    made = pita.train(rows, out=tmp_path)
    head = ValueHead.load(made.folder)
    assert (head.record.kind, head.record.beta, made.loss < 0.75) == ("preference", 1.0, True)
    assert pita.guidance() == {"eta": 0.2, "mode": "log_odds", "top_k": 20, "use_cache": True}
    assert world.expected_reward(learned(world, made.folder, "log_odds", 0.2)) > world.expected_reward(world.reference)


def test_pita_by_pairs_of_bradley_terry(reference: str, tmp_path: Path) -> None:
    keys = {**FAST, "reference": reference, "loss_type": "bradley_terry", "batch_size": 8, "micro_batch_size": 4}
    pita = PITA(configured(PITASettings, {**keys, "max_steps": 3}))
    rows = few(Enumerable.ascents(), pita)
    assert all([row.label for row in group] == [1, 0] for group in rows.groups())
    assert pita.train(rows, out=tmp_path / "whole").loss == pytest.approx(0.69, abs=0.1)
    short = PITA(configured(PITASettings, {**keys, "max_steps": 1}))
    trained = short.train(Rows(rows.items[:6]), out=tmp_path / "short")
    assert trained.loss == pytest.approx(np.log(2), abs=1e-4), "three pairs in place of four: a mean all the same"


def test_qsharp_hf_trains_its_proxy_once(reference: str, tmp_path: Path) -> None:
    keys = {"reference": reference, "max_steps": 10, **FAST, "batch_size": 32, "micro_batch_size": 32}
    algorithm = QSharpHF(configured(QSharpHFSettings, keys))
    rows = few(Enumerable.ascents(graded=True), algorithm)
    first = algorithm.train(rows, out=tmp_path / "1")
    second = algorithm.train(Rows.together([rows, rows]), first.folder, out=tmp_path / "2")
    proxies = [(tmp_path / name / "proxy" / "proxy.json").read_text() for name in ("1", "2")]
    assert proxies[0] == proxies[1] and second.folder == tmp_path / "2" / "head"
    assert ValueHead.load(second.folder).record.loss == "mle"


def test_only_what_was_sampled_behind_the_cut_has_a_label() -> None:
    row = LabelledRow(problem=0, group=0, prompt=(1, 2), prefix=(3,), continuation=(4, 5), label=0.5)
    batch = collate([[row], [replace(row, prompt=(), continuation=(6,))]])
    assert batch["input_ids_BT"].tolist() == [[1, 2, 3, 4, 5], [3, 6, 0, 0, 0]]
    none = UNLABELLED
    assert batch["labels"].tolist() == [[none, none, none, 0.5, 0.5], [none, 0.5, none, none, none]]
    assert batch["attention_mask_BT"].sum().item() == 7


@pytest.mark.parametrize(
    ("rewards", "keys", "reason"),
    [
        ([1.0, 1.0], {}, "nothing to learn: each of the 1 problem has one reward"),
        ([0.0, 1.5], {}, r"row 1 \(problem 0\) has the reward 1.5, outside of V_min 0 and V_max 1"),
        ([0.0, 0.5], BERNOULLI, r"row 1 \(problem 0\) has the reward 0.5, and bernoulli is for rewards that are V_min"),
        ([0.0, 1.0], {"micro_batch_size": 3, "batch_size": 3}, "must be a multiple of 2, the rows of a group.*to 4"),
    ],
)
def test_rewards_that_cannot_be_learned(reference: str, tmp_path: Path, rewards: Any, keys: Any, reason: str) -> None:
    qsharp = QSharp(configured(QSharpSettings, {"reference": reference, **FAST, **keys}))
    found = Enumerable.ascents().answers([Cut(problem=0, count=2)], seed=0)
    with pytest.raises(UsageError, match=reason):
        qsharp.train(qsharp.rows([replace(found[0], rewards=tuple(rewards))]), out=tmp_path)


@pytest.mark.parametrize(
    ("rewards", "keys", "said"),
    [
        ([0.0, 0.05], {"guidance": {"eta": 0.1}}, f"WARNING {ROUNDING} 0.5 nats at eta 0.1."),
        ([0.0, 0.05], {"guidance": {"eta": 0.4}}, f"INFO {ROUNDING} 0.125 nats at eta 0.4."),
        ([0.0, 0.5], {}, f"INFO {ROUNDING} 0 nats at eta 0.2."),
        ([0.0, 1.0], BERNOULLI, "INFO (V_max - V_min)/eta is 3.33: the most that guidance adds to a logit."),
    ],
)
def test_what_rounding_costs_and_guidance_adds_is_said(rewards: list[float], keys: dict[str, Any], said: str) -> None:
    rows = [LabelledRow(problem=0, group=0, prompt=(), prefix=(), continuation=(1,), label=one) for one in rewards]
    lines: list[str] = []
    sink = logger.add(lambda line: lines.append(str(line).strip()), format="{level} {message}", level="INFO")
    try:
        check_returns(Rows(tuple(rows)), configured(QSharpSettings, {"reference": "m", **keys}))
    finally:
        logger.remove(sink)
    assert lines == [said]


@pytest.mark.parametrize(
    ("settings", "keys", "reason"),
    [
        (QSharpSettings, {"loss_type": "bce"}, "mode 'histogram' cannot take a head that was trained with bce"),
        (QSharpSettings, {"loss_type": "bradley_terry"}, "take PITA for them"),
        (QSharpSettings, {"guidance": {"eta": 0.2, "inverse_eta": 5}}, "Give one of eta and inverse_eta"),
        (QSharpSettings, {"guidance": {"eta": -1}}, "eta must be over 0, in units of the reward"),
        (QSharpSettings, {"guidance": {"inverse_eta": 0}}, "inverse_eta must be over 0"),
        (QSharpSettings, {"guidance": {"modes": "x"}}, "an unknown field 'modes'; the nearest is 'mode'"),
        (QSharpSettings, {"V_min": 2}, "V_max 1 must be over V_min 2"),
        (QSharpHFSettings, {"loss_type": "mse"}, "leave loss_type at mle"),
        (QSharpHFSettings, {"proxy": {"epochs": 0}}, "proxy.epochs must be over 0"),
        (PITASettings, {"loss_type": "mle"}, "PITA learns a probability, not loss_type mle"),
        (PITASettings, {"loss_type": "bradley_terry", "label": "sampled"}, "needs whole pairs"),
        (PITASettings, {"V_max": 5}, "leave V_min at 0 and V_max at 1"),
    ],
)
def test_settings_that_are_refused(settings: type[Any], keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        QSharp(configured(settings, {"reference": "m", **keys}))


def test_inverse_eta_is_the_originals_eta() -> None:
    assert QSharp(QSharpSettings(reference="m", guidance=GuidanceSettings(inverse_eta=5))).guidance()["eta"] == 0.2
