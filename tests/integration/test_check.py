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
from async_grpo.checks.plan.trainer_facts import describe
from async_grpo.errors import UnsupportedError
from async_grpo.rundir.paths import FINISHED, RunDir, RunState
from kit.compared_with_trl import equal_weights
from kit.plans import planned
from kit.runs import ROOT, SETUP, command
from kit.tiny_trainer import PROMPTS, QWEN3_CHAT_TEMPLATE, build_model, build_tokenizer, build_trainer

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


# --- `train --dry-run` on a real trainer: ------------------------------------------------------------------------

DDP = str(ROOT / "examples" / "accelerate" / "ddp.yaml")
SETS_A_REGEX = 'trainer.args.vllm_structured_outputs_regex = "[0-9]+"'
LOGGING = ("--set", "log_completions=true")  # with which TRL makes a folder for them


def everything(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """Path -> mode, modification time, bytes. The output of the command itself is not counted."""
    return {
        str(path): (path.stat().st_mode, path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in sorted(root.rglob("*"))
        if not path.name.startswith("output-")
    }


def test_a_dry_run_tells_the_plan_and_leaves_everything_byte_for_byte(tmp_path: Path) -> None:
    setup = tmp_path / "setup.py"
    setup.write_text("import sys\nassert 'trl' not in sys.modules\nfrom neighbour import get_trainer")
    (tmp_path / "neighbour.py").write_bytes(SETUP.read_bytes())
    run_dir = tmp_path / "worker"
    run_dir.mkdir(mode=0o700)
    (run_dir / "log_worker_1.txt").write_text("of an older run\n")
    RunDir(run_dir).write_state(RunState(run_id="0123456789ab", state=FINISHED, started="then", plan=planned(), step=3))
    before = everything(tmp_path)
    options = ("--accelerate-config", DDP, "--master-device-id", "cpu", "-n", "2", "--steps", "40", "--dry-run")
    with command("train", str(setup), *options, *LOGGING, cwd=tmp_path) as run:
        assert run.wait() == 0, run.output
        text = run.output
    assert everything(tmp_path) == before
    assert f"{run_dir}: the ended run in it is moved to {run_dir}-" in text
    assert f"server in 2 processes, on the devices that {DDP} names" in text
    assert "8 prompts x 4 completions = 32 a round (each process: forward passes of 16;" in text
    assert "40 optimizer steps = 40 rounds = 1,280 completions; 5 epochs of 64 prompts" in text
    assert "at most 4 policy versions; 16 prompt groups under way at first, at most 40" in text
    assert f"{tmp_path / 'checkpoints'}, every 4 steps" in text
    assert "worker 2 on the CPU" in text and "transformers, in the workers" in text
    assert "21,600 parameters" in text
    assert "(4 versions of 86.4 kB)" in text, "two workers may each read another one"


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        pytest.param(SETS_A_REGEX, "transformers has no structured outputs", id="a setting", marks=pytest.mark.slow),
        pytest.param("raise FileNotFoundError('no model')", "FileNotFoundError: no model", id="an exception"),
    ],
)
def test_a_dry_run_refuses_what_the_start_refuses_with_its_words(tmp_path: Path, lines: str, sentence: str) -> None:
    """One message without a traceback, although the server and the worker both read the file."""
    setup = tmp_path / "setup.py"
    setup.write_text(
        f"import sys\nsys.path.insert(0, {str(SETUP.parent)!r})\nimport random_model\n"
        f"def get_trainer():\n    trainer = random_model.get_trainer()\n    {lines}\n    return trainer\n"
    )
    outputs = []
    for flags in (["--dry-run"], []):
        with command("train", str(setup), "-n", "1", *flags, cwd=tmp_path, PYTHONDONTWRITEBYTECODE="1") as run:
            assert run.wait() == 2, run.output
            outputs.append(run.output)
        assert (tmp_path / "worker").exists() == (not flags)
    dry, real = (output[output.index("error: ") :].strip() for output in outputs)
    assert sentence in dry
    assert dry == real
    assert outputs[1].count(sentence) == 1, outputs[1]
    assert "Traceback" not in outputs[1]
    assert ("get_trainer() in" in dry) == lines.startswith("raise")


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"gradient_accumulation_steps": 4},
        {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
        {"gradient_accumulation_steps": 4, "steps_per_generation": 2, "num_iterations": 3},
        {"num_train_epochs": 0.5},
    ],
)
def test_the_number_of_steps_is_that_of_transformers(arguments: dict[str, float], tmp_path: Path) -> None:
    trainer = build_trainer(
        tmp_path, **{"max_steps": -1, "num_train_epochs": 3, "per_device_train_batch_size": 2, **arguments}
    )
    facts = describe(trainer, planned())
    assert facts.steps == trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())[-1]
    assert facts.parameters.count == sum(p.numel() for p in trainer.model.parameters())
    assert facts.longest_prompt == max(map(len, PROMPTS)) and facts.prompts_measured == len(PROMPTS)


def test_prompts_of_messages_are_measured_with_their_template(tmp_path: Path) -> None:
    facts = describe(build_trainer(tmp_path, chat_template=QWEN3_CHAT_TEMPLATE), planned())
    assert facts.prompts_measured == len(PROMPTS)
    assert facts.longest_prompt is not None and facts.longest_prompt > max(map(len, PROMPTS)) + 4
