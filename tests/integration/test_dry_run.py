"""`train --dry-run` on a real trainer: the plan is right, the refusals are those of the real start, nothing changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_grpo.checks.plan.trainer_facts import describe
from async_grpo.rundir.paths import FINISHED, RunDir, RunState
from kit.plans import planned
from kit.runs import ROOT, SETUP, command
from kit.tiny_trainer import PROMPTS, QWEN3_CHAT_TEMPLATE, build_trainer

pytestmark = pytest.mark.integration
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
