"""DPO on rows of token ids, by TRL's trainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from async_grpo.errors import UsageError
from async_grpo_experiments.algorithms.dpo import DPO, DPOSettings
from async_grpo_experiments.algorithms.protocols import collect
from async_grpo_experiments.algorithms.rows import Rows
from async_grpo_experiments.worlds.enumerable import Enumerable
from async_grpo_experiments.worlds.tiny import endless_transformer, save, words_tokenizer


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> DPOSettings:
    tokenizer = words_tokenizer("abcdefgh")
    reference = save(tmp_path_factory.mktemp("reference"), endless_transformer(tokenizer), tokenizer)
    small = {"num_workers": 0, "batch_size": 8, "micro_batch_size": 8, "gradient_checkpointing": False}
    return DPOSettings(reference=reference, **small)


def rows_of(dpo: DPO) -> Rows:
    world = Enumerable.ascents()
    return dpo.rows(collect(dpo.plan(12), lambda cuts: world.answers(cuts, seed=len(cuts))))


def ten_lines(policy: torch.nn.Module, reference: torch.nn.Module, rows: Rows, beta: float) -> torch.Tensor:
    def logprob(model: torch.nn.Module, row: object) -> torch.Tensor:
        ids = torch.tensor([row.tokens])
        logps = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        return logps[row.unlabelled - 1 :].sum()

    margins = []
    for chosen, rejected in rows.groups():
        ratios = [logprob(policy, row) - logprob(reference, row).detach() for row in (chosen, rejected)]
        margins.append(ratios[0] - ratios[1])
    return torch.nn.functional.softplus(-beta * torch.stack(margins)).mean()


@pytest.mark.parametrize("loss_type", [["sigmoid"], ["sigmoid", "sft"]])
def test_loss_and_gradient_are_those_of_the_formula(
    settings: DPOSettings, loss_type: list[str], tmp_path: Path
) -> None:
    dpo = DPO(replace(settings, loss_type=loss_type))
    rows = Rows(rows_of(dpo).items[:8])
    trainer = dpo.trainer(rows, None, tmp_path)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in trainer.model.parameters():
            weight += 0.02 * torch.randn_like(weight)
    batch = trainer.data_collator([trainer.train_dataset[index] for index in range(4)])
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    found = [weight.grad.clone() for weight in trainer.model.parameters()]
    trainer.model.zero_grad()
    expected = ten_lines(trainer.model, trainer.ref_model, rows, settings.beta)
    if "sft" in loss_type:
        chosen = [row for row in rows.items if row.label == 1]
        tokens = torch.cat([torch.tensor(row.continuation) for row in chosen])
        logits = [trainer.model(torch.tensor([row.tokens])).logits[0, row.unlabelled - 1 : -1] for row in chosen]
        expected = expected + torch.nn.functional.cross_entropy(torch.cat(logits), tokens)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    for gradient, weight in zip(found, trainer.model.parameters(), strict=True):
        assert torch.allclose(gradient, weight.grad, atol=1e-5)


def test_it_trains_from_the_round_before_against_the_original_reference(settings: DPOSettings, tmp_path: Path) -> None:
    dpo = DPO(replace(settings, max_steps=30, lr=3e-3))
    rows = rows_of(dpo)
    first = dpo.train(rows, out=tmp_path / "1")
    assert first.folder == tmp_path / "1/model" and first.steps == 30 and first.loss < 0.69
    second = dpo.trainer(rows, first.folder, tmp_path / "2")
    weights = [dict(model.named_parameters()) for model in (second.model, second.ref_model)]
    name = "model.layers.0.mlp.fc1.weight"
    original = dpo.trainer(rows, None, tmp_path / "3").model.get_parameter(name)
    assert torch.equal(weights[1][name], original) and not torch.equal(weights[0][name], original)
    with pytest.raises(UsageError, match="holds what another training left"):
        dpo.train(rows, out=tmp_path / "1")


def test_its_temperature_is_1(settings: DPOSettings) -> None:
    with pytest.raises(UsageError, match="loss is at temperature 1, and temperature is 0"):
        replace(settings, temperature=0.7)


def test_a_row_longer_than_the_model_is_refused_and_never_cut(settings: DPOSettings, tmp_path: Path) -> None:
    rows = rows_of(DPO(settings))
    long = replace(rows.items[1], continuation=(1,) * 256)
    with pytest.raises(UsageError, match=r"row 1 \(problem \d+\) has \d+ tokens, and the model has 256 positions"):
        DPO(settings).train(Rows((rows.items[0], long)), out=tmp_path)
