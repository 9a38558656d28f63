"""`async-grpo check` on real files: the demo is equal, and each planted difference is found and named."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from trl import GRPOTrainer
from trl.trainer import grpo_trainer
from trl_contract import moved

from async_grpo.checks.differential import plain, recorder, tiny
from async_grpo.errors import UnsupportedError
from kit.compared_with_trl import equal_weights
from kit.runs import ROOT, SETUP, command
from kit.tiny_trainer import build_model, build_tokenizer, build_trainer

pytestmark = pytest.mark.integration

TESTS = Path(__file__).parents[1]
PLANTED = SETUP.parent / "planted_differences.py"
DEMO = ROOT / "src" / "app" / "trainer_setup_tiny.py"
CHECK = "async_grpo.checks.differential"


def check(folder: Path, setup: Path, *options: str, code: int, **env: str) -> tuple[dict[str, list[Any]], str]:
    """The lines of a check by subject, and what was printed."""
    written = folder / "lines.json"
    with command("check", str(setup), "--json", str(written), *options, cwd=folder, **env) as running:
        assert running.wait() == code, running.output
        output = running.output
    found: dict[str, list[Any]] = {}
    for line in json.loads(written.read_text())["lines"] if written.exists() else ():
        found.setdefault(line["subject"], []).append(line)
    return found, output


def test_the_demo_trains_as_in_plain_trl_and_writes_nothing(tmp_path: Path) -> None:
    found, output = check(tmp_path, DEMO, code=0)
    assert {line["status"] for lines in found.values() for line in lines} == {"equal", "documented"}
    assert {"prompts", "reward accuracy", "batches", "log-probs", "losses", "gradients", "metrics", "files"} <= {*found}
    assert "will score 256 completions in a run (32 calls)" in output
    left = [path.name for path in tmp_path.iterdir() if not path.name.startswith("output-")]
    assert left == ["lines.json"], "the user's output_dir is not written to"


@pytest.mark.slow
def test_padding_that_was_not_computed_is_a_documented_difference(tmp_path: Path) -> None:
    grpo = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "gradient_accumulation_steps": 2}
    found, output = check(tmp_path, SETUP.parent / "random_model.py", code=0, TEST_GRPO=json.dumps(grpo))
    (padding,) = found.pop("padding")
    assert padding["status"] == "documented" and "computed in pieces without it" in padding["found"], output
    assert {line["status"] for lines in found.values() for line in lines} <= {"equal", "documented"}, output


PLANTED_CASES = {
    "counter": ("reward counts_calls", "differs", "It changes calls"),
    "draws": ("reward draws", "unknown", "It draws random numbers"),
    "generation_config": ("sampling", "differs", "in the server only"),
    "scoring": ("scores", "documented", "a batch in TRL, a group in a worker"),
    "dropout": ("batches", "documented", "dropout draws from the numbers that TRL shuffles a batch by"),
    "collator": ("batches", "differs", "Random numbers were drawn in another order"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", PLANTED_CASES)
def test_a_planted_difference_is_found_and_named(case: str, tmp_path: Path) -> None:
    subject, status, cause = PLANTED_CASES[case]
    env = {"TEST_CASE": case, "TEST_EXTRA_PATH": str(TESTS)}
    found, _ = check(tmp_path, PLANTED, code=int(status == "differs"), **env)
    line = found[subject][-1]
    assert (line["status"], cause in line["cause"]) == (status, True), line


@pytest.mark.slow
def test_what_cannot_be_trained_as_a_run_is_exit_2_with_its_sentence(tmp_path: Path) -> None:
    check(tmp_path, PLANTED, code=2, TEST_CASE="patched", TEST_EXTRA_PATH=str(TESTS))
    error = json.loads((tmp_path / "lines.json").read_text())["error"]
    what = "The file cannot be trained as a run, so there is nothing to compare: "
    assert error.startswith(what) and "_generate_single_turn" in error


# --- The small model of --tiny ------------------------------------------------------------------------------

LARGE = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 16}
CONFIGS = [
    transformers.Qwen3Config(**LARGE, num_key_value_heads=4, head_dim=64, vocab_size=100),
    transformers.LlamaConfig(**LARGE, num_key_value_heads=16, vocab_size=100),
    transformers.GPT2Config(n_embd=512, n_layer=6, n_head=8, vocab_size=100),
    transformers.Gemma3TextConfig(**LARGE, num_key_value_heads=8, head_dim=32, vocab_size=100),
    transformers.Qwen3MoeConfig(
        **LARGE, num_key_value_heads=4, num_experts=16, moe_intermediate_size=256, vocab_size=100
    ),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_an_architecture_is_cut_down_and_computes(config: Any) -> None:
    model = tiny._made(config, transformers.AutoModelForCausalLM.from_config)
    assert model.num_parameters() < 500_000
    assert model.config.vocab_size == 100, "the tokenizer fits"
    logits = model(input_ids=torch.tensor([[1, 2, 3]])).logits
    assert logits.isfinite().all() and logits.std() > 0.3, "tokens are not equally likely"


@pytest.mark.parametrize("kind", [transformers.AutoModelForCausalLM, transformers.Qwen3ForCausalLM])
def test_a_model_that_the_file_loads_itself_is_refused_before_it_is_loaded(kind: Any) -> None:
    before = kind.from_pretrained
    with tiny.cut_down(), pytest.raises(UnsupportedError, match="from_pretrained itself"):
        kind.from_pretrained("some/model")
    assert kind.from_pretrained == before


@pytest.mark.parametrize(
    "arguments, why", [({"quantization_config": object()}, "not quantised"), ({"peft": True}, "has adapters already")]
)
def test_what_cannot_be_cut_down_is_refused(arguments: dict[str, Any], why: str, tmp_path: Path) -> None:
    model: Any = build_model(build_tokenizer())
    if arguments.pop("peft", False):
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    with tiny.cut_down(), pytest.raises(UnsupportedError, match=why):
        build_trainer(tmp_path, model=model, arguments=arguments)


def test_the_model_of_a_trainer_is_cut_down_the_same_each_time(tmp_path: Path) -> None:
    def built() -> Any:
        return build_trainer(tmp_path, model=build_model(build_tokenizer(), hidden_size=256, num_hidden_layers=4)).model

    with tiny.cut_down():
        first, second = built(), built()
    assert first.config.hidden_size == 64 and first.config.num_hidden_layers == 2
    assert equal_weights(first, second)


# --- What is replaced and recorded of TRL -------------------------------------------------------------------

PARAMETERS = {
    "compute_loss": ("model", "inputs"),
    "_get_per_token_logps_and_entropies": ("model",),
    "_generate_single_turn": ("prompt_ids",),
    "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
}


@pytest.mark.parametrize("hook", PARAMETERS)
def test_trl_has_what_a_check_records_and_replaces(hook: str) -> None:
    method = getattr(GRPOTrainer, hook, None)
    assert method is not None, moved(hook, "is gone", CHECK)
    assert set(PARAMETERS) == {*plain.HOOKS, *recorder.HOOKS}
    names = tuple(inspect.signature(inspect.unwrap(method)).parameters)[1:]
    assert names[: len(PARAMETERS[hook])] == PARAMETERS[hook], moved(hook, f"takes {names}", CHECK)


def test_trl_makes_models_by_the_function_that_tiny_replaces() -> None:
    assert "create_model_from_path(" in inspect.getsource(GRPOTrainer.__init__), moved(
        "create_model_from_path", "is not called", f"{CHECK}.tiny"
    )
    assert next(iter(inspect.signature(grpo_trainer.create_model_from_path).parameters)) == "model_id"
