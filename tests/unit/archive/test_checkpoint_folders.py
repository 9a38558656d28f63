"""Which checkpoint a run resumes from, and which ones are never touched."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from async_grpo.archive import checkpoint_folders, rollout_state
from async_grpo.archive.checkpoint_folders import Checkpoint, put_in_place, rotate, staging, start_saving
from async_grpo.archive.rollout_state import FILE_NAME, RolloutState
from async_grpo.errors import RunDirError


def state(step: int = 3, run_id: str = "mine") -> RolloutState:
    return RolloutState(run_id=run_id, step=step, next_seq=9, rounds=3, unusable=[2], consumed_below=4, consumed=[6])


def write(output_dir: Path, step: int, run_id: str = "mine", weights: bytes = b"weights") -> Path:
    """What a run does to save a checkpoint, up to its place."""
    start_saving(staging(output_dir, run_id))
    written = staging(output_dir, run_id) / f"checkpoint-{step}"
    written.mkdir()
    (written / "model.safetensors").write_bytes(weights)
    (written / "trainer_state.json").write_text("{}")
    (written / "README.md").write_text("for people")
    return written


def save(output_dir: Path, step: int, run_id: str = "mine", weights: bytes = b"weights") -> Path:
    written = write(output_dir, step, run_id, weights)
    checkpoint_folders.save(written, state(step, run_id))
    return put_in_place(written, output_dir, run_id)


def latest(output_dir: Path, run_id: str = "mine") -> Checkpoint:
    found = checkpoint_folders.latest([output_dir], run_id)
    assert found is not None
    return found


def names(output_dir: Path) -> set[str]:
    return {path.name for path in output_dir.iterdir()}


def test_the_newest_complete_checkpoint_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    for step in (9, 10, 2):  # 10 is newer than 9, whatever the alphabet and the file times say
        save(tmp_path, step)
    found = latest(tmp_path)
    assert found.path == tmp_path / "checkpoint-10"
    assert set(found.state.files) == {"model.safetensors", "trainer_state.json"}
    assert found.state == replace(state(10), files=found.state.files)
    assert names(tmp_path) == {"checkpoint-2", "checkpoint-9", "checkpoint-10"}


@pytest.mark.parametrize("weights", [b"", b"half", b"weights"])
def test_a_checkpoint_whose_writer_was_killed_is_not_used(tmp_path: Path, weights: bytes) -> None:
    """Whichever run wrote it: that of another has no state of ours beside its weights, and ours has no name yet."""
    save(tmp_path, 10, weights=b"of the first run")
    write(tmp_path, 10, "second", weights)
    assert latest(tmp_path).path.joinpath("model.safetensors").read_bytes() == b"of the first run"
    assert checkpoint_folders.latest([tmp_path], "second") is None
    write(tmp_path, 12, weights=weights)
    assert latest(tmp_path).state.step == 10


@pytest.mark.parametrize(
    ("content", "may_be_mine"),
    [
        (b"{", True),
        (b"[]", True),
        (b"{}", True),
        (b"\xff\xfe", True),
        (b'{"run_id": "mine", "step": "many"}', True),
        (b'{"run_id": "other", "step": "many"}', False),
    ],
)
def test_a_state_that_cannot_be_read_keeps_only_those_out_who_might_need_it(
    tmp_path: Path, content: bytes, may_be_mine: bool
) -> None:
    save(tmp_path, 10)
    for step in (9, 11):
        (folder := tmp_path / f"checkpoint-{step}").mkdir()
        (folder / FILE_NAME).write_bytes(content)
        assert len(list(checkpoint_folders.complete(tmp_path))) == 1
        if step == 9 or not may_be_mine:
            assert latest(tmp_path).state.step == 10
            continue
        with pytest.raises(RunDirError, match=rf"{FILE_NAME} cannot be used.*Move {folder} away to resume from an ol"):
            latest(tmp_path)


def test_a_second_run_leaves_the_checkpoints_of_the_first(tmp_path: Path) -> None:
    save(tmp_path, 10, "first", b"first")
    save(tmp_path, 10, "second", b"second")
    assert latest(tmp_path, "first").path == tmp_path / "checkpoint-10-of-first"
    assert (tmp_path / "checkpoint-10-of-first" / "model.safetensors").read_bytes() == b"first"
    assert latest(tmp_path, "second").path == tmp_path / "checkpoint-10"


def test_a_checkpoint_that_is_not_of_any_run_is_kept_under_another_name(tmp_path: Path) -> None:
    for run in ("first", "second"):
        shutil.rmtree(tmp_path / "checkpoint-10", ignore_errors=True)
        (tmp_path / "checkpoint-10").mkdir()
        (tmp_path / "checkpoint-10" / "model.safetensors").write_bytes(b"plain TRL's")
        save(tmp_path, 10, run)
    assert names(tmp_path) == {"checkpoint-10", "checkpoint-10-of-before", "checkpoint-10-of-before-2"}
    assert (tmp_path / "checkpoint-10-of-before" / "model.safetensors").read_bytes() == b"plain TRL's"


def test_a_kill_while_a_checkpoint_is_replaced_loses_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is stopped before its first step after a resume writes the checkpoint again that it resumed from."""
    save(tmp_path, 10, weights=b"old")
    written = write(tmp_path, 10, weights=b"new")
    checkpoint_folders.save(written, state(10))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    if not checkpoint_folders._exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system cannot exchange two folders")
    rename, renamed = Path.rename, list[Path]()

    def killed_after_the_first(path: Path, target: Path) -> Path:
        if renamed:
            raise KeyboardInterrupt
        renamed.append(path)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", killed_after_the_first)
    with suppress(KeyboardInterrupt):
        put_in_place(written, tmp_path, "mine")
    assert latest(tmp_path).state.step == 10


@pytest.mark.parametrize("exchange", [True, False])
def test_what_a_user_added_to_a_checkpoint_that_is_replaced_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr(checkpoint_folders, "_exchange", lambda written, target: False)
    first = write(tmp_path, 10, weights=b"old")
    (first / "rollout_batch.safetensors").write_bytes(b"of the batch that it is in the middle of")
    checkpoint_folders.save(first, state(10))
    checkpoint = put_in_place(first, tmp_path, "mine")
    (checkpoint / "evaluations").mkdir()
    (checkpoint / "evaluations" / "gsm8k.json").write_text("mine")
    (checkpoint / "merged.safetensors").write_bytes(b"mine")
    save(tmp_path, 10, weights=b"new")
    assert names(tmp_path) == {"checkpoint-10"}
    saved = {"model.safetensors", "trainer_state.json", "README.md", FILE_NAME}
    assert names(checkpoint) == {*saved, "evaluations", "merged.safetensors"}
    assert (checkpoint / "evaluations" / "gsm8k.json").read_text() == "mine"
    assert latest(tmp_path).path.joinpath("model.safetensors").read_bytes() == b"new"


@pytest.mark.parametrize("size", [7, 70_005])
def test_weights_that_are_not_those_that_were_saved_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(checkpoint_folders, "_READ_WHOLE", 64_000)
    monkeypatch.setattr(checkpoint_folders, "_PIECE", 100)
    checkpoint = save(tmp_path, 10, weights=b"a" * size)
    is_bound(checkpoint, "model.safetensors", b"b" * size)


def is_bound(checkpoint: Path, name: str, others: bytes) -> None:
    """A file of a checkpoint with other contents, or without it, makes the checkpoint another."""
    latest(checkpoint.parent)
    (checkpoint / name).write_bytes(others)
    with pytest.raises(RunDirError, match=rf"not as run mine wrote it: {re.escape(name)} has other contents.*Move"):
        latest(checkpoint.parent)
    (checkpoint / name).unlink()
    with pytest.raises(RunDirError, match=rf"not as run mine wrote it: {re.escape(name)} is missing"):
        latest(checkpoint.parent)


def test_the_files_of_a_critic_are_bound_as_the_weights_are(tmp_path: Path) -> None:
    written = write(tmp_path, 10)
    (written / "critic").mkdir()
    (written / "critic" / "optimizer.safetensors").write_bytes(b"moments")
    checkpoint_folders.save(written, state(10))
    is_bound(put_in_place(written, tmp_path, "mine"), "critic/optimizer.safetensors", b"others")


def test_what_a_user_adds_to_a_checkpoint_or_writes_into_its_readme_is_no_obstacle(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 10)
    (checkpoint / "README.md").write_text("my best")
    (checkpoint / "notes.txt").write_text("x")
    assert latest(tmp_path).path == checkpoint


def test_a_checkpoint_of_an_earlier_version_has_no_digests_and_is_used(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 10)
    data = json.loads((checkpoint / FILE_NAME).read_text())
    del data["files"], data["run_dir"]
    (checkpoint / FILE_NAME).write_text(json.dumps(data))
    assert latest(tmp_path).path == checkpoint


def test_checkpoints_of_another_run_or_of_another_format_are_not_ours(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 5, run_id="another")
    checkpoint = save(tmp_path, 7)
    data = json.loads((checkpoint / FILE_NAME).read_text())
    (checkpoint / FILE_NAME).write_text(json.dumps({**data, "format": 99}))
    assert latest(tmp_path).state.step == 1
    assert checkpoint_folders.latest([tmp_path], "a third") is None
    assert checkpoint_folders.latest([tmp_path / "missing"], "mine") is None


# --- rotation


def test_rotation_removes_only_what_the_run_wrote(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    save(tmp_path, 5, run_id="another")
    for copy in ("checkpoint-10-backup", "checkpoint-best", "checkpoint-11"):
        shutil.copytree(tmp_path / "checkpoint-10", tmp_path / copy)
    for other in ("checkpoint-7", "checkpoint-99"):
        (tmp_path / other).mkdir()
    (tmp_path / "checkpoint-99" / FILE_NAME).touch()  # that another program is just copying here
    shutil.move(tmp_path / "checkpoint-20", elsewhere)
    (tmp_path / "checkpoint-20").symlink_to(elsewhere)
    kept = names(tmp_path) - {"checkpoint-10", "checkpoint-30", "checkpoint-40"}
    rotate(tmp_path, "mine", 2, best=None)
    assert names(tmp_path) == {"checkpoint-30", "checkpoint-40", *kept}
    checkpoint_folders.keep_only(tmp_path, "mine", best=str(tmp_path / "checkpoint-30"))
    assert names(tmp_path) == {"checkpoint-30", *kept}
    assert (elsewhere / "model.safetensors").exists()


def test_the_best_checkpoint_is_kept_however_its_path_is_spelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        save(tmp_path / "out", step)
    (tmp_path / "link").symlink_to(tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    rotate(tmp_path / "out", "mine", 1, best="link/../out/checkpoint-1")
    assert names(tmp_path / "out") == {"checkpoint-1", "checkpoint-3"}


def test_the_checkpoint_of_a_step_beside_another(tmp_path: Path) -> None:
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    save(tmp_path, 1, run_id="another")  # it renames ours
    assert checkpoint_folders.of_step(newest, 1) == tmp_path / "checkpoint-1-of-mine"
    assert checkpoint_folders.of_step(newest, 3) is None
    (tmp_path / "checkpoint-4").mkdir()
    assert checkpoint_folders.of_step(tmp_path / "checkpoint-4", 1) is None


@pytest.mark.parametrize(
    ("limit", "best", "left"),
    [
        (None, None, {1, 2, 3, 4}),
        (0, None, {1, 2, 3, 4}),
        (2, None, {3, 4}),
        (2, 1, {1, 4}),
        (1, 1, {1, 4}),
        (1, 4, {4}),
        (9, None, {1, 2, 3, 4}),
    ],
)
def test_rotation_keeps_the_newest_and_the_best(
    tmp_path: Path, limit: int | None, best: int | None, left: set[int]
) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    rotate(tmp_path, "mine", limit, str(tmp_path / f"checkpoint-{best}") if best else None)
    assert names(tmp_path) == {f"checkpoint-{step}" for step in left}


def test_what_a_killed_rotation_leaves_goes_with_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = save(tmp_path, 1)
    with monkeypatch.context() as killed:
        killed.setattr(checkpoint_folders.shutil, "rmtree", lambda *args, **kwargs: None)
        checkpoint_folders.delete(checkpoint, "mine")
    assert names(tmp_path) == {"_saving-mine"}
    assert checkpoint_folders.latest([tmp_path], "mine") is None and not checkpoint_folders.without_owner(tmp_path)
    save(tmp_path, 2)
    assert names(tmp_path) == {"checkpoint-2"}


def test_a_checkpoint_that_cannot_be_moved_loses_its_state_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = save(tmp_path, 1)
    (tmp_path / "_saving-mine" / "busy").mkdir(parents=True)
    monkeypatch.setattr(checkpoint_folders.shutil, "rmtree", lambda *args, **kwargs: None)
    checkpoint_folders.delete(checkpoint, "mine")
    assert checkpoint_folders.latest([tmp_path], "mine") is None
    assert (checkpoint / "model.safetensors").exists() and not (checkpoint / rollout_state.FILE_NAME).exists()
