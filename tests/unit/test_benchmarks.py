"""What a benchmark prints as a figure, and what it does not."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks import gpu_targets, one_gpu, table, to_docs

from kit.waiting import is_gone, until

STEADY, SHAKEN = [1.0, 1.02, 1.09], [1.0, 1.02, 1.13]


def test_a_row_whose_control_of_equal_work_moved_is_no_figure() -> None:
    quiet = table.row("speed-up", [1.2, 1.3, 1.25], "x", target=">= 1.15", limit=1.44, controls=STEADY)
    assert quiet.ok is True and table.cells(quiet)[1] == "1.25 x"
    loud = table.row("speed-up", [1.2, 7.57, 1.25], "x", target=">= 1.15", limit=1.44, controls=SHAKEN)
    assert loud.ok is None
    assert table.cells(loud)[1] == "not measurable here" and "7.57" not in table.as_text([loud])
    assert loud.unmeasurable == "its control of equal work moved by 13%"
    assert "not measurable here" in table.as_markdown([loud])


@pytest.mark.parametrize(
    ("values", "target", "limit", "possible"),
    [
        ([1.5, 1.6, 1.5], ">= 1.15", 1.44, False),
        ([1.3, 1.6, 1.4], ">= 1.15", 1.44, True),  # the median counts
        ([0.3, 0.3, 0.3], "<= 0.6", 0.4, False),
        ([0.5, 0.5, 0.5], "<= 0.6", 0.4, True),
        ([1.5, 1.6, 1.5], "", 1.44, True),  # which direction is better is not known
    ],
)
def test_a_row_that_beats_its_own_limit_is_no_figure(
    values: list[float], target: str, limit: float, possible: bool
) -> None:
    one = table.row("speed-up", values, "x", target=target, limit=limit, controls=STEADY)
    assert (one.unmeasurable == "") is possible


def test_the_page_of_figures_has_no_figure_of_such_a_row() -> None:
    row = {"name": "speed-up", "value": 7.57, "unit": "x", "spread": [1.0, 7.57, 8.0], "target": ">= 1.15"}
    assert "7.57" in to_docs.line(row)
    line = to_docs.line({**row, "unmeasurable": "its control of equal work moved by 13%"})
    assert "7.57" not in line and "not measurable here" in line


def test_each_round_of_a_contest_has_a_control_between_all_its_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from benchmarks import contests

    done: list[str] = []
    run = type("Run", (), {"step_s": 1.0, "step_cpu_s": 1.0})
    monkeypatch.setattr(contests, "run_side", lambda side, *_: done.append(side.name) or run)
    monkeypatch.setattr(contests, "control_s", lambda: done.append("control") or 1.0)
    for contest in contests.contests(quick=False).values():
        assert contest.rounds >= 5
    contest = contests.contests(quick=True)["even"]
    for repeat in range(contest.rounds):
        contest.round(tmp_path, repeat, contests.Progress(runs=10))
    sides = [side.name for side in contest.sides]
    assert done == ["control", sides[0], "control", sides[1], "control"] * 5
    assert len(contest.controls) == 15


def test_where_rewards_wait_the_control_is_a_step_of_trl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from benchmarks import contests

    step_s = itertools.count(1)
    monkeypatch.setattr(contests, "run_side", lambda *_: SimpleNamespace(step_s=float(next(step_s)), step_cpu_s=0.1))
    monkeypatch.setattr(contests, "control_s", lambda: 1.0)
    contest = contests.contests(quick=True)["slow"]
    for repeat in range(2):
        contest.round(tmp_path, repeat, contests.Progress(runs=10))
    assert contest.controls == contest.trl_step_s() == [1.0, 1.0 + len(contest.sides)]


def test_each_search_of_a_chain_needs_the_result_of_the_one_before() -> None:
    from benchmarks.setups import chain

    first, rivers = chain.asked_chains()[0], chain.Rivers()
    rivers.reset(first)
    search = rivers.search
    asked = chain.question(first)
    for name, after in pairwise(first):
        assert name in asked and after not in asked, "what is asked next is in the last result alone"
        asked = search(name)
    assert first[-1] in asked and search(first[-1]) == chain.NOTHING


@pytest.mark.parametrize(
    ("searched", "earned"),
    [
        ([0, 1, 2], [0.25, 0.25, 0.25, 0.0]),
        ([0, 0, 1], [0.25, 0.0, 0.25, 0.0]),  # a passage that was found before earns nothing
        ([3], [0.0, 0.0]),
        ([], [0.0]),
    ],
)
def test_the_turns_that_a_chain_rewards(searched: list[int], earned: list[float]) -> None:
    from benchmarks.setups import chain

    first, rivers, completion = chain.asked_chains()[0], chain.Rivers(), []
    rivers.reset(first)
    for at in searched:
        completion += [{"role": "assistant"}, {"role": "tool", "content": rivers.search(first[at])}]
    completion += [{"role": "assistant", "content": f"<answer>{first[-1]}</answer>"}]
    assert chain.links([completion]) == [earned]
    assert chain.called([completion]) == [sum(earned) / 0.75]


def test_the_limits_of_an_h100_for_qwen3_06b() -> None:
    """Worked out by hand before, for prompts of 128 tokens and completions of 256."""
    shape = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 151_936}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    model = one_gpu.Model.of(SimpleNamespace(**shape, **heads), value_bytes=2)
    h100 = one_gpu.Card(bytes_s=3.35e12, flops_s=989e12)
    seconds = [least(model, h100) for least in one_gpu.limits(one_gpu.SETTINGS["0.6B"]).values()]
    assert seconds == pytest.approx([1.30, 0.23, 0.74, 0.68], abs=0.005)
    assert one_gpu.training_s(model, h100, [128] * 64, [256] * 64) == pytest.approx(0.084, abs=0.0005)


def test_a_row_of_one_gpu_that_fails_says_so_and_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = "import json, os, time; open(os.environ['STEP_LOG'], 'w').writelines(json.dumps(x) + '\\n' for x in {})"
    fixed = {"steps": 1, "prompt": 2, "least_s": lambda model, card: 40.0}
    (looked := tmp_path / "looks").touch()
    looks = f"open({str(looked)!r}).read()"  # a letter for each time that somebody asked how busy the GPU is

    def case(name: str, code: str, rollouts: int = 4, **more: Any) -> Any:
        return one_gpu.Case(name=name, command=[sys.executable, "-c", code], rollouts=rollouts, **fixed, **more)

    def steps(step_s: float) -> str:
        lines = [{"time": time.time() + step_s * at, "step": at, "tokens": 40 * at} for at in range(-2, 3)]
        return f"{log.format(lines)}\nfirst = len({looks})\nwhile len({looks}) < first + 2: time.sleep(0.01)"

    monkeypatch.setattr(one_gpu, "card_itself", lambda *_: case("card", log.format([CARD]), 0))
    ours = case("ours", steps(100), target=">= 0.5", target_trl=">= 3")
    left_out = case("left out", "", mps=True)
    monkeypatch.setattr(one_gpu, "control", lambda *_: "why")
    rows = [case("failing", "raise SystemExit('why')"), left_out, case(one_gpu.TRL, steps(400)), ours]
    monkeypatch.setattr(one_gpu, "cases", lambda *_: rows)
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf x >> {looked}\necho 83\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(one_gpu, "SAMPLE_S", 0.05)
    assert one_gpu.main(["--json", str(tmp_path / "found.json")]) == 1
    assert capsys.readouterr().out.splitlines()[-4:] == [
        "| failing | - | - | - | - | - | failed: exit code 1: why |",
        "| left out | - | - | - | - | - | left out: the MPS daemon did not start: why |",
        "| TRL with generate | 0.01 | 0.08 | 0.1 | - | 0.83 |  |",
        "| ours | 0.04 | 0.32 | 0.4 (>= 0.5: no) | 4 (>= 3: yes) | 0.83 |  |",
    ]
    assert {one["unit"] for one in json.loads((tmp_path / "found.json").read_text())["rows"]} > {*one_gpu.COLUMNS}


@pytest.mark.integration
def test_a_row_of_one_gpu_that_hangs_is_ended_with_all_that_it_started() -> None:
    code = "import subprocess, time; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)"
    hang = [sys.executable, "-c", f"{code}; time.sleep(600)"]
    ran = one_gpu.run(one_gpu.Case(name="", command=hang, steps=5), "cpu", 1)
    assert ran.failure.startswith("0 of 5 steps in its 1 s: ")
    process = subprocess.Popen(hang, stdout=subprocess.PIPE, start_new_session=True)
    child = int(process.stdout.readline())
    one_gpu.end(process)
    until(lambda: is_gone(child), "the end of what it started")


MODEL = dict.fromkeys(("layers", "head", "cache_bytes", "attention", "value_bytes"), 1)
CARD = {"card": {"bytes_s": 1e9, "flops_s": 1e9}, "model": MODEL, "name": "a card"}


def made_by_one_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch, share: Callable[[str], float]) -> None:
    """Let the script write its JSON, with all rows that it has for a GPU; each reaches so much of its limit."""

    def run(case: Any, *_: Any) -> Any:
        step_s = 40.0 / share(case.name)
        lines = [{"time": step_s * at, "step": at, "tokens": 9999 * at} for at in range(5)]
        return one_gpu.Ran(lines=lines if case.rollouts else [CARD])

    rows = one_gpu.cases(one_gpu.SETTINGS["0.6B"], "0")
    rows = [replace(row, left_out="", least_s=lambda model, card: 40.0) for row in rows]
    monkeypatch.setattr(one_gpu, "run", run)
    monkeypatch.setattr(one_gpu, "cases", lambda *_: rows)
    assert one_gpu.main(["--json", str(folder / "gpu_one_gpu.json")]) == 0


def test_the_targets_of_one_gpu_are_read_from_what_the_script_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shares = {"worker alone, 512 rows, unequal prompts": 0.49, "worker alone, 64 rows, equal prompts": 0.36}
    shares |= {"without CUDA graphs: worker alone, 64 rows, equal prompts": 0.1, "TRL with generate": 0.125}
    shares |= {"server and 1 worker": 0.34, "server and 2 workers": 0.2, "MPS: server and 1 worker": 0.1}
    asked = set(shares)
    made_by_one_gpu(tmp_path, monkeypatch, lambda name: asked.discard(name) or shares.get(name, 0.6))
    assert not asked, "rows that the script does not have"
    gpu_targets.main(tmp_path)
    said = capsys.readouterr().out
    assert "| a worker alone, 512 completions | >= 0.5 of the limit | 0.49 | **no** |" in said
    assert "| a worker alone, 64 completions | >= 0.35 of the limit | 0.36 | yes |" in said
    assert "| a step of a server and 1 worker, in turns | >= 0.35 of the limit | 0.34 | **no** |" in said
    assert "| server and 1 worker against TRL with `generate` | >= 3 x TRL | 2.72 | **no** |" in said


@pytest.mark.integration
def test_the_share_of_a_gpu_is_in_the_environment_of_the_worker_alone() -> None:
    case = one_gpu.sharing(one_gpu.SETTINGS["tiny"], "cpu", 50)
    worker, server = case.command[-1].split(" & exec ")
    assert worker.startswith("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50 ") and " worker --device cpu " in worker
    assert " server --config " in server and "CUDA_MPS" not in server and not any("MPS" in name for name in case.env)
    ran = one_gpu.run(replace(case, steps=2), "cpu", 300)
    assert not ran.failure and [line["step"] for line in ran.lines[:2]] == [1, 2]


def test_steps_behind_are_between_the_first_steps_at_a_share_of_the_gain() -> None:
    from benchmarks.steps_behind import LAST, MEASURED_AT, first_step, steps_behind

    plain = [0.1 + 0.8 * min(1.0, step / 20) for step in MEASURED_AT]
    stale = [0.1 + 0.8 * min(1.0, max(0, step - 3) / 20) for step in MEASURED_AT]
    assert MEASURED_AT[-LAST] >= 20, "plain TRL has reached what it reaches"
    assert first_step(plain, 0.1) == 0 and first_step(plain, 0.5) == pytest.approx(10.0)
    assert steps_behind(stale, plain, 0.5) == pytest.approx(3.0)
    assert steps_behind([0.1] * len(MEASURED_AT), plain, 0.5) == float("inf")
