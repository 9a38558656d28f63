"""`evaluate` and `generate`, and evaluations in a run: killed in the middle, each answer is there once."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import load_from_disk
from trl import SFTConfig, SFTTrainer

from async_grpo.setup.setup_file import load_trainer
from kit.runs import SETUP, Command, audited, command, finish, lines_of, ran, read

STALENESS = ("--max-staleness", "2")  # training waits for each evaluation before the next is due: none is skipped
EVALUATED = ("--eval-every", "4", "--eval-replicates", "2", "--eval-k", "1,2")
RUN = ("--distributed", "--num-workers", "2", *STALENESS, *EVALUATED)


def evaluations(folder: Path) -> list[dict[str, Any]]:
    return lines_of(folder / "evaluations.jsonl")


def kill(run: Command, queue: Path) -> None:
    """End the launcher, and with it everything, in the middle of the first evaluation, after a worker died there."""
    run.kill_one_of_two_at_work(queue, "9")
    run.wait_until(lambda: any(queue.glob("9*_processing_by_dev*")), "the job of the dead worker on a live one")
    run.kill()


def test_a_run_killed_during_an_evaluation_has_each_once_and_its_checkpoint_can_be_evaluated(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    env = {"TEST_EVAL": "10", "TEST_STEPS": "8", "TEST_REWARD": "held", "TEST_MARKER": str(marker)}
    with command("train", str(SETUP), *RUN, cwd=tmp_path, **env) as run:
        kill(run, tmp_path / "worker" / "queue")
    assert evaluations(tmp_path / "worker") == []
    marker.touch()
    said = finish(tmp_path, *RUN, "-n", "1", "--resume", **env)
    found = evaluations(tmp_path / "worker")
    assert [one["step"] for one in found] == [0, 4, 8], said
    for one in found:
        assert one["figures"]["pass@2"]["problems"] == 10
        assert one["failed"] == {}
    assert "OK: all 32 groups accounted for (" in audited(tmp_path / "worker")
    metrics = lines_of(tmp_path / "worker" / "metrics.jsonl")
    logged = {int(one["eval_version"]): one["eval_reward_mean"] for one in metrics if "eval_version" in one}
    assert logged == {one["step"]: one["figures"]["reward_mean"]["value"] for one in found}

    checkpoint = ("checkpoints/checkpoint-8", "--against", "checkpoints/checkpoint-4")
    asked = ("evaluate", *checkpoint, "--config", str(SETUP), "-n", "1", "--eval-replicates", "2", "--json", "out.json")
    assert "checkpoint-8 less checkpoints/checkpoint-4, paired: 10 problems" in ran(*asked, cwd=tmp_path, **env)
    result = read(tmp_path / "out.json")
    reward = {name: one["figures"]["reward_mean"]["value"] for name, one in result["models"].items()}
    difference = reward["checkpoints/checkpoint-8"] - reward["checkpoints/checkpoint-4"]
    assert result["difference"]["reward_mean"]["value"] == pytest.approx(difference)


GUIDED = SETUP.with_name("guided_model.py")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a model, and a head on it whose scores are random."""
    from async_grpo_experiments.guidance import HeadRecord, ValueHead

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(SETUP.parent))
    import random_model

    trainer: Any = random_model.get_trainer()
    trainer.model.save_pretrained(tmp_path / "model")
    tokenizer = trainer.processing_class
    record = HeadRecord.of(trainer.model, tokenizer, kind="value", loss="bce", temperature=1.0)
    head = ValueHead.beginning_from(trainer.model, record, tokenizer)
    torch.nn.init.normal_(head.scores.weight)
    head.save(tmp_path / "head")
    sys.modules.pop("random_model")
    return tmp_path


def test_each_strength_is_evaluated_once_and_the_weaker_stays_closer(folder: Path) -> None:
    asked = ("evaluate", "model", "--config", str(GUIDED), "-n", "2", "--eval-replicates", "4", "--json", "out.json")
    env = {"TEST_EVAL": "12", "TEST_REWARD": "held", "TEST_MARKER": str(folder / "marker")}
    with command(*asked, "--eval-eta", "0.1,0.5,off", cwd=folder, **env) as run:
        run.kill_one_of_two_at_work(folder / "evaluation" / "queue", "9")
        (folder / "marker").touch()
        assert run.wait() == 0, run.output
    lines = lines_of(folder / "evaluation" / "evaluations.jsonl")
    untruncated = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    assert [one["sampling"] for one in lines] == [{**untruncated, "eta": eta} for eta in (0.1, 0.5, "off")]
    assert [(one["step"], one["failed"], one["figures"]["pass@1"]["problems"]) for one in lines] == [(0, {}, 12)] * 3
    strong, weak, off = (one["figures"] for one in lines)
    assert strong["avg_kl"]["low"] > weak["avg_kl"]["high"] > weak["avg_kl_per_token"]["value"] > 0
    assert "avg_kl" not in off
    assert "sampled with temperature 1.0, top_p 1.0, top_k 0, eta 0.1" in run.output
    named = json.loads((folder / "out.json").read_text())["models"]
    assert named.keys() == {f"model, eta {eta}" for eta in (0.1, 0.5, "off")}


# --- `async-grpo generate`: --------------------------------------------------------------------------------------

PROBLEMS = 64
ASKED = ("generate", "model", "--config", str(SETUP.parent / "two_waves.py"), "--deterministic")


@pytest.fixture(scope="module")
def trainer() -> Any:
    return load_trainer(SETUP)


@pytest.fixture
def model_at(trainer: Any, tmp_path: Path) -> Path:
    trainer.model.save_pretrained(tmp_path / "model")
    return tmp_path


def complete(run: Path) -> list[str]:
    return [path.name for room in ("queue", "done") for path in (run / room).rglob("*_complete_*")]


def hashes(rows: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(rows.iterdir())}


def interrupt(model_at: Path, env: dict[str, str]) -> int:
    """Begin with two workers. One is killed with a job in the first wave, the launcher in the second one."""
    run_dir, held = model_at / "generation", {**env, "TEST_REWARD": "held", "TEST_REWARD_S": "0.05"}
    with command(*ASKED, "-n", "2", "--out", "rows", cwd=model_at, **held) as run:
        run.kill_one_of_two_at_work(run_dir / "queue")
        run.wait_until(lambda: "a01" in " ".join(path.name for path in (run_dir / "queue").iterdir()), "a second try")
        Path(env["TEST_MARKER"]).touch()
        run.wait_until(lambda: len(complete(run_dir)) > PROBLEMS + 4, "the second wave")
        run.kill()
    return len(complete(run_dir))


def test_rows_are_the_same_for_one_worker_and_for_two_that_are_killed(trainer: Any, model_at: Path) -> None:
    env = {"TEST_MARKER": str(model_at / "marker")}
    done = interrupt(model_at, env)
    assert not (model_at / "rows").exists()
    ran(*ASKED, "-n", "1", "--resume", cwd=model_at, **env)
    requests = len(complete(model_at / "generation"))
    assert PROBLEMS < done <= requests, "what was finished is used again"

    ran(*ASKED, "-n", "1", "--out", "alone", "--run-dir", "other", cwd=model_at, **env)
    assert len(complete(model_at / "other")) == requests, "and nothing was asked twice"
    assert hashes(model_at / "rows") == hashes(model_at / "alone")

    rows = load_from_disk(str(model_at / "rows"))
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
