"""Training on truncated sampling, as vLLM does it: the trainer computes its loss over the tokens that were kept.

A stand-in for vLLM samples from the model with `top_k` and `top_p`, records the log-probabilities of what it has drawn
from, and names the tokens that it kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from async_grpo.engines import PreparedGroup, SampledGroup
from async_grpo.engines.batch_engine import BatchEngine
from async_grpo.errors import UnsupportedError
from async_grpo.records import RolloutGroup
from async_grpo.setup.generator_choice import STARTED_SERVER
from async_grpo.tokens import Tokens
from async_grpo.tokens.kept_tokens import unpack
from async_grpo.training.corrections.kept_log_probs import IDS, SIZES
from kit.compared_with_trl import settings
from kit.in_process import InProcessRun
from kit.own_code import OwnForwardPass, OwnLoss

pytestmark = pytest.mark.integration

TEMPERATURE, TOP_K, TOP_P = 0.8, 20, 0.7
EXACT = 1e-5


class Truncating(BatchEngine):
    """Samples one token after another from the tokens that are left, in ascending order of their ids."""

    capabilities = STARTED_SERVER

    def __init__(self, *, names_kept: bool = True) -> None:
        super().__init__(most_groups=8)
        self.trainer: Any = None  # the worker's
        self._names_kept = names_kept

    def follow(self, weights: Any) -> Any:
        raise AssertionError("nobody asks for weights")

    def _decode(self, groups: Sequence[PreparedGroup]) -> Iterator[list[SampledGroup]]:  # type: ignore[override]
        for group in groups:
            tokens = []
            for ids, logprobs, kept in map(self._completion, group.prompt_ids):
                tokens.append(Tokens(ids, logprobs, kept=kept if self._names_kept else [b""] * len(ids)))
            yield [SampledGroup(prepared=group, tokens=tokens)]

    @torch.no_grad()
    def _completion(self, prompt: list[int]) -> tuple[list[int], list[float], list[bytes]]:
        ids: list[int] = []
        logprobs, sets = [], []
        while len(ids) < self.trainer.max_completion_length and not (ids and ids[-1] in self.trainer.eos_token_ids):
            logits = self.trainer.model(torch.tensor([prompt + ids])).logits[0, -1] / TEMPERATURE
            left = nucleus(logits)
            log_mu = torch.log_softmax(logits[left], dim=-1)
            position = int(torch.multinomial(log_mu.exp(), 1))
            ids.append(int(left[position]))
            logprobs.append(float(log_mu[position]))
            sets.append(left.int().numpy().tobytes())
        return ids, logprobs, sets


def nucleus(logits: Tensor) -> Tensor:
    values, ids = logits.topk(TOP_K)
    before = values.softmax(-1).cumsum(-1) - values.softmax(-1)
    return ids[before < TOP_P].sort().values


def run_of(tmp_path: Path, correction: str = "bypass", *, names_kept: bool = True, **options: Any) -> InProcessRun:
    """A run that has trained.

    Args:
        options: `fresh_every`, and else of the `GRPOConfig` or the trainer.
    """
    schedule = {name: options.pop(name) for name in ("fresh_every",) if name in options}
    engine = Truncating(names_kept=names_kept)
    get_trainer = settings(tmp_path, temperature=TEMPERATURE, **options)
    run = InProcessRun(get_trainer, engine=engine, correction=correction, **schedule)
    engine.trainer = run.worker
    return run.train()


def test_the_ratio_of_a_fresh_token_is_one(tmp_path: Path) -> None:
    for entry in run_of(tmp_path, max_steps=3).logs:
        for name in ("async/ratio_mean", "async/ratio_min", "async/ratio_max"):
            assert entry[name] == pytest.approx(1.0, abs=EXACT)
        assert entry["async/logprob_mismatch"] < EXACT
    biased = run_of(tmp_path, max_steps=1, names_kept=False).logs[0]
    assert biased["async/logprob_mismatch"] > 0.1, "without the sets the test would show nothing"


def explicit_loss(model: Any, batch: dict[str, Any], groups: Sequence[RolloutGroup], epsilon: float) -> Tensor:
    """`loss_type="grpo"` with PPO's clip around the sampler, over logits that are minus infinity where cut."""
    rows: list[Tensor] = []
    kept = iter([each for group in groups for each in sets_of(group)])
    length = batch["completion_ids"].shape[1]
    ids_BL = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask_BL = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    logits_BCV = model(input_ids=ids_BL, attention_mask=mask_BL).logits[:, -length - 1 : -1] / TEMPERATURE
    for row, ids in enumerate(batch["completion_ids"]):
        of_row = []
        for position in range(int(batch["completion_mask"][row].sum())):
            cut = torch.full_like(logits_BCV[row, position], -torch.inf)
            cut[next(kept)] = 0.0
            of_row.append(torch.log_softmax(logits_BCV[row, position] + cut, dim=-1)[ids[position]])
        ratio = torch.exp(torch.stack(of_row) - batch["sampling_per_token_logps"][row, : len(of_row)])
        advantage = batch["advantages"][row]
        clipped = ratio.clamp(1 - epsilon, 1 + epsilon)
        rows.append(-torch.min(ratio * advantage, clipped * advantage).mean())
    return torch.stack(rows).mean()


def sets_of(group: RolloutGroup) -> list[Any]:
    assert group.kept_tokens is not None
    found = unpack(group.kept_tokens, group.completion_ids)
    return np.split(found.ids.astype(np.int64), np.cumsum(found.sizes)[:-1])


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_the_gradient_of_the_loss_is_that_of_an_explicit_softmax(tmp_path: Path) -> None:
    """Also for stale groups, whose ratios are not 1."""
    run = run_of(tmp_path, fresh_every=2, max_steps=2, learning_rate=1e-2, loss_type="grpo", epsilon=0.2)
    batch, model = run.inputs[1], run.trainer.model
    assert batch[SIZES].shape == batch["completion_ids"].shape
    assert int(batch[SIZES].sum(1).max()) == batch[IDS].shape[1] and int(batch[SIZES].max()) <= TOP_K
    ours = run.trainer._compute_loss(model, dict(batch))
    expected = explicit_loss(model, batch, run.batches[1], epsilon=0.2)
    assert_close(ours, expected, atol=EXACT, rtol=0)
    found, wanted = gradients(model, ours), gradients(model, expected)
    assert max(gradient.abs().max() for gradient in wanted.values()) > 1e-2
    for name, gradient in wanted.items():
        assert_close(found[name], gradient, atol=EXACT, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
    assert run.logs[1]["async/ratio_max"] > 1.05, "the second batch was to be stale"


def test_the_old_policy_and_the_reference_are_taken_over_the_same_tokens(tmp_path: Path, model_folder: str) -> None:
    run = run_of(tmp_path, "tis", model=model_folder, num_iterations=2, max_steps=2, beta=0.1)
    batch = run.inputs[0]
    mask = batch["completion_mask"].bool()
    assert_close(batch["old_per_token_logps"][mask], batch["sampling_per_token_logps"][mask], atol=EXACT, rtol=0)
    assert abs(run.logs[0]["kl"]) < 1e-9 < run.logs[1]["kl"], "the policy is the reference until its first step"
    assert run.logs[0]["async/weight_changed_fraction"] == 0.0


@pytest.mark.parametrize("trainer_class", [OwnForwardPass, OwnLoss])
def test_a_trainer_that_computes_log_probabilities_itself_is_refused(trainer_class: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=rf"{trainer_class.__name__} does not compute .*--generator hf"):
        run_of(tmp_path, trainer_class=trainer_class, max_steps=1)


def test_corrections_that_ignore_the_sampler_ignore_what_it_kept(tmp_path: Path) -> None:
    run = run_of(tmp_path, "none", max_steps=1)
    assert SIZES not in run.inputs[0]
