"""A head's folder, its losses, and the numbers that it adds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from guided_models import Words, head_of, reference

from async_grpo.errors import BadFileError, UsageError
from async_grpo_experiments.guidance import Guidance, HeadRecord, ValueHead
from async_grpo_experiments.guidance.head import weights_digest
from async_grpo_experiments.guidance.offsets import centred, offsets


@pytest.fixture(scope="module")
def model() -> Any:
    return reference()


@pytest.mark.parametrize("loss", ["bce", "mle"])
def test_a_head_is_read_as_it_was_saved(model: Any, tmp_path: Path, loss: str) -> None:
    head = head_of(model, loss=loss)
    head.save(tmp_path)
    state = torch.get_rng_state()
    read = ValueHead.load(tmp_path)
    assert torch.equal(torch.get_rng_state(), state), "a worker loads it when the seed of its first group is set"
    assert (read.record, read.tokens) == (head.record, head.tokens)
    weights, saved = read.state_dict(), head.state_dict()
    assert weights.keys() == saved.keys() and all(torch.equal(weights[name], saved[name]) for name in saved)
    ids = torch.randint(2, 20, (2, 7))
    # To a few last bits: tensors of a file are aligned otherwise, and products of matrices may differ by that.
    assert torch.allclose(read(ids).logits, head(ids).logits, atol=1e-5)
    assert not [file for file in tmp_path.iterdir() if file.suffix not in (".json", ".safetensors")]


def test_a_record_has_the_name_that_it_is_given(model: Any) -> None:
    record = HeadRecord.of(model, Words(), kind="value", loss="bce", temperature=1.0, model="outputs/reference")
    found = (record.model, record.tokenizer, record.model_hash)
    assert found == ("outputs/reference", "words of w", weights_digest(model))


@pytest.mark.parametrize("change", ["cut", "flip"])
def test_damaged_weights_are_refused_by_name_and_hash(model: Any, tmp_path: Path, change: str) -> None:
    head_of(model).save(tmp_path)
    weights = tmp_path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data[: -5 if change == "cut" else None])
    for use in (ValueHead.load, lambda folder: Guidance(head=folder, eta=0.2)):
        with pytest.raises(BadFileError, match=r"model.safetensors is damaged: its SHA-256 is [0-9a-f]{64}"):
            use(tmp_path)


def test_a_pickle_and_a_folder_without_a_head_are_refused(model: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no head.json.$"):
        ValueHead.load(tmp_path)
    (tmp_path / "classifier.pt").touch()
    for folder in (tmp_path, tmp_path / "classifier.pt"):
        with pytest.raises(UsageError, match=r"A classifier\.pt is a pickle, which can run any code"):
            ValueHead.load(folder)
    head_of(model).save(tmp_path)
    record = tmp_path / "head.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "format": 2}))
    with pytest.raises(BadFileError, match="has format 2, and this version reads up to 1"):
        ValueHead.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"vocab_size": 1 << 40}, r"embed_tokens\.weight is \(1099511627776, 16\) by the former, and \(24, 16\) in"),
        ({"num_hidden_layers": 1, "layer_types": ["full_attention"]}, r"layers\.1\.\S* is not there by the former"),
        ({"num_hidden_layers": 10**9, "layer_types": None}, "num_hidden_layers is 1,000,000,000, and .* 26 tensors"),
        ({"text_config": {"n_layer": 10**9}}, "n_layer is 1,000,000,000"),
        ({"_attn_implementation": "someone/kernels"}, "_attn_implementation may name code of the Hub"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.C"}}, "makes no model of it: .* custom code"),
        ({"hidden_size": "x"}, "makes no model of it: .*hidden_size"),
        (["qwen3"], "its JSON is not an object"),
    ],
    ids=["huge", "fewer", "endless", "nested", "kernel", "code", "text", "list"],
)
def test_a_configuration_of_another_model_is_refused_before_it_takes_memory_or_runs(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, said: str
) -> None:
    """2^40 rows could not be had; code of the folder would ask at the terminal, where the answer is yes."""
    head_of(model).save(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **change} if isinstance(change, dict) else change))
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom transformers import Qwen3Config as C\n"
    (tmp_path / "own.py").write_text(code)
    monkeypatch.setattr("builtins.input", lambda _: "y")
    with pytest.raises(BadFileError, match=rf"(?s)config\.json .*{said}"):
        ValueHead.load(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("loss", ["bce", "mse", "mle", "bradley_terry"])
def test_training_lowers_each_loss_and_ignores_tokens_without_label(model: Any, loss: str) -> None:
    head = head_of(model, trained=False, loss=loss, v_max=2.0)
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    labels, mask = torch.tensor([[2.0] * 4, [0.0] * 4]), torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1]])
    pairs = torch.tensor([[0, 1]])
    labels = labels / 2 if loss == "bradley_terry" else labels
    first = head.loss(head(ids).logits, labels, mask, pairs)
    assert torch.equal(head.loss(head(ids).logits, torch.where(mask > 0, labels, 7.0), mask, pairs), first)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        found = head.loss(head(ids).logits, labels, mask, pairs)
        found.backward()
        optimizer.step()
    assert found.item() < 0.1 * first.item()
    logits = head(ids).logits[:, -1]
    assert logits.shape == (2, 11 if loss == "mle" else 1)
    levels = head.record.levels
    best = levels[logits.argmax(-1)] if loss == "mle" else logits[:, 0]
    assert best[0] > best[1]


def test_offsets_are_the_log_mean_exp_of_the_return() -> None:
    chances = torch.tensor([[0.2, 0.5, 0.3], [0.9, 0.0, 0.1]], dtype=torch.float64)
    levels = torch.tensor([-1.0, 0.0, 1.0])
    eta, more = 0.25, {"levels": levels, "v_min": -1.0, "v_max": 1.0}
    found = offsets("histogram", chances.log().clamp_min(-1e4), eta=eta, **more)  # type: ignore[arg-type]
    wanted = (chances * (levels / eta).exp()).sum(-1).log() + 1 / eta
    torch.testing.assert_close(found, wanted)
    means = (chances * (levels + 1) / 2).sum(-1)
    for mode, formula in (("expectation", means.log()), ("contrastive", means * 2 / eta)):
        torch.testing.assert_close(offsets(mode, chances.log().clamp_min(-1e4), eta=eta, **more), formula)  # type: ignore[arg-type]
    p = torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)
    logits, wanted = torch.logit(p, eps=1e-300)[:, None], torch.log(1 - p + p * torch.tensor(2 / eta).exp())
    torch.testing.assert_close(offsets("bernoulli", logits, eta=eta, v_min=2.0, v_max=4.0), wanted)
    torch.testing.assert_close(offsets("log_odds", logits, eta=0.5, beta=2.0), logits[:, 0])


@pytest.mark.parametrize("mode", ["bernoulli", "histogram", "expectation", "contrastive", "log_odds"])
def test_offsets_are_finite_however_sure_the_head_is(mode: str) -> None:
    corners = torch.tensor([-1e4, 0.0, 1e4])
    logits = torch.cartesian_prod(corners, corners) if mode == "histogram" else corners[:, None]
    assert bool(offsets(mode, logits, eta=1e-3, levels=torch.tensor([0.0, 1.0])).isfinite().all())


def test_a_model_has_one_digest_in_bfloat16_and_float32() -> None:
    assert weights_digest(reference()) == weights_digest(reference().bfloat16()) != weights_digest(reference(seed=1))


def test_tokens_without_a_score_count_as_the_worst_scored_one() -> None:
    assert centred(torch.tensor([[3.0, 1.0, -5.0, 2.0]])).tolist() == [[8.0, 6.0, 0.0, 7.0]]
