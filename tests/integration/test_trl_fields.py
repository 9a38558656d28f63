"""Fields, arguments and overrides of TRL that no other file has a subject for: see `trl_table`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForSequenceClassification, Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import GRPOTrainer

from async_grpo.setup.setup_file import _failed
from async_grpo.training.corrections.checks import describe_noise
from kit.compared_with_trl import run_as_trl_would, settings
from kit.in_process import InProcessRun
from kit.scripted import ScriptedEngine, ScriptedGenerator
from kit.tiny_trainer import QWEN3_CHAT_TEMPLATE, build_model, build_tokenizer, build_trainer, plain_rows
from kit.tools import TOOL_CALL, multiply, says_twelve

pytestmark = pytest.mark.integration


def test_a_mixture_of_experts(tmp_path: Path) -> None:
    """With the loss that balances them."""
    tokenizer = build_tokenizer()
    sizes = build_model(tokenizer).config.to_dict()
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    names += ("head_dim", "vocab_size", "pad_token_id", "eos_token_id", "initializer_range")
    config = Qwen3MoeConfig(
        **{name: sizes[name] for name in names},
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
    )

    def model() -> Any:
        torch.manual_seed(0)
        return Qwen3MoeForCausalLM(config)

    def get_trainer(arguments: dict[str, Any] | None = None) -> GRPOTrainer:
        return build_trainer(tmp_path, model=model(), arguments=arguments, router_aux_loss_coef=0.1)

    run, _ = run_as_trl_would(get_trainer)
    assert run.logs[0]["aux_loss"] > 0


def test_the_model_is_built_with_its_arguments_on_both_sides(tmp_path: Path, model_folder: str) -> None:
    arguments = {"attn_implementation": "eager"}
    get_trainer = settings(tmp_path, model=model_folder, model_init_kwargs=arguments, trust_remote_code=True)
    run, _ = run_as_trl_would(get_trainer)
    assert {side.model.config._attn_implementation for side in (run.trainer, run.worker)} == {"eager"}


def test_the_cache_that_workers_sample_with(tmp_path: Path) -> None:
    run, _ = run_as_trl_would(settings(tmp_path, cache_implementation="dynamic"))
    assert run._working.calls._engine._config.cache_implementation == "dynamic"


@pytest.mark.parametrize("limit", [1, 3])
def test_the_limit_of_tool_calls(limit: int, tmp_path: Path) -> None:
    engine = ScriptedEngine(ScriptedGenerator(lambda prompt, index: f"again{TOOL_CALL}"))
    get_trainer = settings(
        tmp_path,
        {"tools": [multiply]},
        chat_template=QWEN3_CHAT_TEMPLATE,
        reward_funcs=[says_twelve],
        max_completion_length=2000,
        max_tool_calling_iterations=limit,
        max_steps=1,
    )
    run = InProcessRun(get_trainer, engine=engine).train()
    calls = [sum(message["role"] == "tool" for message in row) for group in run.groups for row in group.completions]
    assert set(calls) == {limit}


def test_completions_are_logged_by_the_server(tmp_path: Path) -> None:
    import pyarrow.parquet

    changes = {"log_completions": True, "num_completions_to_print": 1, "log_multimodal": False}
    run = InProcessRun(settings(tmp_path, **changes)).train()
    files = sorted((tmp_path / "completions").glob("*.parquet"))
    tables = [pyarrow.parquet.read_table(file).to_pydict() for file in files]
    rewards = [group.rewards[:, 0].tolist() for group in run.batches[0]]
    assert len(files) == 2
    assert tables[0]["letters"] == pytest.approx([reward for row in rewards for reward in row])


def test_columns_that_are_removed(tmp_path: Path) -> None:
    run = InProcessRun(settings(tmp_path, remove_unused_columns=True, max_steps=1)).train()
    assert {name for group in run.groups for name in group.job.row} == {"prompt"}
    assert plain_rows().column_names == ["prompt", "target"]


def test_an_optimizer_of_the_users(tmp_path: Path) -> None:
    def get_trainer(arguments: dict[str, Any] | None = None) -> GRPOTrainer:
        model = build_model(build_tokenizer())
        optimizers = (torch.optim.SGD(model.parameters(), lr=0.5), None)
        return build_trainer(tmp_path, model=model, arguments={"optimizers": optimizers, **(arguments or {})})

    run, _ = run_as_trl_would(get_trainer)
    assert type(run.trainer.optimizer.optimizer) is torch.optim.SGD


class Constructed(GRPOTrainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.factor = 3.0

    def _calculate_rewards(self, *args: Any) -> Any:
        return self.factor * super()._calculate_rewards(*args)


def test_a_constructor_of_the_users(tmp_path: Path) -> None:
    run = InProcessRun(settings(tmp_path, trainer_class=Constructed, max_steps=1))
    assert run.trainer.factor == run.worker.factor == 3.0


def test_an_override_of_the_scoring(tmp_path: Path) -> None:
    """It runs once, in the worker."""
    plain = InProcessRun(settings(tmp_path, max_steps=1)).train()
    tripled, _ = run_as_trl_would(settings(tmp_path, trainer_class=Constructed, max_steps=1))
    assert tripled.logs[0]["reward"] == pytest.approx(3 * plain.logs[0]["reward"])


@pytest.mark.parametrize(("rate", "disabled", "told"), [(0.05, False, True), (0.05, True, False), (0.0, False, False)])
def test_dropout_that_workers_do_not_have_is_told(rate: float, disabled: bool, told: bool, tmp_path: Path) -> None:
    adapter = LoraConfig(r=4, target_modules="all-linear", lora_dropout=rate)
    trainer = build_trainer(tmp_path, arguments={"peft_config": adapter}, disable_dropout=disabled)
    assert ("dropout (0.05)" in describe_noise(trainer)) is told


def test_noise_in_embeddings_that_workers_do_not_have_is_told(tmp_path: Path) -> None:
    said = describe_noise(build_trainer(tmp_path, neftune_noise_alpha=5.0))
    assert "noise in its embeddings (neftune_noise_alpha=5.0) and workers sample without it" in said
    assert "neftune_noise_alpha=None in the GRPOConfig" in said


MADE = build_model(build_tokenizer())


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"beta": 0.1}, "the reference model of beta > 0. Set beta=0"),
        ({"trainer_class": lambda **given: GRPOTrainer(**{**given, "processing_class": None})}, "the tokenizer. Pass"),
        ({"reward_funcs": AutoModelForSequenceClassification.from_config(MADE.config)}, "the tokenizer of a reward"),
    ],
)
def test_what_trl_loads_by_the_name_of_a_model_that_has_none(changes: Any, what: str, tmp_path: Path) -> None:
    with pytest.raises(OSError) as failure:
        build_trainer(tmp_path, model=MADE, **changes)
    said = _failed("", failure.value, Path(__file__))
    assert said.startswith("A model that was made in code has no name (") and f"and TRL loads by it {what}" in said
