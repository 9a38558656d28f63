"""A replay by another correction than the run's, of groups that vLLM has sampled."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_grpo.archive.history import ConsumptionRecord, Sampler, ServerProcess, read_record
from async_grpo.errors import UnsupportedError
from async_grpo.roles import replay
from async_grpo.rundir.paths import FINISHED, RunState
from async_grpo.training.corrections.checks import sampled_with
from async_grpo.training.corrections.rule import rule
from kit.plans import planned


def trainer_with(top_k: int = 20) -> Any:
    args = {"temperature": 1.0, "top_p": 1.0, "top_k": top_k, "min_p": None, "repetition_penalty": 1.0}
    return SimpleNamespace(args=SimpleNamespace(**args, generation_kwargs=None, vllm_structured_outputs_regex=None))


def check(to: str, run: str, *, generator: str | None = "vllm", top_k: int = 20, **found: Any) -> None:
    """Check the sampler of a run whose last process did not record how it sampled, and those `before` a resume."""
    plan = planned(generator=generator, correction=run)
    state = RunState(run_id="r", state=FINISHED, started="", plan=plan, generator=found.get("resolved"))
    processes = [ServerProcess(None, 4, sampled) for sampled in (*found.get("before", ()), None)]
    sampled = replay._sampled(processes, trainer_with(top_k), state)
    replay._check_groups_suit(rule(to, None, None, None), sampled)


@pytest.mark.parametrize("run", ["none", "trl"])
@pytest.mark.parametrize(("asked", "found"), [("vllm", None), (None, "vllm"), (None, "vllm server")])  # of an older run
def test_groups_without_kept_tokens_are_not_replayed_by_a_correction_that_needs_them(
    run: str, asked: str | None, found: str | None
) -> None:
    with pytest.raises(UnsupportedError, match=rf"--correction {run} with top_k=20.*decoupled would be biased"):
        check("decoupled", run, generator=asked, resolved=found)


def test_what_has_the_log_probabilities_that_are_needed_is_replayed(warnings: list[str]) -> None:
    check("decoupled", "bypass")  # its groups name the tokens
    check("decoupled", "none", top_k=0)
    check("decoupled", "none", generator="hf")
    check("decoupled", "none", generator=None, resolved="hf")
    check("none", "trl")
    check("decoupled", "none", generator=None, top_k=0)  # whatever sampled them
    assert not warnings


def test_a_run_that_does_not_say_what_sampled_it_is_replayed_with_a_warning(warnings: list[str]) -> None:
    check("decoupled", "none", generator=None)
    assert "the run does not say what sampled its groups" in warnings[0]
    assert "(top_k=20), and --correction decoupled is biased" in warnings[0]


@pytest.mark.parametrize(
    "resumed",
    [
        {"generator": "hf", "run": "none"},
        {"generator": "vllm", "run": "bypass"},  # only later groups name the tokens
        {"generator": "vllm", "run": "none", "top_k": 0},
    ],
)
def test_groups_of_before_a_resume_are_judged_by_how_they_were_sampled(tmp_path: Path, resumed: dict[str, Any]) -> None:
    before = sampled_with(trainer_with(20), "none", "vllm")
    with pytest.raises(UnsupportedError, match=r"none with top_k=20 for a part of it \(a resume changed that\)"):
        check("decoupled", **resumed, before=(_written_and_read(tmp_path, before),))
    check("none", **resumed, before=(before,))


def _written_and_read(folder: Path, sampled: Sampler) -> Sampler | None:
    path = folder / "consumed.jsonl"
    ConsumptionRecord(path, run_id="r", resumed_from=None, max_staleness=4, sampled=sampled).close()
    (process,), broken = read_record(path, "r")
    assert process.sampled == sampled
    assert not broken
    return process.sampled


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, ("tis", "token", 0.0, 3.0)),
        ({"correction_min": 0.5}, ("tis", "token", 0.5, 3.0)),
        ({"correction": "icepop"}, ("icepop", "token", 0.5, 5.0)),
        ({"correction": "tis", "correction_level": "geometric"}, ("tis", "geometric", 0.0, 2.0)),
    ],
    ids=str,
)
def test_options_of_the_runs_correction_are_not_those_of_another_one(asked: dict[str, Any], expected: Any) -> None:
    run = planned(correction="tis", correction_max=3.0).training
    found = replay._rule(replay.ReplayOptions(run_dir=Path("run"), **asked), run)
    assert (found.name, found.level, found.least, found.most) == expected
