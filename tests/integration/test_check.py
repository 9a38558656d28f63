"""`async-grpo check` on real files: the demo is equal, and each planted difference is found and named."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from runs import ROOT, command
from trl import GRPOTrainer
from trl.trainer import grpo_trainer
from trl_contract import moved

from async_grpo.checks.differential import plain, recorder

pytestmark = pytest.mark.integration

HERE = Path(__file__).parent
PLANTED = HERE / "setups" / "planted_differences.py"
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
    assert {"prompts", "reward accuracy", "batches", "log-probs", "losses", "gradients", "metrics", "files"} <= set(
        found
    )
    assert "will score 256 completions in a run (32 calls)" in output
    left = [path.name for path in tmp_path.iterdir() if not path.name.startswith("output-")]
    assert left == ["lines.json"], "the user's output_dir is not written to"


PLANTED_CASES = {
    "counter": ("reward counts_calls", "differs", "It changes calls"),
    "callback": ("reward reads_phase", "differs", "It reads phase, which is 0 in the worker and 0, 1 in plain TRL"),
    "clock": ("reward reads_clock", "unknown", "another value each time"),
    "draws": ("reward draws", "unknown", "random numbers"),
    "batch": ("reward compares", "documented", "compares the completions of a call"),
    "generation_config": ("sampling", "differs", "in the server only"),
    "patched": ("override _generate_single_turn", "differs", "in the workers"),
    "scoring": ("scores", "documented", "a batch in TRL, a group in a worker"),
    "dropout": ("losses", "documented", "dropout (0.3)"),
    "collator": ("prompts", "differs", "for that reason"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", PLANTED_CASES)
def test_a_planted_difference_is_found_and_named(case: str, tmp_path: Path) -> None:
    subject, status, cause = PLANTED_CASES[case]
    env = {"TEST_CASE": case, "TEST_EXTRA_PATH": str(HERE)}
    found, _ = check(tmp_path, PLANTED, code=int(status == "differs"), **env)
    line = found[subject][-1]
    assert (line["status"], cause in line["cause"]) == (status, True), line


@pytest.mark.slow
def test_a_file_that_cannot_be_trained_as_a_run_is_exit_2_with_its_sentence(tmp_path: Path) -> None:
    setup = tmp_path / "mine.py"
    setup.write_text(
        "from transformers import AutoModelForCausalLM\n\n\n"
        "def get_trainer():\n    return AutoModelForCausalLM.from_pretrained('some/model')\n"
    )
    _, output = check(tmp_path, setup, "--tiny", code=2)
    assert "from_pretrained itself" in output


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
