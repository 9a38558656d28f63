"""Corrections within TRL's own loss: `trl` equals TRL's with use_vllm=True, and what the others save or change."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from trl import GRPOTrainer
from trl.experimental.gmpo import GMPOTrainer

from async_grpo.engines import PreparedGroup, SampledGroup
from async_grpo.engines.batch_engine import BatchEngine
from async_grpo.errors import UnsupportedError
from async_grpo.records import RolloutGroup
from async_grpo.setup.algorithm import Algorithm
from async_grpo.setup.generator_choice import STARTED_SERVER
from async_grpo.tokens import Tokens
from async_grpo.tokens.kept_tokens import unpack
from async_grpo.training.corrections.checks import check
from async_grpo.training.corrections.kept_log_probs import IDS, SIZES
from async_grpo.training.corrections.rule import Rule, rule
from async_grpo.training.corrections.trl_loss import has_own_loss
from kit.compared_with_trl import largest_difference, settings
from kit.in_process import InProcessRun, training_logs
from kit.own_code import OwnForwardPass, OwnLoss
from kit.recorded_batches import replay_with_trl
from kit.tiny_trainer import build_trainer

OTHER_ENGINE = 0.3  # nats by which the sampler's log-probabilities differ from the trainer's, at most


class MismatchedRun(InProcessRun):
    """A run whose sampler has slightly other log-probabilities than the trainer, as an engine of another kind has."""

    def _generate(self) -> list[RolloutGroup]:
        generator = torch.Generator().manual_seed(len(self.batches))
        return [
            replace(group, sampling_logprobs=group.sampling_logprobs - noise.numpy())
            for group in super()._generate()
            for noise in [OTHER_ENGINE * torch.rand(len(group.sampling_logprobs), generator=generator)]
        ]


def as_with_vllm(get_trainer: Callable[..., GRPOTrainer]) -> Callable[..., GRPOTrainer]:
    """Plain TRL with use_vllm=True, but for the engine: a `rollout_func` brings the completions."""

    def get(**arguments: Any) -> GRPOTrainer:
        trainer: Any = get_trainer(**arguments)
        trainer.use_vllm, trainer.vllm_mode, trainer._last_loaded_step = True, "server", -1
        trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
        return trainer

    return get


def objective(mode: str, least: float | None = None, most: float | None = None, **changes: Any) -> dict[str, Any]:
    clips = {"clip_min": least, "clip_max": most}
    given = {f"vllm_importance_sampling_{name}": value for name, value in clips.items() if value is not None}
    return {"vllm_importance_sampling_mode": mode, **given, **changes}


TWICE = {"num_iterations": 2, "max_steps": 4}
OBJECTIVES: dict[str, tuple[dict[str, Any], Rule | None]] = {  # and the rule that gives the same weights
    "its defaults": ({}, None),
    "token_truncate": (objective("token_truncate", most=1.1), rule("tis", "token", most=1.1)),
    "token_truncate twice": (objective("token_truncate", most=1.1, **TWICE), rule("tis", "token", most=1.1)),
    "token_mask": (objective("token_mask", 1.05, 1.2), None),
    "a lower token_mask": (objective("token_mask", 0.9, 1.2, **TWICE), rule("icepop", "token", 0.9, 1.2)),
    "sequence_truncate": (
        objective("sequence_truncate", most=2.0, loss_type="grpo", beta=0.1),
        rule("tis", "sequence", most=2.0),
    ),
    "sequence_mask": (objective("sequence_mask", **TWICE), rule("icepop", "sequence", 0.0, 3.0)),
    "vespo": (objective("token_truncate", loss_type="vespo"), None),
    "no correction": ({"vllm_importance_sampling_correction": False}, None),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_trl_at_staleness_zero_is_trl_with_use_vllm(name: str, tmp_path: Path, model_folder: str) -> None:
    """And so is our rule, where there is one of the same weights. With one step a batch it takes no forward pass."""
    changes, ours = OBJECTIVES[name]
    get_trainer = settings(tmp_path, **{"model": model_folder, "max_steps": 3, **changes})
    run = MismatchedRun(get_trainer, correction="trl").train()
    plain = replay_with_trl(as_with_vllm(get_trainer), run.batches)
    largest_difference(run.logs, training_logs(plain))
    without = replay_with_trl(get_trainer, run.batches)
    if name != "no correction":
        with pytest.raises(AssertionError):  # else the comparison would show nothing
            largest_difference(run.logs, training_logs(without))
    assert not run.trainer.use_vllm, "evaluation and the next generation are not vLLM's"
    if ours is not None:
        assert steps_of(get_trainer, ours) == pytest.approx([entry["grad_norm"] for entry in run.logs], abs=1e-5)


def steps_of(get_trainer: Callable[..., GRPOTrainer], correction: str | Rule) -> list[float]:
    return [entry["grad_norm"] for entry in MismatchedRun(get_trainer, correction=correction).train().logs]


# --- Losses that are not TRL's ----------------------------------------------------------------------------


class AddsToTheLoss(GRPOTrainer):
    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        return super()._compute_loss(model, {**inputs}) + 0.0


class OwnLossOfOurs(GRPOTrainer):
    """A trainer of this package that declares nothing: its code decides, as that of a user's class."""

    __module__ = "async_grpo.credit.later"
    compute_loss = OwnLoss.compute_loss


class DeclaredOwnLoss(Algorithm, GRPOTrainer):
    """Its code looks as if it took TRL's weights."""

    __module__ = "async_grpo.credit.later"
    own_loss = True

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        return super()._compute_loss(model, {**inputs})


class DeclaredLossOfTRL(Algorithm, GRPOTrainer):
    """Its code looks as if the loss were its own."""

    own_loss = False

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        return self.policy_loss(model, inputs)

    def policy_loss(self, model: Any, inputs: Any) -> Any:
        return super()._compute_loss(model, inputs)


class OwnLossOfAUser(DeclaredLossOfTRL):
    """What another class declares is not of this one."""

    compute_loss = OwnLoss.compute_loss


LOSSES = {
    GRPOTrainer: False,
    AddsToTheLoss: False,
    OwnLoss: True,
    OwnLossOfOurs: True,
    DeclaredOwnLoss: True,
    DeclaredLossOfTRL: False,
    OwnLossOfAUser: True,
}


@pytest.mark.parametrize(("cls", "own"), LOSSES.items())
@pytest.mark.parametrize("correction", [rule("tis", most=1.1), rule("icepop", "geometric", 0.9, 1.2)], ids=str)
def test_the_weights_reach_a_loss_of_the_users(cls: Any, own: bool, correction: Rule, tmp_path: Path) -> None:
    get_trainer = settings(tmp_path, trainer_class=cls, max_steps=3)
    assert has_own_loss(get_trainer()) == own
    expected = steps_of(settings(tmp_path, max_steps=3), correction)
    assert steps_of(get_trainer, correction) == pytest.approx(expected, abs=1e-5)


class WithValues(Algorithm, GRPOTrainer):
    token_columns = ("values",)
    shape: tuple[int, ...] = ()

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        shape = output["completion_ids"].shape[: len(self.shape)] if self.shape else output["completion_ids"].shape
        return {**output, "values": torch.zeros(shape)}


def test_columns_of_tokens_reach_the_loss(tmp_path: Path) -> None:
    run = MismatchedRun(settings(tmp_path, trainer_class=WithValues, max_steps=1), correction="tis").train()
    assert run.inputs[0]["values"].shape == run.inputs[0]["completion_ids"].shape


def test_a_column_of_tokens_with_another_shape_is_refused(tmp_path: Path) -> None:
    get_trainer = settings(tmp_path, trainer_class=type("OneForEach", (WithValues,), {"shape": (0,)}), max_steps=1)
    with pytest.raises(UnsupportedError, match=r"`values` of shape \[8\] for 8 completions"):
        MismatchedRun(get_trainer).train()


class WithATeacher(GRPOTrainer):
    """Asks another model for log-probabilities before TRL's loss asks its own."""

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        ids = [torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], dim=1) for name in ("ids", "mask")]
        with torch.no_grad():
            self._get_per_token_logps_and_entropies(self.worse, *ids, inputs["completion_ids"].shape[1])
        return super()._compute_loss(model, inputs)

    @property
    def worse(self) -> Any:
        other = copy.deepcopy(self.model)
        torch.nn.init.normal_(other.get_input_embeddings().weight)
        return other


def test_the_weights_are_of_the_model_that_trains(tmp_path: Path) -> None:
    logs = [
        MismatchedRun(settings(tmp_path, trainer_class=cls, max_steps=2), correction=rule("tis", most=1.1)).train().logs
        for cls in (GRPOTrainer, WithATeacher)
    ]
    for ours, theirs in zip(*logs, strict=True):
        for name in ("grad_norm", "async/ratio_max", "async/weight_changed_fraction"):
            assert theirs[name] == pytest.approx(ours[name], abs=1e-5), name


class OwnForwardPassWithWeights(GRPOTrainer):
    """It would multiply by the weights, as TRL does, but nobody can know its log-probabilities."""

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        return OwnForwardPass._compute_loss(self, model, inputs) * inputs["importance_sampling_ratio"].mean()


@pytest.mark.parametrize("correction", ["bypass", "tis", "none"])
def test_a_loss_may_make_its_own_forward_pass(correction: str, tmp_path: Path) -> None:
    get_trainer = settings(tmp_path, trainer_class=OwnForwardPass, max_steps=2)
    assert len(MismatchedRun(get_trainer, correction=correction).train().logs) == 2


def test_weights_that_nobody_fills_in_are_refused(tmp_path: Path) -> None:
    get_trainer = settings(tmp_path, trainer_class=OwnForwardPassWithWeights, max_steps=1)
    with pytest.raises(UnsupportedError, match=r"OwnForwardPassWithWeights.*_get_per_token_logps_and_entropies"):
        MismatchedRun(get_trainer, correction="tis").train()


def test_a_loss_of_trl_that_takes_no_weights_is_refused(tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path, trainer_class=GMPOTrainer)
    with pytest.raises(UnsupportedError, match=r"GMPOTrainer.*--correction bypass"):
        check(rule("tis"), trainer, own_loss=has_own_loss(trainer))
    for name in ("bypass", "trl", "none"):
        check(rule(name), trainer, own_loss=has_own_loss(trainer))


# --- Forward passes ---------------------------------------------------------------------------------------


class Counting(GRPOTrainer):
    """Counts passes without gradient."""

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        self.passes = getattr(self, "passes", 0) + (not torch.is_grad_enabled())
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)


@pytest.mark.parametrize(
    ("correction", "iterations", "passes"),
    [("bypass", 1, 0), ("bypass", 2, 0), ("decoupled", 1, 0), ("icepop", 1, 0), ("tis", 2, 1), ("trl", 1, 1)],
)
def test_forward_passes_beyond_those_of_the_loss(correction: str, iterations: int, passes: int, tmp_path: Path) -> None:
    """For a batch: with one step on it pi_old is pi, which the loss computes; `bypass` needs no pi_old at all."""
    get_trainer = settings(tmp_path, trainer_class=Counting, num_iterations=iterations, max_steps=2 * iterations)
    run = InProcessRun(get_trainer, correction=correction).train()
    assert getattr(run.trainer, "passes", 0) == passes * len(run.batches)


def test_with_one_step_a_batch_the_ratio_never_clips(tmp_path: Path) -> None:
    """Stale groups and a large step: `bypass` clips, `decoupled` cannot, since pi is pi_old."""
    get_trainer = settings(tmp_path, max_steps=3, learning_rate=3e-2)
    stale = [InProcessRun(get_trainer, fresh_every=3, correction=name).train().logs for name in ("bypass", "decoupled")]
    clipped = [sum(entry["clip_ratio/region_mean"] for entry in logs) for logs in stale]
    assert clipped[0] > 0 == clipped[1]


def test_stale_sequences_outweigh_each_other_and_fresh_ones_do_not(tmp_path: Path) -> None:
    """Reported for every optimizer step; three of four train on what the first weights sampled."""
    run = InProcessRun(settings(tmp_path, max_steps=4, learning_rate=3e-2), fresh_every=4).train()
    fresh, *stale = [entry["async/ess_sequences"] for entry in run.logs]
    assert fresh == pytest.approx(1.0, abs=1e-6)
    assert 0 < max(stale) < 0.999


# --- Training on truncated sampling, as vLLM does it: ------------------------------------------------------------

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
