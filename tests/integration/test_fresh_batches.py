"""A batch that the version in training has sampled itself: where trainer and sampler disagree on it, the run stops."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3ForCausalLM
from trl import GRPOTrainer

from async_grpo.archive.history import Sampler
from async_grpo.errors import RunRefused
from async_grpo.roles.parameter_server import training_of
from async_grpo.rundir.lifecycle import prepare
from async_grpo.rundir.paths import RunDir
from async_grpo.settings import TrainingSettings
from async_grpo.setup.process import StopRequest
from async_grpo.training.corrections.fresh_batch import EXACT, ROUNDED, Bound, bound_of
from kit.compared_with_trl import run_as_trl_would, settings
from kit.in_process import InProcessRun
from kit.own_code import OwnForwardPass
from kit.plans import planned
from kit.tiny_trainer import build_model, build_tokenizer

HF = Sampler(generator="hf", correction="bypass", departures=[])
STRICT = Bound(nats=EXACT, basis="as this is a test", stops=True)
BATCH = {"max_completion_length": 40, "max_steps": 2}  # 8 completions: 320 tokens, if none ends


def trainers(folder: Path, model: Callable[[], Any] | None = None, **changes: Any) -> Callable[..., GRPOTrainer]:
    """A `get_trainer()` that builds its model each time."""

    def get_trainer(**more: Any) -> GRPOTrainer:
        return settings(folder, **{**BATCH, **changes})(model=model and model(), **more)

    return get_trainer


def guarded(folder: Path, bound: Bound = STRICT, **changes: Any) -> InProcessRun:
    return InProcessRun(trainers(folder, **changes), fresh=bound)


def refusal(folder: Path, **changes: Any) -> str:
    """The sentence that ends the run, before its first step."""
    run = guarded(folder, **changes)
    before = [parameter.clone() for parameter in run.trainer.model.parameters()]
    with pytest.raises(RunRefused) as refused:
        run.train()
    assert run.trainer.state.global_step == 0
    assert all(map(torch.equal, before, run.trainer.model.parameters())), "no step was taken"
    return str(refused.value)


def gpt2() -> GPT2LMHeadModel:
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 2, "initializer_range": 0.3, "vocab_size": len(tokenizer)}
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(**shape, **no_dropout, **ends))


def changed(kind: type[Qwen3ForCausalLM]) -> Qwen3ForCausalLM:
    plain = build_model(build_tokenizer())
    model = kind(plain.config)
    model.load_state_dict(plain.state_dict())
    return model


class ScalesWhileTraining(Qwen3ForCausalLM):
    """Nothing that has a name: its hidden states are larger in training mode."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.norm.register_forward_hook(lambda module, _, output: output * (1.3 if module.training else 1.0))


class NoisyWhileTraining(Qwen3ForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers[0].register_forward_hook(
            lambda module, _, output: output + torch.randn_like(output) if module.training else output
        )


class ShiftsPositions(GRPOTrainer):
    """The trainer's log-probabilities are of other positions than the sampler's."""

    def _get_per_token_logps_and_entropies(self, model: Any, ids: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        def shifted(module: Any, _: Any, given: dict[str, Any]) -> Any:
            positions = torch.arange(given["input_ids"].shape[1]) ** 2
            return (), {**given, "position_ids": positions[None].expand_as(given["input_ids"])}

        hook = model.register_forward_pre_hook(shifted, with_kwargs=True)
        try:
            return super()._get_per_token_logps_and_entropies(model, ids, mask, *args, **kwargs)
        finally:
            hook.remove()


def test_learned_positions_and_padding(tmp_path: Path) -> None:
    said = refusal(tmp_path, model=gpt2)
    assert "how its batch is padded" in said
    assert "the mean of 3" in said and "before optimizer step 1" in said
    assert "at most 0.02 are expected, as this is a test" in said
    assert "in the trainer" in said and "in the worker" in said
    assert said.endswith("--accept-mismatch trains all the same.")


def test_learned_positions_without_padding(tmp_path: Path) -> None:
    rows = Dataset.from_list([{"prompt": text, "target": 3} for text in ("abc", "def", "ghi", "jkl")])
    run_as_trl_would(trainers(tmp_path, gpt2, train_dataset=rows), fresh=STRICT)


@pytest.mark.parametrize("kind", [ScalesWhileTraining, NoisyWhileTraining])
def test_what_acts_only_while_the_model_trains(kind: type[Qwen3ForCausalLM], tmp_path: Path) -> None:
    assert "something acts only while the model trains" in refusal(tmp_path, model=partial(changed, kind))


def test_other_computations_than_the_samplers(tmp_path: Path) -> None:
    assert "differs also alone" in refusal(tmp_path, trainer_class=ShiftsPositions)


def test_a_loss_that_shows_no_log_probabilities_gets_one_pass(tmp_path: Path) -> None:
    assert "padded" in refusal(tmp_path, model=gpt2, trainer_class=OwnForwardPass)
    passes = []

    class Counting(OwnForwardPass):
        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
            passes.append(self.state.global_step)
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    guarded(tmp_path, trainer_class=Counting, max_steps=3).train()
    assert passes == [0]


def test_stale_rollouts_are_not_compared(tmp_path: Path, warnings: list[str]) -> None:
    get_trainer = settings(tmp_path, **{**BATCH, "learning_rate": 3e-2, "max_steps": 4})
    run = InProcessRun(get_trainer, fresh_every=4, fresh=STRICT).train()
    assert run.logs[-1]["async/ratio_max"] > 1.1, "they do differ"
    assert not warnings


@pytest.mark.parametrize("changes", [{}, {"num_iterations": 2}, {"gradient_accumulation_steps": 2}])
def test_only_weights_that_sampled_are_compared(changes: dict[str, Any], tmp_path: Path, warnings: list[str]) -> None:
    guarded(tmp_path, learning_rate=3e-2, max_steps=4, **changes).train()
    assert not warnings


def test_an_accepted_mismatch_without_correction_is_plain_trl(tmp_path: Path) -> None:
    """GPT-2 with padding: plain TRL samples with other positions than it trains with, too."""
    accepted = Bound(nats=EXACT, basis="as this is a test")
    run_as_trl_would(trainers(tmp_path, gpt2), correction="none", fresh=accepted)


def test_the_bound_is_that_of_what_rounds(tmp_path: Path) -> None:
    exact = settings(tmp_path)()
    assert bound_of(exact, HF, None, stops=True).nats == EXACT
    assert bound_of(exact, HF, "bf16", stops=True).basis == "as --publish-dtype bf16 may round"
    for generator in ("vllm", None):
        other = Sampler(generator=generator, correction="bypass", departures=[])
        assert bound_of(exact, other, None, stops=True).nats == ROUNDED
    truncated = Sampler(generator="vllm", correction="none", departures=["top_k=5"])
    assert bound_of(exact, truncated, None, stops=True) == Bound()
    half = settings(tmp_path, model=build_model(build_tokenizer()).bfloat16())()
    assert bound_of(half, HF, None, stops=True).basis == "as bfloat16 may round"


def test_nothing_random_is_drawn(tmp_path: Path) -> None:
    """A replay, which does not look, gives the weights of the run, dropout or not."""
    bounds = (None, Bound(nats=1e-9, basis="as this is a test"))
    adapter = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.2, init_lora_weights=False)
    for trainer_class in (GRPOTrainer, OwnForwardPass):
        get_trainer = trainers(tmp_path, given={"peft_config": adapter}, trainer_class=trainer_class, max_steps=3)
        looked, plain = (InProcessRun(get_trainer, fresh=bound).train() for bound in bounds)
        assert [entry["loss"] for entry in looked.logs] == [entry["loss"] for entry in plain.logs]


@pytest.mark.parametrize(
    ("options", "changes", "stops"),
    [
        ({}, {}, True),
        ({"accept_mismatch": True}, {}, False),
        ({"correction": "none"}, {}, False),
        ({"correction": "trl"}, {}, True),
        ({}, {"neftune_noise_alpha": 5.0}, False),
    ],
)
def test_what_only_warns(options: dict[str, Any], changes: dict[str, Any], stops: bool, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "worker")
    state = prepare(run.root, planned(Path("my_trainer.py"), workers=1))
    trainer = settings(tmp_path / "outputs", **changes)()
    training = TrainingSettings(**options)
    with training_of(trainer, run, state, training, StopRequest()):
        basis = "as trainer, published weights and sampler compute in float32 without TF32"
        bound = cast(Any, trainer).correct.fresh.bound
        assert bound == Bound(nats=EXACT, basis=basis, stops=stops)
