"""`async-grpo generate`: a worker and then everything is killed, and the rows are those of one worker."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from datasets import load_from_disk
from trl import SFTConfig, SFTTrainer

from async_grpo.setup.setup_file import load_trainer
from kit.runs import SETUP, command, ran

pytestmark = pytest.mark.integration

PROBLEMS = 64
ASKED = ("generate", "model", "--config", str(SETUP.parent / "two_waves.py"), "--deterministic")


@pytest.fixture(scope="module")
def trainer() -> Any:
    return load_trainer(SETUP)


@pytest.fixture
def folder(trainer: Any, tmp_path: Path) -> Path:
    trainer.model.save_pretrained(tmp_path / "model")
    return tmp_path


def complete(run: Path) -> list[str]:
    return [path.name for room in ("queue", "done") for path in (run / room).rglob("*_complete_*")]


def hashes(rows: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(rows.iterdir())}


def interrupt(folder: Path, env: dict[str, str]) -> int:
    """Begin with two workers. One is killed with a job in the first wave, the launcher in the second one."""
    run_dir, held = folder / "generation", {**env, "TEST_REWARD": "held", "TEST_REWARD_S": "0.05"}
    with command(*ASKED, "-n", "2", "--out", "rows", cwd=folder, **held) as run:
        run.kill_one_of_two_at_work(run_dir / "queue")
        run.wait_until(lambda: "a01" in " ".join(path.name for path in (run_dir / "queue").iterdir()), "a second try")
        Path(env["TEST_MARKER"]).touch()
        run.wait_until(lambda: len(complete(run_dir)) > PROBLEMS + 4, "the second wave")
        run.kill()
    return len(complete(run_dir))


def test_rows_are_the_same_for_one_worker_and_for_two_that_are_killed(trainer: Any, folder: Path) -> None:
    env = {"TEST_MARKER": str(folder / "marker")}
    done = interrupt(folder, env)
    assert not (folder / "rows").exists()
    ran(*ASKED, "-n", "1", "--resume", cwd=folder, **env)
    requests = len(complete(folder / "generation"))
    assert PROBLEMS < done <= requests, "what was finished is used again"

    ran(*ASKED, "-n", "1", "--out", "alone", "--run-dir", "other", cwd=folder, **env)
    assert len(complete(folder / "other")) == requests, "and nothing was asked twice"
    assert hashes(folder / "rows") == hashes(folder / "alone")

    rows = load_from_disk(str(folder / "rows"))
    check_rows(list(rows), trainer.processing_class)
    check_sft(rows, trainer)


def check_sft(rows: Any, trainer: Any) -> None:
    """As in docs/generate.md."""

    def for_sft(row: dict[str, Any]) -> dict[str, Any]:
        prompt, completion = row["prompt_ids"], row["completion_ids"]
        return {"input_ids": prompt + completion, "completion_mask": [0] * len(prompt) + row["completion_mask"]}

    args = SFTConfig("sft", completion_only_loss=True, report_to="none", use_cpu=True, bf16=False)
    data, tokenizer = rows.map(for_sft, remove_columns=rows.column_names), trainer.processing_class
    [*batches] = SFTTrainer(trainer.model, args, train_dataset=data, processing_class=tokenizer).get_train_dataloader()
    learned = sum(int((batch["labels"] != -100).sum()) for batch in batches)
    assert learned == sum(sum(row["completion_mask"]) for row in rows)


def check_rows(rows: list[dict[str, Any]], tokenizer: Any) -> None:
    keys = [(row["problem"], row["wave"], row["request"], row["sample"]) for row in rows]
    assert keys == sorted(set(keys)) and {key[0] for key in keys} == set(range(PROBLEMS))
    roll_ins = {row["problem"]: row for row in rows if row["wave"] == 0}
    continued = [row for row in rows if row["wave"] == 1]
    assert len(continued) == 2 * len({row["problem"] for row in continued}) > PROBLEMS
    for row in rows:
        text = tokenizer.decode(row["completion_ids"], skip_special_tokens=True)
        assert row["reward"] == row["rewards"][0] == len(text), "the reward is of the whole text"
    for row in continued:
        cut, roll_in = 1 + row["problem"] % 3, roll_ins[row["problem"]]
        assert row["completion_ids"][:cut] == roll_in["completion_ids"][:cut]
        assert row["completion_mask"] == [0] * cut + [1] * (len(row["completion_ids"]) - cut)
        assert cut < len(row["completion_ids"]) <= 8 and row["prompt_ids"] == roll_in["prompt_ids"]
    assert any(row["completion_ids"] != roll_ins[row["problem"]]["completion_ids"] for row in continued)
