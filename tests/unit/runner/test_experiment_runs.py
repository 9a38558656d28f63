"""An experiment of stand-ins: the order of its stages, what is left after kills and faults, and what is refused."""

from __future__ import annotations

import random
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from experiment_yard import STAND_IN, TWO_PLACES, ExperimentYard, tree

from async_grpo.errors import DiskFullError, RunDirError, UsageError
from async_grpo.launch import supervisor as supervisor_module
from async_grpo.rundir.locks import KernelLock
from async_grpo_experiments.runner import run as run_module
from async_grpo_experiments.runner.config import checked
from async_grpo_experiments.runner.graph import Stage, graph_of, kind_of
from async_grpo_experiments.runner.peaks import StageSeconds
from async_grpo_experiments.runner.run import SECONDS
from async_grpo_experiments.slots import schedule as schedule_module
from async_grpo_experiments.slots.ledger import LEDGER, read
from async_grpo_experiments.slots.places import Place

ONE_LINE = tree(algos={"QSharp": {}})
ONE_ROUND = {**ONE_LINE, "rounds_of_training": 1}  # a reference, and three stages
STAGES = 13  # a reference, and two lines of two rounds of three stages
QSHARP_1, QSHARP_2 = "QSharp_tiny_sums_r1", "QSharp_tiny_sums_r2"


@pytest.fixture(autouse=True)
def polls_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "POLL_S", 0.005)


@pytest.fixture
def yard(tmp_path: Path) -> ExperimentYard:
    return ExperimentYard(tmp_path)


def apart(yard: ExperimentYard) -> list[str]:
    """The command that runs it in a process of its own, which a stage may kill."""
    code = f"from experiment_yard import *; sys.exit(ExperimentYard(Path({str(yard.folder)!r})).run({ONE_ROUND!r}))"
    return [sys.executable, "-c", code]


def test_stages_run_in_the_order_of_the_graph_and_each_once(yard: ExperimentYard) -> None:
    assert yard.run() == 0
    done = yard.finished
    assert len(done) == len({*done}) == STAGES
    for before, after in (("r1.generate", "r1.train"), ("r1.train", "r2.generate"), ("r2.generate", "r2.train")):
        assert done.index(f"QSharp_tiny_sums_{before}") < done.index(f"QSharp_tiny_sums_{after}")
    assert {*yard.job_states().values()} == {"EVAL_COMPLETED"}
    before = yard.hashes()
    assert yard.run() == 0
    assert (yard.finished, yard.hashes()) == (done, before)
    config = checked(tree())
    kinds = {kind_of(stage, config) for stage in graph_of(config).values()}
    assert {*StageSeconds(yard.root.parent.parent / SECONDS).by_kind} == kinds


def test_what_needs_a_failed_stage_is_blocked_and_a_retry_runs_it_alone(yard: ExperimentYard) -> None:
    yard.fail(f"{QSHARP_1}.train")
    yard.fail("DPO_tiny_sums_r2.evaluate")
    assert yard.run() == 1
    states = yard.job_states()
    assert states[QSHARP_1] == "FAILED"
    assert states[QSHARP_2] == f"BLOCKED ({QSHARP_1}.train failed)"
    assert (states["DPO_tiny_sums_r1"], states["DPO_tiny_sums_r2"]) == ("EVAL_COMPLETED", "FAILED")
    assert yard.run(only=QSHARP_1) == 0
    assert yard.job_states()[QSHARP_2] == "EVAL_COMPLETED"
    assert yard.job_states()["DPO_tiny_sums_r2"] == "FAILED"
    assert "DPO_tiny_sums_r2.evaluate" not in yard.finished
    assert yard.run() == 0
    assert len(yard.finished) == len({*yard.finished}) == STAGES


@pytest.fixture(scope="module")
def untroubled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What one round leaves if nothing happens."""
    yard = ExperimentYard(tmp_path_factory.mktemp("untroubled"))
    assert yard.run(ONE_ROUND) == 0
    return yard.hashes()


def is_as(yard: ExperimentYard, untroubled: dict[str, dict[str, str]]) -> bool:
    """No stage was done twice. A kill may have hit one beside it behind its rename and before its line."""
    once = len(yard.finished) == len({*yard.finished}) >= len(untroubled) - 1
    return once and yard.hashes() == untroubled and not list(yard.root.glob("jobs/*/*.partial-*"))


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("kill", "train"),
        *(("kill-runner", kind) for kind in ("generate", "train", "evaluate")),
        ("kill-manifest", "train"),
        *(
            pytest.param(how, kind, marks=pytest.mark.slow)
            for how in ("kill", "kill-manifest")
            for kind in ("generate", "evaluate")
        ),
    ],
)
def test_a_kill_at_a_boundary_costs_no_finished_stage_and_changes_nothing(
    yard: ExperimentYard, untroubled: dict[str, dict[str, str]], how: str, kind: str
) -> None:
    yard.fail(f"{QSHARP_1}.{kind}", how)
    assert subprocess.run(apart(yard), cwd=Path(__file__).parent, timeout=120, check=False).returncode != 0
    assert yard.run(ONE_ROUND) == 0
    assert is_as(yard, untroubled)


@pytest.mark.slow
def test_kills_at_random_moments_change_nothing(tmp_path: Path, untroubled: dict[str, dict[str, str]]) -> None:
    """50 kills of the runner or of a stage. Where an experiment is done, the next kill meets a new one."""
    draw, kills, number = random.Random(0), 0, 0
    while kills < 50:
        yard, number = ExperimentYard(tmp_path / str(number)), number + 1
        yard.folder.mkdir()
        while len(yard.hashes()) < len(untroubled):
            runner = subprocess.Popen(apart(yard), cwd=Path(__file__).parent)
            while runner.poll() is None:
                try:
                    runner.wait(draw.uniform(0.3, 1.5))
                except subprocess.TimeoutExpired:
                    kills += kill_one_of(runner, draw)
        assert yard.run(ONE_ROUND) == 0
        assert len(yard.finished) == len({*yard.finished})  # a kill before its line leaves one out
        assert yard.hashes() == untroubled and not list(yard.root.glob("jobs/*/*.partial-*"))


def kill_one_of(runner: subprocess.Popen[bytes], draw: random.Random) -> int:
    """Kill the runner, or a stage of it; returns how many were killed."""
    with suppress(psutil.NoSuchProcess):
        ours = psutil.Process(runner.pid)
        stages = [one for one in ours.children(recursive=True) if str(STAND_IN) in one.cmdline()]
        draw.choice([ours, *stages]).kill()
        return 1
    return 0


def test_a_truncated_file_is_made_again_with_what_was_made_of_it(
    yard: ExperimentYard, capsys: pytest.CaptureFixture[str]
) -> None:
    yard.run(ONE_LINE)
    before, stages = yard.hashes(), ["generate", "train", "evaluate"]
    for truncated, kinds in (("evaluation", stages[2:]), ("model", stages[1:]), ("data", stages)):
        done = len(yard.finished)
        made = yard.root / "jobs" / QSHARP_1 / truncated / "made"
        made.write_text(made.read_text()[:-1])
        assert yard.run(ONE_LINE) == 0
        again = [f"{QSHARP_1}.{kind}" for kind in kinds]
        again += [] if truncated == "evaluation" else [f"{QSHARP_2}.{kind}" for kind in stages]
        assert sorted(yard.finished[done:]) == sorted(again)
        assert yard.hashes() == before
        assert f"{again[0]} is made again: {made} is not what was written" in capsys.readouterr().out


@pytest.mark.slow
def test_a_stage_that_hangs_is_killed_at_its_deadline_and_the_rest_goes_on(yard: ExperimentYard) -> None:
    yard.fail(f"{QSHARP_1}.evaluate", "hang")
    assert yard.run({**ONE_LINE, "scheduling": {"deadline_s": 30.0}}) == 1
    record = read(yard.root / LEDGER)[f"{QSHARP_1}.evaluate"]
    assert (record.state, record.code) == ("failed", -9)
    assert yard.job_states()[QSHARP_2] == "EVAL_COMPLETED"
    assert "it has taken 30 s, its deadline" in (yard.root / "run.log").read_text()


def test_an_import_error_in_a_stage_is_shown_once_and_not_tried_again(
    yard: ExperimentYard, capsys: pytest.CaptureFixture[str]
) -> None:
    starts = yard.folder / "starts"

    def command(root: Path, stage: Stage, token: str) -> list[str]:
        script = f"open({str(starts)!r}, 'a').write('x'); import no_such_package"
        return (
            [sys.executable, "-c", script]
            if stage.kind == "generate"
            else ExperimentYard.command(yard, root, stage, token)
        )

    assert yard.run(ONE_LINE, command=command) == 1
    assert starts.read_text() == "x"
    said = capsys.readouterr()
    assert said.err.count("ModuleNotFoundError: No module named 'no_such_package'") == 2  # why, and its last words
    assert yard.job_states() == {
        "reference_tiny_sums": "EVAL_COMPLETED",
        QSHARP_1: "FAILED",
        QSHARP_2: f"BLOCKED ({QSHARP_1}.generate failed)",
    }


def test_a_full_disk_is_said_and_waited_for_and_no_state_is_lost(
    yard: ExperimentYard, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twice there is no room for an attempt, and for the view of the states at first."""
    monkeypatch.setattr(schedule_module, "ROOM_WAIT_S", 0.05)
    begin, write, full = run_module.states.begin, run_module.write_json, {"begin": 2, "write": 3}

    def no_room(what: str) -> None:
        full[what] -= 1
        if full[what] >= 0:
            raise DiskFullError("The disk is full.")

    monkeypatch.setattr(run_module.states, "begin", lambda *args: no_room("begin") or begin(*args))
    monkeypatch.setattr(run_module, "write_json", lambda *args: no_room("write") or write(*args))
    assert yard.run(ONE_ROUND) == 0
    said = capsys.readouterr().out
    assert said.count("waits for room on the disk") == 2 and said.count("job_states.json is not the newest") == 1
    assert {*yard.job_states().values()} == {"EVAL_COMPLETED"}


def test_more_examples_are_for_what_has_not_finished(yard: ExperimentYard) -> None:
    more = {**ONE_LINE, "data_collection": {"max_examples": 8}}
    yard.fail(f"{QSHARP_1}.generate")
    assert yard.run({**more, "data_collection": {"max_examples": 4}}) == 1
    yard.fail(f"{QSHARP_2}.generate")
    assert yard.run(more) == 1  # the reference that has finished uses none of them
    with pytest.raises(UsageError, match=r"data_collection.max_examples: 8, now 16") as refused:
        yard.run({**more, "data_collection": {"max_examples": 16}})
    assert QSHARP_1 in str(refused.value)
    assert yard.run(more) == 0


def test_a_changed_key_of_a_finished_stage_is_refused_with_the_difference(yard: ExperimentYard) -> None:
    once = {"rounds_of_training": 1}
    yard.fail("DPO_tiny_sums_r1.train")
    yard.run(tree(**once))
    mended = tree(algos={"QSharp": {}, "DPO": {"lr": 3e-5}}, **once)  # no finished stage used it
    with pytest.raises(UsageError, match=r"generation.max_new_tokens: 256, now 8") as refused:
        yard.run(tree(generation={"max_new_tokens": 8}, **once))
    assert QSHARP_1 in str(refused.value)
    assert yard.run(mended) == 0
    with pytest.raises(UsageError, match=r"algos.DPO.lr: 3e-05, now 1e-05"):
        yard.run(tree(**once))


def test_two_runners_on_one_experiment_are_refused(yard: ExperimentYard) -> None:
    yard.root.mkdir(parents=True)
    with KernelLock(yard.root / "experiment.lock") as lock:
        assert lock.try_acquire({"role": "experiment"})
        with pytest.raises(RunDirError, match="in use by another runner"):
            yard.run()


def test_a_stage_that_ends_without_its_folder_has_failed(yard: ExperimentYard) -> None:
    def command(root: Path, stage: object, token: str) -> list[str]:
        return ["true"]

    yard.command = command  # type: ignore[assignment]
    assert yard.run() == 1
    assert read(yard.root / LEDGER)["reference_tiny_sums.evaluate"].why.startswith("it ended without leaving")


def test_idle_places_say_why_once(yard: ExperimentYard, capsys: pytest.CaptureFixture[str]) -> None:
    yard.run(ONE_ROUND, places=[*TWO_PLACES, Place(name="c")])  # at first two stages can run
    said = [line for line in capsys.readouterr().out.splitlines() if " idle: " in line]
    assert len(said) == 1 and " of 3 places are idle" in said[0]
