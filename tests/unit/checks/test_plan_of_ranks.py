"""What a dry run says of a trainer in several processes, which it builds in one: as the real start does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_grpo.archive import output_dir
from async_grpo.checks.plan import trainer_facts
from async_grpo.checks.plan.trainer_facts import Question
from async_grpo.errors import UnsupportedError
from async_grpo.rundir.paths import STOPPED, RunDir, RunState
from async_grpo.setup.accelerate_config import AccelerateConfig
from async_grpo.training import checkpoints
from async_grpo.training.sharding import DEEPSPEED, FSDP, CheckpointLayout
from kit.plans import planned

EXAMPLES = Path(__file__).parents[3] / "examples" / "accelerate"


def ranks(name: str | None) -> AccelerateConfig:
    return AccelerateConfig() if name is None else AccelerateConfig.read(EXAMPLES / f"{name}.yaml")


def trainer(**args: Any) -> Any:
    settings = SimpleNamespace(output_dir="out", world_size=2, fsdp=None, **args)
    return SimpleNamespace(args=settings, is_deepspeed_enabled=False, is_fsdp_enabled=False)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("zero3", CheckpointLayout(DEEPSPEED, 2)),
        ("fsdp2", CheckpointLayout(FSDP)),
        ("ddp", CheckpointLayout("")),
        (None, CheckpointLayout("")),
    ],
)
def test_a_resume_needs_a_checkpoint_of_its_own_kind_of_sharding(
    name: str | None, layout: CheckpointLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which ones are refused: tests/unit/training/test_sharding.py."""
    (tmp_path / "run").mkdir()
    RunDir(tmp_path / "run").write_state(RunState(run_id="r", state=STOPPED, plan=planned(), started=""))
    found = SimpleNamespace(path=tmp_path / "out" / "checkpoint-2", state=SimpleNamespace(passes_done=0))
    checked: list[Any] = []
    monkeypatch.setattr(output_dir, "find_checkpoint", lambda *given: found)
    monkeypatch.setattr(checkpoints, "refuse_another_model", lambda *given: None)
    monkeypatch.setattr(checkpoints, "check_layout", lambda *given: checked.append(given))
    question = Question(plan=planned(tmp_path / "c.py", resume=True), run_dir=tmp_path / "run")
    assert trainer_facts._checkpoints(trainer(), question, ranks(name))["resumes_from"] == str(found.path)
    assert checked == [(found.path, layout)]


@pytest.mark.parametrize(("name", "over"), [("ddp", 1), ("fsdp2", 2), ("zero3", 2)])
def test_over_how_many_processes_the_weights_are_shared(name: str, over: int) -> None:
    assert ranks(name).sharded_over == over


def test_fsdp_of_version_1_is_refused_where_nothing_else_says_2(tmp_path: Path) -> None:
    text = (EXAMPLES / "fsdp2.yaml").read_text()
    (tmp_path / "fsdp1.yaml").write_text(text.replace("fsdp_version: 2", "fsdp_version: 1"))
    first = AccelerateConfig.read(tmp_path / "fsdp1.yaml")
    with pytest.raises(UnsupportedError, match="FSDP of version 1 cannot run distributed"):
        trainer_facts._refuse_first_fsdp(first, trainer())
    trainer_facts._refuse_first_fsdp(ranks("fsdp2"), trainer())
