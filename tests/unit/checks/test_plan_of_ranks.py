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
from kit.plans import planned

EXAMPLES = Path(__file__).parents[3] / "examples" / "accelerate"
FILES = {
    "deepspeed": [f"global_step2/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)],
    "fsdp": ["pytorch_model_fsdp_0/.metadata"],
    "plain": ["optimizer.pt"],
}


def ranks(name: str | None) -> AccelerateConfig:
    return AccelerateConfig() if name is None else AccelerateConfig.read(EXAMPLES / f"{name}.yaml")


def trainer(**args: Any) -> Any:
    settings = SimpleNamespace(output_dir="out", world_size=2, fsdp=None, **args)
    return SimpleNamespace(args=settings, is_deepspeed_enabled=False, is_fsdp_enabled=False)


@pytest.mark.parametrize(
    ("written_by", "now", "sentence"),
    [
        ("deepspeed", None, r"with DeepSpeed over 2 ranks, and this one trains without FSDP or DeepSpeed"),
        ("deepspeed", "ddp", r"with DeepSpeed over 2 ranks, and this one trains without FSDP or DeepSpeed"),
        ("deepspeed", "fsdp2", r"with DeepSpeed over 2 ranks, and this one trains with FSDP"),
        ("deepspeed", "zero3", None),
        ("fsdp", None, r"with FSDP, and this one trains without"),
        ("fsdp", "fsdp2", None),
        ("plain", "zero3", r"without FSDP or DeepSpeed, and this one trains with DeepSpeed over 2 ranks"),
        ("plain", "fsdp2", r"without FSDP or DeepSpeed, and this one trains with FSDP"),
        ("plain", "ddp", None),
        ("plain", None, None),
    ],
)
def test_a_resume_of_another_kind_of_sharding_is_refused(
    written_by: str, now: str | None, sentence: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tmp_path / "out" / "checkpoint-2"
    for name in FILES[written_by]:
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).touch()
    (tmp_path / "run").mkdir()
    RunDir(tmp_path / "run").write_state(RunState(run_id="r", state=STOPPED, plan=planned(), started=""))
    found = SimpleNamespace(path=checkpoint, state=SimpleNamespace(passes_done=0))
    monkeypatch.setattr(output_dir, "find_checkpoint", lambda *given: found)
    monkeypatch.setattr(checkpoints, "refuse_another_model", lambda *given: None)
    question = Question(plan=planned(tmp_path / "c.py", resume=True), run_dir=tmp_path / "run")
    if sentence is None:
        assert trainer_facts._checkpoints(trainer(), question, ranks(now))["resumes_from"] == str(checkpoint)
        return
    with pytest.raises(UnsupportedError, match=sentence):
        trainer_facts._checkpoints(trainer(), question, ranks(now))


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
