"""The audit finds every damage in hand-made run directories, and nothing in sound ones."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_grpo.archive.audit import Audit, Group, audit
from async_grpo.archive.checkpoint_folders import save
from async_grpo.archive.rollout_state import FILE_NAME, RolloutState, pack_consumed
from async_grpo.cli import main
from async_grpo.errors import BadFileError, RunDirError
from async_grpo.queue.codec import encode_group, encode_job
from async_grpo.queue.filesystem import OsFiles
from async_grpo.rundir.paths import RunDir, RunState
from kit.archived_run import RUN, ArchivedRun, save_checkpoint
from kit.groups import make_group, make_job
from kit.plans import planned

MANY = 600  # more than a server has open at a time


class FakeRun(ArchivedRun):
    """Batches of two groups, three steps."""

    def __init__(self, root: Path) -> None:
        self.output_dir = root / "outputs"
        super().__init__(root, step=3, output_dir=str(self.output_dir))

    def use(self, step: int, seqs: list[int], version: int | None = None, files: bool = True) -> None:
        """One optimizer step with rollouts of `version`, by default fresh ones."""
        version = step - 1 if version is None else version
        self.line(step=step, version_used=step - 1, seqs=seqs, policy_versions=[version] * len(seqs))
        for seq in seqs if files else []:
            self.group(seq, version)

    def group(self, seq: int, version: int = 0, *, folder: str = "done", attempt: int = 0, worker: int = 1) -> Path:
        group = make_group(make_job(seq, run_id=RUN), version, attempt=attempt, worker=f"dev{worker}")
        shard = self.root / folder / f"{seq // 1000:07d}" if folder == "done" else self.root / folder
        return _write(shard / f"{seq:010d}.a{attempt:02d}_complete_from_dev{worker}.safetensors", encode_group(group))

    def job(self, seq: int, state: str = "pending", attempt: int = 0, folder: str = "queue") -> Path:
        path = self.root / folder / f"{seq:010d}.a{attempt:02d}_{state}.safetensors"
        return _write(path, encode_job(make_job(seq, run_id=RUN)))

    def set_aside(self, seq: int, state: str = "failed") -> Path:
        path = self.job(seq, state, attempt=2, folder="quarantine")
        path.with_suffix(".reason").write_text("ValueError: no\n")
        return path

    def checkpoint(self, step: int, consumed: list[int], unusable: tuple[int, ...] = ()) -> Path:
        folder = self.output_dir / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        below, above = pack_consumed(0, set(consumed), unusable)
        used = {"unusable": list(unusable), "consumed_below": below, "consumed": sorted(above)}
        save(folder, RolloutState(run_id=RUN, step=step, next_seq=MANY, rounds=step, **used))
        return folder / "rollout_state.json"

    def audit(self) -> Audit:
        return audit(self.root, sleep=lambda seconds: None)


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    """Three steps of two groups; two jobs are open; a checkpoint after step 2."""
    fake = FakeRun(tmp_path)
    for step in (1, 2, 3):
        fake.use(step, [2 * step - 2, 2 * step - 1])
    fake.group(6, 3, folder="queue")
    fake.job(7)
    fake.checkpoint(2, [0, 1, 2, 3])
    return fake


def test_a_sound_run_is_clean_and_its_totals_are_right(run: FakeRun) -> None:
    report = run.audit()
    assert report.anomalies == []
    assert [group.state for group in report.groups] == ["used"] * 6 + ["open"] * 2
    assert (report.steps, report.trimmed, report.duplicates, report.live) == (3, 0, 0, False)
    assert (report.attempts(), report.staleness, report.workers()) == ({1: 8}, {0: 6}, {"dev1": 7})
    known = {"attempts": 1, "worker": "dev1", "node": "", "policy_version": 1, "step": 2, "turn_rewards": None}
    assert report.groups[3] == Group(seq=3, state="used", **known)


def _lose_a_job(run: FakeRun) -> None:
    run.use(4, [7, 8])  # in order: so 6 had been issued, too
    (run.root / "queue" / "0000000006.a00_complete_from_dev1.safetensors").unlink()
    (run.root / "queue" / "0000000007.a00_pending.safetensors").unlink()


def _save(consumed: int) -> Callable[[FakeRun], object]:
    return lambda run: run.checkpoint(3, [*range(consumed)])


def _break(path: str, how: Callable[[bytes], bytes]) -> Callable[[FakeRun], None]:
    def damage(run: FakeRun) -> None:
        file = run.root / path
        file.write_bytes(how(file.read_bytes()))

    return damage


def _plant(path: str) -> Callable[[FakeRun], None]:
    return lambda run: (run.root / path).write_bytes(b"stray") and None


def _state_of_billions(run: FakeRun) -> str:
    state = {"run_id": RUN, "step": 3, "next_seq": 8_000_000_000, "rounds": 10**9, "consumed_below": 8_000_000_000}
    return json.dumps({**state, "unusable": [], "consumed": []})


def _pipe_for_the_state(run: FakeRun) -> None:
    path = run.checkpoint(3, [0])
    path.unlink()
    os.mkfifo(path)


GROUP_5 = "done/0000000/0000000005.a00_complete_from_dev1.safetensors"
DAMAGES: dict[str, tuple[Callable[[FakeRun], object], str]] = {
    "used twice": (lambda run: run.use(4, [6, 2]), "Group 2 was used 2 times, by steps 2, 4."),
    "lost": (_lose_a_job, "Group 6 is lost: it was issued, and is neither used, nor open, nor set aside."),
    "consumed without use": (_save(7), "checkpoint-3 counts them as used, but no step of the record"),
    "used but not consumed": (
        lambda run: run.checkpoint(3, [*range(5)]),
        "step 3, but checkpoint-3 does not: groups 5",
    ),
    "vanished": (lambda run: (run.root / GROUP_5).unlink(), "Group 5 was used by step 3, but its file has vanished."),
    "too new": (lambda run: run.use(4, [6, 7], version=9), "generated by version 9, was used at version 3"),
    "too stale": (lambda run: run.use(9, [6, 7], version=1), "staler than the bound of 4"),
    "another version": (lambda run: run.group(5, 1), "used as one of version 2, but its file is of version 1"),
    "dropped and used": (lambda run: run.line(dropped=3), "Group 3 was dropped, but step 2 used it"),
    "unusable, nobody knows why": (lambda run: run.checkpoint(3, [0, 1, 2, 3, 4, 5], (8,)), "has group 8 as set aside"),
    "ahead of the record": (lambda run: run.checkpoint(9, [0]), "checkpoint-9 is ahead of the record"),
    "truncated": (_break(GROUP_5, lambda data: data[:-3]), "truncated or padded"),
    "garbled": (_break(GROUP_5, lambda data: data[:-3] + b"xyz"), "the content was changed"),
    "garbled job": (_break("queue/0000000007.a00_pending.safetensors", lambda data: b"x" + data), "is broken"),
    "garbled record": (_break("consumed.jsonl", lambda data: data.replace(b'"step": 2', b'"step": ')), "Line 3 of"),
    "cut record": (_break("consumed.jsonl", lambda data: data[:-9]), "Line 4 of consumed.jsonl is broken"),
    "foreign record": (_break("consumed.jsonl", lambda data: data.replace(RUN.encode(), b"other")), "it is of run oth"),
    "no reason": (lambda run: run.set_aside(8).with_suffix(".reason").unlink(), "has no reason file"),
    "broken checkpoint": (lambda run: run.checkpoint(3, [0]).write_text("{"), "rollout_state.json cannot be used"),
    "stray name": (_plant("queue/8999999999.a00_pending.safetensors"), "number 8999999999 does not belong to this run"),
    "stray in quarantine": (_plant("quarantine/8999999999.a00_failed.safetensors"), "No file knows groups"),
    "a record of billions": (lambda run: run.line(dropped=8_999_999_998), "No file knows groups"),
    "a checkpoint of billions": (
        lambda run: run.checkpoint(3, [0]).write_text(_state_of_billions(run)),
        "checkpoint-3 counts them as used, but no step of the record used them: groups",
    ),
    "an impossible checkpoint": (
        lambda run: run.checkpoint(3, [0]).write_text(_state_of_billions(run).replace("8000000000", "10000000000")),
        "are not possible together",
    ),
    "text for a number": (
        lambda run: run.checkpoint(3, [0]).write_text(_state_of_billions(run).replace("8000000000", '"many"')),
        'next_seq is "many", not an integer',
    ),
    "a pipe for a checkpoint's state": (_pipe_for_the_state, "rollout_state.json cannot be used: it is a named pipe"),
    "no record": (lambda run: run.run.consumption.unlink(), "There is no consumed.jsonl"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_damage_is_found_and_named(run: FakeRun, damage: str) -> None:
    do, sentence = DAMAGES[damage]
    do(run)
    anomalies = run.audit().anomalies
    assert any(sentence in text for text in anomalies), anomalies


def _resume_and_use_again(run: FakeRun) -> None:
    run.begin(2)
    run.use(3, [4, 5], version=2)
    run.use(4, [6, 7])


def _resume_from_the_start(run: FakeRun) -> None:
    run.output_dir.rename(run.output_dir.with_name("moved away"))
    run.begin(None)
    for step in (1, 2):
        run.use(step, [2 * step - 2, 2 * step - 1], version=step - 1)


def _withdraw(run: FakeRun) -> None:
    """A resumed server has removed what was pending, and has not come to issue it again."""
    run.begin(2)
    (run.root / "queue/0000000007.a00_pending.safetensors").unlink()
    run.group(8, 3, folder="queue")


def _trim(run: FakeRun) -> None:
    for seq in (0, 1, 2):
        (run.root / f"done/0000000/{seq:010d}.a00_complete_from_dev1.safetensors").unlink()


def _finish_and_move_checkpoints_away(run: FakeRun) -> None:
    _trim(run)
    run.run.update_state(state="finished")
    run.output_dir.rename(run.output_dir.with_name("moved away"))


def _use_what_was_generated_by_taken_back_weights(run: FakeRun) -> None:
    run.begin(2)
    run.use(3, [4, 6], version=2)
    (run.root / "done/0000000/0000000004.a00_complete_from_dev1.safetensors").unlink()
    run.group(4, 2)
    run.line(step=4, version_used=3, seqs=[5], policy_versions=[2])
    (run.root / "queue/0000000006.a00_complete_from_dev1.safetensors").unlink()


def _second_result(run: FakeRun) -> None:
    path = run.group(3, 1, attempt=1, worker=2)
    path.rename(path.with_name("0000000003.a01_duplicate_from_dev2.safetensors"))


SOUND: dict[str, Callable[[FakeRun], object]] = {
    "resumed": _resume_and_use_again,
    "resumed from the start": _resume_from_the_start,
    "withdrawn": _withdraw,
    "trimmed": _trim,
    "taken back": _use_what_was_generated_by_taken_back_weights,
    "trimmed, and its checkpoints moved away": _finish_and_move_checkpoints_away,
    "set aside": lambda run: run.set_aside(8),
    "broken set aside": lambda run: run.set_aside(8, "broken_pending"),
    "dropped": lambda run: (run.line(dropped=8), run.group(8)),
    "taken, not trained on": lambda run: run.group(8),
    "second result": _second_result,
    # The record has a line for each batch, not for each step.
    "a checkpoint between two steps on one batch": lambda run: run.checkpoint(4, [0, 1, 2, 3, 4, 5]),
    "foreign names": lambda run: (run.root / "queue" / "notes.txt").write_text("mine"),
}


@pytest.mark.parametrize("case", SOUND)
def test_what_a_run_may_do_is_no_anomaly(run: FakeRun, case: str) -> None:
    SOUND[case](run)
    assert run.audit().anomalies == []


def test_a_resumed_history_replaces_the_abandoned_one(run: FakeRun) -> None:
    _resume_and_use_again(run)
    report = run.audit()
    assert report.processes == 2
    assert [group.step for group in report.groups[:8]] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert report.staleness == {0: 8}


def test_versions_that_a_resume_took_back_are_counted(run: FakeRun) -> None:
    run.begin(2)
    run.group(6, 3)
    run.use(3, [4, 6], version=2, files=False)
    lines = run.run.consumption.read_text().splitlines()
    lines[-1] = lines[-1].replace("[2, 2]", "[2, 3]")
    run.run.consumption.write_text("\n".join(lines) + "\n")
    report = run.audit()
    assert (report.anomalies, report.taken_back) == ([], 1)


def test_a_rename_in_flight_is_looked_at_again(run: FakeRun) -> None:
    pending = run.root / "queue/0000000006.a00_complete_from_dev1.safetensors"
    run.use(4, [7], files=False)
    run.group(7, 3)
    hidden = pending.rename(run.root / "hidden")
    looks: list[float] = []

    def it_appears(seconds: float) -> None:
        looks.append(seconds)
        hidden.rename(pending)

    assert audit(run.root, sleep=it_appears).anomalies == []
    assert len(looks) == 1


@pytest.mark.parametrize("content", [None, "{}", "no json"])
def test_what_is_no_run_directory_is_an_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(RunDirError):
        audit(tmp_path)
    assert main(["audit", str(tmp_path)]) == 2
    assert main(["audit", str(tmp_path / "nowhere")]) == 2


def test_a_run_that_has_not_begun_is_clean(tmp_path: Path) -> None:
    RunDir(tmp_path).write_state(RunState(run_id=RUN, state="running", plan=planned(), started=""))
    assert audit(tmp_path).clean


def test_the_command_prints_totals_and_sentences(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(run.root)]) == 0
    assert "groups issued        8\n" in capsys.readouterr().out
    run.use(4, [6, 2])
    assert main(["audit", str(run.root)]) == 1
    assert "ANOMALY: Group 2 was used 2 times, by steps 2, 4." in capsys.readouterr().out
    assert main(["audit", str(run.root), "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["clean"], data["issued"], data["used"], data["open"]) == (False, 8, 7, 1)
    assert data["groups"][2]["state"] == "used"


def test_each_group_of_a_large_archive_is_read_at_most_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = FakeRun(tmp_path)
    for step in range(1, 126):
        run.use(step, list(range(16 * step - 16, 16 * step)))
    reads: Counter[str] = Counter()
    theirs = OsFiles.read
    monkeypatch.setattr(OsFiles, "read", lambda files, path: reads.update([path]) or theirs(files, path))
    report = run.audit()
    assert report.clean
    assert report.count("used") == 2000
    assert set(reads.values()) == {1}


def _write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


# --- What the audit says of turn rewards: ------------------------------------------------------------------------


def turns(counts: list[int], rewards: list[float], mask: list[int] | None = None) -> dict[str, Any]:
    """The turns of a group with two completions, the first of three tokens and the second of one."""
    return {
        "completion_lengths": np.array([3, 1], np.int32),
        "completion_ids": np.array([5, 6, 7, 8], np.int32),
        "sampling_logprobs": np.full(4, -1, np.float32),
        "tool_mask": None if mask is None else np.array(mask, np.uint8),
        "turn_counts": np.array(counts, np.int32),
        "turn_rewards": np.array(rewards, np.float32),
    }


def test_the_figures_of_turn_rewards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ArchivedRun(tmp_path)
    run.use(1, [0], **turns([2, 1], [0.25, np.nan, 0.5], mask=[1, 0, 1, 1]))
    run.use(2, [1], **turns([1, 1], [np.inf, 1.0]))
    assert main(["audit", str(run.root)]) == 0
    assert "turn rewards         3 for 5 turns, 0.583 on average\n" in capsys.readouterr().out
    run.use(3, [2])
    assert main(["audit", str(run.root)]) == 0
    assert "0.583 on average; 1 group without\n" in capsys.readouterr().out
    assert main(["audit", str(run.root), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["turn_rewards"] == {"turns": 5, "rewarded": 3, "total": 1.75}
    each = [group["turn_rewards"] for group in data["groups"]]
    assert each == [{"turns": 3, "rewarded": 2, "total": 0.75}, {"turns": 2, "rewarded": 1, "total": 1.0}, None]


def test_a_run_without_turn_rewards_says_nothing_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ArchivedRun(tmp_path)
    run.use(1, [0])
    assert main(["audit", str(run.root)]) == 0
    assert "turn rewards" not in capsys.readouterr().out
    assert audit(run.root).as_json()["turn_rewards"] is None


@pytest.mark.parametrize(
    ("counts", "rewards", "mask", "found"),
    [
        ([1, 1], [0, 0], [1, 0, 1, 1], "completion 0 has 1 turn reward, and its tokens have 2 turns"),
        ([1, 2], [0, 0, 0], [1, 1, 0, 1], "completion 1 has 2 turn rewards, and its tokens have 1 turn"),
        ([2, 1], [0, 0, 0], None, "completion 0 has 2 turn rewards, and its tokens have 1 turn"),
        ([0, 1], [0], [0, 1, 1, 1], "completion 0 has no turn rewards, and its tokens have 1 turn"),
        ([0, 1], [1], [0, 0, 0, 1], None),  # an environment alone wrote completion 0
    ],
)
def test_as_many_turn_rewards_as_turns(
    counts: list[int], rewards: list[float], mask: list[int] | None, found: str | None, tmp_path: Path
) -> None:
    run = ArchivedRun(tmp_path)
    run.use(1, [0], **turns([1, 1], [0, 0]))
    run.use(2, [1], **turns(counts, rewards, mask))
    assert audit(run.root).anomalies == ([f"Group 1: {found}."] if found else [])


# --- What the audit concludes from checkpoints: ------------------------------------------------------------------


@pytest.fixture
def trimmed(tmp_path: Path) -> FakeRun:
    """Step 1 used `MANY` groups, which its checkpoint has, and whose files were trimmed; group 0 came in later."""
    trimmed = FakeRun(tmp_path)
    trimmed.line(step=1, version_used=0, seqs=list(range(1, MANY)), policy_versions=[0] * (MANY - 1))
    trimmed.checkpoint(1, list(range(1, MANY)))
    trimmed.use(2, [0])
    return trimmed


def test_a_group_that_was_open_when_later_ones_were_trimmed_may_be_any_number_older(trimmed: FakeRun) -> None:
    report = audit(trimmed.root)
    assert report.anomalies == []
    assert report.trimmed == MANY - 1


def test_what_is_gone_while_an_older_group_of_its_batch_is_there_was_not_trimmed(trimmed: FakeRun) -> None:
    trimmed.group(300)
    assert audit(trimmed.root).anomalies[0] == "Group 301 was used by step 1, but its file has vanished."


@pytest.mark.parametrize("folder", ["queue", "done", "quarantine"])
def test_a_link_in_the_place_of_a_folder_is_named(trimmed: FakeRun, folder: str) -> None:
    (trimmed.root / folder).rename(trimmed.root / "elsewhere")
    (trimmed.root / folder).symlink_to("elsewhere")
    with pytest.raises(BadFileError, match=rf"{trimmed.root / folder} is not a directory"):
        audit(trimmed.root)


@pytest.mark.parametrize(("run_id", "is_told"), [(RUN, True), ("another", False)])
def test_a_state_that_cannot_be_read_is_told_unless_it_says_that_it_is_anothers(
    trimmed: FakeRun, run_id: str, is_told: bool
) -> None:
    path = save_checkpoint(trimmed.output_dir, run_id, 7) / FILE_NAME
    path.write_text(path.read_text().replace('"step": 7', '"step": "7"'))
    told = [text for text in audit(trimmed.root).anomalies if "cannot be used: step is" in text]
    assert len(told) == is_told
