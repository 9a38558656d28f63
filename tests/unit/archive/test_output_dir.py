"""Whose checkpoints lie in an output_dir, and where those of a resumed run are looked for."""

from __future__ import annotations

import errno
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects

from async_grpo.archive import output_dir
from async_grpo.archive.checkpoint_folders import staging, start_saving
from async_grpo.errors import RunDirError
from async_grpo.rundir import paths as runs
from async_grpo.rundir.lifecycle import prepare
from async_grpo.rundir.locks import server_lock
from async_grpo.rundir.paths import RunDir, RunState
from kit.archived_run import save_checkpoint
from kit.plans import planned

CONFIG = Path("my_trainer.py")


def begun(root: Path, outputs: Path, **changes: object) -> RunState:
    """A run in `root` that has claimed `outputs`."""
    output_dir.claim(outputs, prepare(root, planned(CONFIG)).run_id, root)
    return RunDir(root).update_state(output_dir=str(outputs), **changes)


def save(outputs: Path, state: RunState, step: int, root: Path) -> Path:
    return save_checkpoint(outputs, state.run_id, step, run_dir=str(root))


def found_path(named: str, state: RunState, root: Path) -> Path | None:
    found = output_dir.find_checkpoint(named, state, root)
    return found and found.path


# --- where a resumed run looks


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, in which a run is begun in `worker`."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_a_resume_from_another_folder_finds_the_checkpoints(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = home / "worker"
    state = begun(root, home / "outputs", step=4)
    checkpoint = save(home / "outputs", state, 4, root)
    (elsewhere := home / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    assert found_path("outputs", state, root) == checkpoint
    assert output_dir.absolute("outputs", state, root) == home / "outputs", "new ones go where the others are"
    assert output_dir.absolute("/big/disk", state, root) == Path("/big/disk")
    assert output_dir.absolute("outputs", None, root) == elsewhere / "outputs"


def test_checkpoints_that_were_moved_are_found_where_the_setup_file_says(home: Path) -> None:
    state = begun(home / "worker", home / "old", step=4)
    save(home / "old", state, 4, home / "worker")
    (home / "old").rename(home / "new")
    assert found_path("new", state, home / "worker") == home / "new" / "checkpoint-4"


@pytest.mark.parametrize("copied", [False, True])
def test_a_project_that_was_moved_or_copied_as_a_whole_has_its_own_checkpoints(
    home: Path, monkeypatch: pytest.MonkeyPatch, copied: bool
) -> None:
    state = begun(home / "worker", home / "outputs", step=4)
    save(home / "outputs", state, 4, home / "worker")
    there = home.with_name("there")
    shutil.copytree(home, there)
    if copied:
        save(home / "outputs", state, 8, home / "worker")  # the other one goes on
    else:
        shutil.rmtree(home)
    monkeypatch.chdir(there)
    assert found_path("outputs", state, there / "worker") == there / "outputs" / "checkpoint-4"
    assert output_dir.absolute("outputs", state, there / "worker") == there / "outputs"


def test_a_run_directory_that_is_moved_alone_finds_its_checkpoints(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a job of a cluster, whose run directory is on the node's own disk."""
    state = begun(home / "worker", home / "outputs", step=4)
    checkpoint = save(home / "outputs", state, 4, home / "worker")
    (node := home.with_name("node")).mkdir()
    (home / "worker").rename(node / "worker")
    for folder in (home, node):
        monkeypatch.chdir(folder)
        assert found_path("outputs", state, node / "worker") == checkpoint


def test_a_run_that_has_trained_is_not_started_over_without_a_word(home: Path) -> None:
    state = begun(home / "worker", home / "gone", step=4)
    with pytest.raises(RunDirError) as refusal:
        output_dir.find_checkpoint("named", state, home / "worker")
    text = str(refusal.value)
    assert str(home / "gone") in text and str(home / "named") in text and "--overwrite" in text
    assert found_path("named", replace(state, step=0), home / "worker") is None


# --- whose it is


@pytest.mark.parametrize("ended", [runs.STOPPED, runs.FAILED, runs.RUNNING])
def test_the_checkpoints_of_an_unfinished_run_keep_another_run_out(tmp_path: Path, ended: str) -> None:
    outputs = tmp_path / "outputs"
    first = begun(tmp_path / "one", outputs, state=ended, step=4)
    save(outputs, first, 4, tmp_path / "one")
    with pytest.raises(RunDirError, match=rf"another unfinished run \({first.run_id}, {ended}, step 4, in .*/one\)"):
        output_dir.refuse_another_runs(outputs, "second", tmp_path / "two")
    output_dir.refuse_another_runs(outputs, first.run_id, tmp_path / "one")
    output_dir.refuse_another_runs(outputs, "next", tmp_path / "one")  # --overwrite
    (outputs / output_dir.MARKER).write_text("\0")
    with pytest.raises(RunDirError, match="another unfinished run"):  # the checkpoint says the same
        output_dir.refuse_another_runs(outputs, "second", tmp_path / "two")


def test_a_live_run_without_a_checkpoint_keeps_another_out(tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    begun(tmp_path / "one", outputs)
    output_dir.refuse_another_runs(outputs, "second", tmp_path / "two")  # killed while it loaded
    with server_lock(tmp_path / "one") as lock:
        assert lock.try_acquire()
        with pytest.raises(RunDirError):
            output_dir.refuse_another_runs(outputs, "second", tmp_path / "two")


def test_a_copy_of_a_run_does_not_write_over_the_checkpoints_of_the_live_one(tmp_path: Path) -> None:
    """`cp -r one two` while `one` goes on: both have one run id, and each would take the other's for its own."""
    outputs = tmp_path / "outputs"
    state = begun(tmp_path / "one", outputs, step=4)
    save(outputs, state, 4, tmp_path / "one")
    for name in ("one", "outputs"):
        shutil.copytree(tmp_path / name, tmp_path / "copy" / name)
    output_dir.refuse_another_runs(outputs, state.run_id, tmp_path / "copy" / "one")
    with server_lock(tmp_path / "one") as lock:
        assert lock.try_acquire()
        with pytest.raises(RunDirError):
            output_dir.refuse_another_runs(outputs, state.run_id, tmp_path / "copy" / "one")
        output_dir.refuse_another_runs(tmp_path / "copy" / "outputs", state.run_id, tmp_path / "copy" / "one")
        output_dir.refuse_another_runs(outputs, state.run_id, tmp_path / "one")


@pytest.mark.parametrize("fate", ["finished", "never trained", "deleted", "moved aside"])
def test_a_run_that_is_over_keeps_nobody_out_and_its_checkpoints_stay(tmp_path: Path, fate: str) -> None:
    outputs, root = tmp_path / "outputs", tmp_path / "one"
    assert output_dir.what_stays(outputs, "second") == ""
    first = begun(root, outputs, state=runs.FAILED if fate == "never trained" else runs.FINISHED, step=0)
    save(outputs, first, 4, root)
    if fate == "deleted":
        (root / "run.json").unlink()
    elif fate == "moved aside":
        prepare(root, planned(CONFIG))
    output_dir.refuse_another_runs(outputs, "second", tmp_path / "two")
    assert "has 1 checkpoint that this run did not write. It stays:" in output_dir.what_stays(outputs, "second")
    assert output_dir.what_stays(outputs, first.run_id) == ""


def test_checkpoints_of_plain_trl_are_mentioned(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-7").mkdir()
    (tmp_path / "checkpoint-best").mkdir()
    assert "has 1 checkpoint" in output_dir.what_stays(tmp_path, "mine")
    (tmp_path / "checkpoint-8").mkdir()
    assert "has 2 checkpoints that this run did not write. They stay:" in output_dir.what_stays(tmp_path, "mine")


@pytest.mark.parametrize("content", ["", "[]", "{}", "[" * 100_000, '{"run_id": "x", "run_dir": "/nowhere"}'])
def test_a_marker_that_cannot_be_read_is_no_owner(tmp_path: Path, content: str) -> None:
    (tmp_path / output_dir.MARKER).write_text(content)
    output_dir.refuse_another_runs(tmp_path, "mine", tmp_path / "worker")


def test_a_state_that_cannot_be_read_is_no_owner_and_stays(tmp_path: Path) -> None:
    """One torn file of somebody else kept every run out of the folder."""
    (tmp_path / "checkpoint-7").mkdir()
    (tmp_path / "checkpoint-7" / "rollout_state.json").write_text("{")
    output_dir.refuse_another_runs(tmp_path, "mine", tmp_path / "worker")
    assert "has 1 checkpoint that this run did not write" in output_dir.what_stays(tmp_path, "mine")


# --- the folder itself


def test_a_folder_in_which_no_folder_can_be_renamed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start, not when the first checkpoint is complete."""
    rename = Path.rename

    def only_files(self: Path, target: Path) -> Path:
        if self.is_dir():
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", only_files)
    with pytest.raises(RunDirError, match=r"No folder can be renamed in .*outputs \(Invalid cross-device link\)"):
        output_dir.claim(tmp_path / "outputs", "mine", tmp_path / "worker")
    assert list((tmp_path / "outputs").iterdir()) == []


def test_what_a_hub_gets_of_the_folder_has_nothing_of_ours(tmp_path: Path) -> None:
    """The patterns are transformers'; `test_the_hub_leaves_out_what_begins_with_an_underscore` holds it to them."""
    output_dir.claim(tmp_path, "mine", tmp_path / "worker")
    start_saving(staging(tmp_path, "mine"))
    (staging(tmp_path, "mine") / "model.safetensors").touch()
    (tmp_path / "model.safetensors").touch()
    files = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 3
    assert list(filter_repo_objects(files, ignore_patterns=["_*", "checkpoint-*"])) == ["model.safetensors"]
