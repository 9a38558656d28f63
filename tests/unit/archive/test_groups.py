"""What is told of a run's finished groups, of live, half-written, damaged and foreign directories."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.archive.advantages import AdvantageRule
from async_grpo.archive.groups import FinishedGroups, GroupFate, RunResumed, UsedStep
from async_grpo.archive.history import (
    ConsumptionRecord,
    Dropped,
    Used,
    UsedBatch,
    final_history,
    parse_entry,
    read_record,
)
from async_grpo.archive.rollout_state import FILE_NAME, RolloutState, pack_consumed, read, write
from async_grpo.errors import BadFileError, RunDirError
from async_grpo.reports.rollouts import BEST, WORST, select
from kit.archived_run import ArchivedRun, three_steps


@pytest.fixture
def run(tmp_path: Path) -> ArchivedRun:
    return three_steps(tmp_path)


def test_news_come_once_and_in_the_order_of_training(run: ArchivedRun) -> None:
    groups = FinishedGroups(run.root)
    news = [it for it in groups.news() if isinstance(it, UsedStep)]
    found = [(it.step, it.version_used, [g.group.job.seq for g in it.groups]) for it in news]
    assert found == [(1, 0, [0, 1]), (2, 1, [2, 3]), (3, 2, [4, 5])]
    assert [g.staleness for it in news for g in it.groups] == [0, 0, 1, 1, 1, 1]
    assert list(groups.news()) == []
    run.line(dropped=9, reason="over age")
    run.use(4, [6])
    dropped, step = groups.news()
    assert dropped == Dropped(9, "over age")
    assert isinstance(step, UsedStep) and step.step == 4


def test_a_resumed_run_says_from_which_step_on(run: ArchivedRun) -> None:
    groups = FinishedGroups(run.root)
    list(groups.news())
    run.begin(2)
    run.use(3, [4, 7])
    resumed, step = groups.news()
    assert resumed == RunResumed(2)
    assert isinstance(step, UsedStep) and [g.group.job.seq for g in step.groups] == [4, 7]
    fates = FinishedGroups(run.root).fates()
    assert fates[7].step == 3 and 5 not in fates  # group 5 was used by a step that has not happened


def test_half_a_line_is_read_when_it_is_whole(run: ArchivedRun) -> None:
    line = json.dumps({"step": 4, "version_used": 3, "seqs": [6], "policy_versions": [3]})
    with run.run.consumption.open("a") as file:
        file.write(line[:20])
    groups = FinishedGroups(run.root)
    assert len(list(groups.news())) == 3
    with run.run.consumption.open("a") as file:
        file.write(line[20:] + "\n")
    (step,) = groups.news()
    assert isinstance(step, UsedStep) and step.missing == 1  # its file was not moved to done/ by this test


def test_damaged_files_and_lines_are_left_out_and_named(run: ArchivedRun) -> None:
    damaged = run.group(2)
    damaged.write_bytes(damaged.read_bytes()[:-3])
    run.group(3).unlink()
    (run.root / "done" / "0000000" / "0000000004.a00_complete_from_dev1.safetensors.part").write_bytes(b"x")
    with run.run.consumption.open("a") as file:
        file.write("{nonsense}\n")
    groups = FinishedGroups(run.root)
    steps = [it for it in groups.news() if isinstance(it, UsedStep)]
    assert [(len(it.groups), it.missing) for it in steps] == [(2, 0), (0, 2), (2, 0)]
    assert len(groups.skipped) == 2
    assert any("0000000002.a00" in text and "truncated" in text for text in groups.skipped.values())
    assert any("consumed.jsonl is broken" in text for text in groups.skipped.values())


def test_every_group_with_its_fate_the_newest_first(run: ArchivedRun) -> None:
    run.group(7, 3)
    run.line(dropped=7, reason="equal rewards")
    groups = FinishedGroups(run.root)
    found = list(groups.all(groups.fates()))
    assert [it.group.job.seq for it in found] == [6, 7, 5, 4, 3, 2, 1, 0]  # queue/ first, then done/
    assert [it.fate.state for it in found[:3]] == ["waiting", "dropped", "used"]
    assert found[1].fate == GroupFate("dropped", reason="equal rewards")


@pytest.mark.parametrize(
    ("contents", "says"),
    [(None, "is not a run directory"), ("{", "not valid JSON"), ('{"format": 99}', "another version")],
)
def test_a_directory_that_cannot_be_read_is_a_sentence(tmp_path: Path, contents: str | None, says: str) -> None:
    if contents is not None:
        (tmp_path / "run.json").write_text(contents)
    with pytest.raises(RunDirError, match=says):
        FinishedGroups(tmp_path)
    with pytest.raises(RunDirError, match="does not exist, so no run has begun there"):
        FinishedGroups(tmp_path / "nowhere")


def test_no_permission_is_a_sentence(run: ArchivedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(RunDirError, match=r"run\.json may not be read by this user"):
        FinishedGroups(run.root)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_somebody_elses_run_is_a_sentence() -> None:
    code = (
        "import os, sys; from async_grpo.cli import main; import async_grpo.reports.board\n"
        "from async_grpo.cli.inspect import board, rollouts; import async_grpo.deltas.chain\n"
        "import async_grpo.reports.rollouts; os.setuid(65534); sys.exit(main(sys.argv[1:]))"
    )
    with tempfile.TemporaryDirectory() as folder:  # not below pytest's, which others may not enter
        Path(folder).chmod(0o755)
        run = three_steps(Path(folder))
        for command in ("board", "rollouts"):
            arguments = [sys.executable, "-c", code, command, str(run.root)]
            done = subprocess.run(arguments, capture_output=True, text=True, env=os.environ, check=False)
            assert done.returncode == 2 and "the run is someone else's" in done.stderr, done.stderr


def test_another_run_in_the_same_folder_is_noticed(run: ArchivedRun) -> None:
    groups = FinishedGroups(run.root)
    list(groups.news())
    run.line(run_id="another", resumed_from=None, max_staleness=4)
    with pytest.raises(RunDirError, match="another run now"):
        list(groups.news())


def test_advantages_follow_the_recorded_rule(run: ArchivedRun) -> None:
    run.run.hyperparameters.write_text(json.dumps({"reward_weights": [2.0, 4.0], "scale_rewards": "none"}))
    selection = select(FinishedGroups(run.root), limit=None, job=4)
    assert [it.total for it in selection.rollouts] == [4.0, 2.0]
    assert [it.advantage for it in selection.rollouts] == [1.0, -1.0]


def test_batch_scaled_advantages_need_the_whole_batch(run: ArchivedRun) -> None:
    run.run.hyperparameters.write_text(json.dumps({"scale_rewards": "batch"}))
    run.group(3).unlink()
    selection = select(FinishedGroups(run.root), limit=None)
    known = {it.found.group.job.seq: it.advantage is not None for it in selection.rollouts}
    assert known == {6: False, 5: True, 4: True, 2: False, 1: True, 0: True}


def test_what_has_no_reward_has_no_advantage() -> None:
    rule = AdvantageRule()
    rewards = np.array([[1.0, np.nan], [np.nan, np.nan], [3.0, 0.0]], np.float32)
    assert np.isnan(rule.totals(rewards)).tolist() == [False, True, False]
    (advantages,) = rule.advantages([rewards])
    assert advantages[1] == 0.0 and advantages[0] == -advantages[2] < 0


def test_the_worst_and_the_best(tmp_path: Path) -> None:
    run = ArchivedRun(tmp_path)
    for step in range(1, 5):
        run.use(step, [step], rewards=((step, 0.0), (np.nan, np.nan)))
    groups = FinishedGroups(run.root)
    worst = select(groups, order=WORST, limit=2)
    assert [it.total for it in worst.rollouts] == [1.0, 2.0]
    assert worst.completions == 8
    assert [it.total for it in select(groups, order=BEST, limit=1).rollouts] == [4.0]
    assert [it.total for it in select(groups, order=BEST, limit=9, step=2).rollouts] == [2.0]
    newest = select(groups, limit=3)
    assert newest.more and [it.found.group.job.seq for it in newest.rollouts] == [4, 4, 3]


# --- The record of what each step used: --------------------------------------------------------------------------


def _batch(*seqs: int, version: int) -> UsedBatch:
    return UsedBatch(version_used=version, seqs=list(seqs), policy_versions=[version] * len(seqs))


def _record(path: Path, resumed_from: int | None) -> ConsumptionRecord:
    return ConsumptionRecord(path, run_id="r", resumed_from=resumed_from, max_staleness=4)


def _history(path: Path) -> list[tuple[int, Used]]:
    processes, broken = read_record(path, "r")
    assert not broken
    return final_history(processes)


def test_a_resume_replaces_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "consumed.jsonl"
    first = _record(path, None)
    first.used(1, [_batch(0, 1, version=0)])
    first.used(2, [_batch(2, 3, version=1)])
    first.close()
    second = _record(path, 1)
    second.used(2, [_batch(3, 2, version=1)])
    second.dropped(4, "over age")
    second.close()
    assert _history(path) == [(0, Used(1, _batch(0, 1, version=0))), (1, Used(2, _batch(3, 2, version=1)))]


def test_half_a_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "consumed.jsonl"
    first = _record(path, None)
    first.used(1, [_batch(0, 1, version=0)])
    first.sync()
    first.used(2, [_batch(2, 3, version=1)])
    first.close()
    path.write_bytes(path.read_bytes()[:-20])
    _record(path, 1).close()
    assert _history(path) == [(0, Used(1, _batch(0, 1, version=0)))]
    assert path.read_text().count("\n") == 3


def test_each_broken_line_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "consumed.jsonl"
    path.write_text('{"dropped": 1}\n')
    record = _record(path, None)
    record.used(1, [_batch(0, 1, version=0)])
    record.close()
    _record(path, None).close()
    path.write_text(path.read_text().replace('"r"', '"other"', 1) + "{nonsense}\n" + '{"step"')
    (process,), broken = read_record(path, "r")
    assert process.used == []
    named = [line.partition(" is broken: ")[0] for line in broken]
    assert named == [f"Line {number} of consumed.jsonl" for number in (1, 2, 3, 5, 6)]
    assert read_record(tmp_path / "none", "r") == ([], [])


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 1, "version_used": 1, "seqs": 3, "policy_versions": 3}',
        '{"step": 1, "version_used": 1, "seqs": ["a"], "policy_versions": [1]}',
        '{"step": [], "version_used": 1, "seqs": [1], "policy_versions": [1]}',
        '{"dropped": Infinity}',
        "[" * 100_000,
    ],
)
def test_a_line_with_values_of_another_type_is_broken(line: str) -> None:
    with pytest.raises(BadFileError):
        parse_entry(line)


# --- Which groups a checkpoint was trained on --------------------------------------------------------------------


def state(step: int = 3, run_id: str = "mine", **changes: object) -> RolloutState:
    fields = {"next_seq": 9, "rounds": 3, "unusable": [2], "consumed_below": 4, "consumed": [6], **changes}
    return RolloutState(run_id=run_id, step=step, **fields)  # type: ignore[arg-type]


def test_a_round_of_any_size_is_read_back(tmp_path: Path) -> None:
    """512 prompts a batch: more than the queue has open at once."""
    write(tmp_path, state(next_seq=600, rounds=1, unusable=[], consumed_below=512, consumed=[]))
    assert read(tmp_path / FILE_NAME) == state(next_seq=600, rounds=1, unusable=[], consumed_below=512, consumed=[])
    write(tmp_path, state(next_seq=600, rounds=0, unusable=[], consumed_below=512, consumed=[]))
    with pytest.raises(BadFileError, match="0 rounds cannot have consumed 512 groups"):
        read(tmp_path / FILE_NAME)


def test_packing_keeps_the_set_small() -> None:
    assert pack_consumed(0, {0, 1, 2, 5}) == (3, {5})
    assert pack_consumed(2, {3, 5}, unusable=[0, 2]) == (4, {5})
    assert pack_consumed(0, set()) == (0, set())
    assert pack_consumed(0, {4}) == (0, {4})
    assert pack_consumed(0, {0}, unusable=[1, 3]) == (2, set())


@given(st.sets(st.integers(0, 60)), st.sets(st.integers(0, 60)), st.integers(0, 60))
def test_packing_loses_nothing(consumed: set[int], others: set[int], earlier: int) -> None:
    """Neither at once nor in two parts."""
    unusable = others - consumed
    packed = pack_consumed(0, {seq for seq in consumed if seq < earlier}, unusable)
    below, above = pack_consumed(packed[0], packed[1] | consumed, unusable)
    saved = state(consumed_below=below, consumed=sorted(above), unusable=sorted(unusable))
    assert set(saved.consumed_seqs()) == consumed and saved.consumed_groups == len(consumed)
    assert {seq for seq in range(70) if saved.has_consumed(seq)} == consumed
    assert {seq for seq in range(70) if seq in saved} == consumed | unusable


# --- Which groups teach nothing: ---------------------------------------------------------------------------------

NAN = float("nan")


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize(
    ("rewards", "weights", "nothing"),
    [
        ([[1.0, 0.5], [1.0, 0.5]], None, True),
        ([[1.0, 0.5], [0.0, 0.5]], None, False),
        ([[1.0, 0.5], [0.0, 0.5]], (0.0, 1.0), True),  # the first does not count
        ([[1.0, NAN], [1.0, NAN]], None, True),
        ([[NAN, NAN], [1.0, 0.0]], None, True),  # one completion has a reward: nothing to compare it with
        ([[1.0], [NAN], [0.0]], None, False),
    ],
)
def test_groups_that_teach_nothing(
    aggregation: str, rewards: list[list[float]], weights: tuple[float, ...] | None, nothing: bool
) -> None:
    rule = AdvantageRule(multi_objective_aggregation=aggregation, reward_weights=weights)
    group = np.array(rewards, np.float32)
    assert rule.teaches_nothing(group) == nothing
    assert (np.abs(rule.advantages([group])[0]).max() < 1e-3) == nothing, "the advantages say the same"


def test_functions_that_disagree_teach_something_where_each_is_normalised() -> None:
    group = np.array([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]], np.float32)  # all sums are 1
    assert AdvantageRule().teaches_nothing(group)
    each = AdvantageRule(multi_objective_aggregation="normalize_then_sum", reward_weights=(1.0, 1.0))
    assert not each.teaches_nothing(group)
    weighted = AdvantageRule(multi_objective_aggregation="normalize_then_sum", reward_weights=(3.0, 1.0))
    assert np.abs(weighted.advantages([group])[0]).min() > 0.1, "TRL's advantages of such a group"


@pytest.mark.parametrize("wrong", [np.inf, -np.inf])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_an_infinite_reward_takes_the_advantages_of_its_group_or_function(wrong: float) -> None:
    group = np.array([[wrong, 1.0], [2.0, 3.0], [0.0, 1.0]], np.float32)
    each = AdvantageRule(multi_objective_aggregation="normalize_then_sum")
    assert AdvantageRule().teaches_nothing(group)
    assert not AdvantageRule().advantages([group])[0].any()
    assert not each.teaches_nothing(group), "the second function compares them"
    assert each.advantages([group])[0].all()
