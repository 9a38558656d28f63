"""Who may use a run directory, when, and what becomes of the run that is in it."""

from __future__ import annotations

import json
import os
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from async_grpo.errors import BadFileError, RunDirError, RunRefused
from async_grpo.queue import ServerQueue
from async_grpo.records import WorkerId
from async_grpo.rundir import lifecycle, refusal
from async_grpo.rundir import paths as runs
from async_grpo.rundir.lifecycle import Fate, prepare, preview
from async_grpo.rundir.locks import KernelLock
from async_grpo.rundir.paths import RunDir, RunState
from kit.plans import planned

CONFIG = Path("my_trainer.py")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "worker"


def old_run(root: Path, **changes: Any) -> RunState:
    """A run that left something of every kind, next to checkpoints of the user's own naming."""
    state = prepare(root, planned(CONFIG))
    run = RunDir(root)
    for name in ("queue", "done", "quarantine", "tmp", "alive", "tensorboard"):
        (root / name).mkdir()
        (root / name / "file").write_text(name)
    for path in (run.metrics, run.summary, run.server_log, run.worker_log(WorkerId(2))):
        path.write_text("old")
    (root / "outputs" / "checkpoint-5").mkdir(parents=True)
    (root / "outputs" / "checkpoint-5" / "model.safetensors").write_text("weights")
    return run.update_state(**changes) if changes else state


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_fresh_directory(root: Path) -> None:
    state = prepare(root / "deep", planned(CONFIG, master_device="1", worker_devices=("1", "1", "2")))
    assert RunDir(root / "deep").read_state() == state
    assert (state.state, state.plan.config) == (runs.RUNNING, CONFIG.absolute())
    assert (state.plan.num_workers, state.plan.workers_sharing) == (3, 2)
    assert (root / "deep").stat().st_mode & 0o777 == 0o700, "prompts and completions are nobody else's business"


@pytest.mark.parametrize(("state", "step"), [(runs.FINISHED, 100), (runs.FAILED, 0), (runs.STOPPED, 0)])
def test_a_run_that_is_over_is_moved_aside_and_nothing_of_it_is_lost(root: Path, state: str, step: int) -> None:
    old = old_run(root, state=state, step=step)
    before = everything(root)
    assert prepare(root, planned(CONFIG)).run_id != old.run_id
    [aside] = [path for path in root.parent.iterdir() if path != root]
    assert aside.name.startswith("worker-2")
    assert everything(aside) | {"server.lock": b""} == before | {"server.lock": b""}
    assert set(everything(root)) == {"run.json"}


def test_runs_that_finish_in_the_same_second_get_different_names(root: Path) -> None:
    for _ in range(4):
        prepare(root, planned(CONFIG))
        RunDir(root).update_state(state=runs.FINISHED)
        os.utime(RunDir(root).state_file, (1_700_000_000, 1_700_000_000))
    prepare(root, planned(CONFIG))
    stem, *others = sorted(path.name for path in root.parent.iterdir() if path != root)
    assert others == [f"{stem}-2", f"{stem}-3", f"{stem}-4"]


@pytest.mark.parametrize(
    ("state", "step"),
    [(runs.RUNNING, 0), (runs.RUNNING, 7), (runs.STOPPED, 7), (runs.FAILED, 7)],  # 0: killed while it loaded
)
def test_an_unfinished_run_is_refused_with_three_ways_out_and_not_touched(root: Path, state: str, step: int) -> None:
    old = old_run(root, state=state, step=step)
    before = everything(root)
    with pytest.raises(RunDirError) as refusal:
        prepare(root, planned(CONFIG))
    text = str(refusal.value)
    assert f"{root} holds an unfinished run ({old.run_id}, {state}, step {step}, started {old.started})" in text
    assert all(way in text for way in ("--resume", "--run-dir OTHER", "--overwrite"))
    assert {**everything(root), "server.lock": b""} == {**before, "server.lock": b""}


@pytest.mark.parametrize("state", [runs.RUNNING, runs.STOPPED, runs.FAILED, runs.FINISHED])
def test_resuming_keeps_the_run_and_everything_in_it(root: Path, state: str) -> None:
    old = old_run(root, state=state, step=7)
    before = everything(root)
    resumed = prepare(root, planned(CONFIG, resume=True, workers=4))
    assert (resumed.run_id, resumed.step, resumed.state) == (old.run_id, 7, runs.RUNNING)
    assert resumed.plan.num_workers == 4
    after = everything(root)
    assert {name for name in before if before[name] != after[name]} <= {"run.json", "server.lock"}


def test_a_folder_in_the_place_of_the_servers_status_is_left_to_the_server(root: Path) -> None:
    old_run(root, state=runs.STOPPED, step=7)
    (root / "alive" / "server.status").mkdir()
    assert prepare(root, planned(CONFIG, resume=True)).step == 7


@pytest.mark.parametrize(("exists", "why"), [(False, "does not exist"), (True, "holds no run")])
def test_there_is_nothing_to_resume(root: Path, exists: bool, why: str) -> None:
    if exists:
        root.mkdir()
    with pytest.raises(RunDirError, match=rf"Nothing to resume: .* {why}\. .* start without --resume"):
        prepare(root, planned(CONFIG, resume=True))


def test_overwriting_deletes_the_run_but_no_checkpoint_and_nothing_that_is_not_ours(root: Path) -> None:
    old = old_run(root, state=runs.STOPPED, step=7)
    for name in ("notes.txt", "log_of_my_thesis.txt"):
        (root / name).write_text("mine")
    assert prepare(root, planned(CONFIG, overwrite=True)).run_id != old.run_id
    left = {"run.json", "log_of_my_thesis.txt", "notes.txt"}
    assert set(everything(root)) - {"server.lock"} == left | {"outputs/checkpoint-5/model.safetensors"}
    assert {path.name for path in root.iterdir()} == left | {"outputs", "server.lock"}


def test_overwriting_does_not_follow_links_out_of_the_directory(root: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("data")
    prepare(root, planned(CONFIG))
    (root / "tensorboard").symlink_to(elsewhere)
    prepare(root, planned(CONFIG, overwrite=True))
    assert everything(elsewhere) == {"precious": b"data"}


@pytest.mark.parametrize(
    "name", ["thesis.tex", "summary.json", "metrics.jsonl", "log_of_my_thesis.txt", "tmp/draft", "queue/song"]
)
def test_a_folder_of_a_user_whose_files_may_be_named_like_ours_is_refused_and_not_touched(
    root: Path, name: str
) -> None:
    (root / name).parent.mkdir(parents=True)
    (root / name).write_text("mine")
    root.chmod(0o755)
    said = rf"is not a run directory: it holds '{name.split('/')[0]}' and no run\.json"
    for how in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(RunDirError, match=said):
            prepare(root, planned(CONFIG, **how))
    assert everything(root) == {name: b"mine"}
    assert root.stat().st_mode & 0o777 == 0o755


def test_what_a_killed_start_leaves_is_no_obstacle(root: Path) -> None:
    root.mkdir()
    (root / "server.lock").write_text("{}")
    (root / f".run.json.{'a' * 32}").write_text("{")
    assert prepare(root, planned(CONFIG)).state == runs.RUNNING


def test_an_overwriting_that_is_killed_leaves_a_run_directory(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old_run(root, state=runs.STOPPED, step=7)
    deleted: list[Path] = []

    def rmtree(path: Path) -> None:
        deleted.append(path)
        if len(deleted) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(lifecycle.shutil, "rmtree", rmtree)
        prepare(root, planned(CONFIG, overwrite=True))
    assert (root / "run.json").exists()
    assert prepare(root, planned(CONFIG, overwrite=True)).step == 0


def test_a_file_in_its_place_is_refused(root: Path) -> None:
    root.touch()
    with pytest.raises(RunDirError, match="is not a directory"):
        prepare(root, planned(CONFIG))


@pytest.mark.parametrize("how", [{}, {"resume": True}, {"overwrite": True}])
def test_a_directory_in_use_names_who_uses_it_whatever_is_asked(root: Path, how: dict[str, bool]) -> None:
    old_run(root, state=runs.STOPPED, step=7)
    with KernelLock(root / "server.lock") as lock:
        assert lock.try_acquire({"role": "parameter server"})
        before = everything(root)
        with pytest.raises(RunDirError) as refusal:
            prepare(root, planned(CONFIG, **how))
        who = f"(pid {os.getpid()}, host {socket.gethostname()}, since 2"
        assert f"{root} is in use by a live parameter server {who}" in str(refusal.value)
        assert "choose another --run-dir" in str(refusal.value)
        assert everything(root) == before


def test_preparing_leaves_the_lock_free_for_the_server(root: Path) -> None:
    prepare(root, planned(CONFIG))
    with pytest.raises(RunDirError):
        prepare(root, planned(CONFIG))
    assert not KernelLock(root / "server.lock").is_held()


@pytest.mark.parametrize("content", [{"format": 99}, {}, [], None, 3])
def test_a_state_of_another_version(root: Path, content: object) -> None:
    root.mkdir()
    (root / "run.json").write_text(json.dumps(content))
    for how in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(RunDirError, match=r"run\.json .*(another version|not an object).* another run directory"):
            prepare(root, planned(CONFIG, **how))
    assert json.loads((root / "run.json").read_text()) == content


@pytest.mark.parametrize("undo", [{"nonsense": 1}, {"state": "finished"}, {"state": 1, "plan": {"config": "a.py"}}, []])
def test_a_state_whose_undo_is_none(root: Path, undo: Any) -> None:
    prepare(root, planned(CONFIG))
    file = RunDir(root).state_file
    file.write_text(json.dumps({**json.loads(file.read_text()), "undo": undo}))
    with pytest.raises(RunDirError, match="is not the record of a run"):
        prepare(root, planned(CONFIG, resume=True))


def test_a_state_that_vanishes_during_the_run_is_noticed(root: Path) -> None:
    prepare(root, planned(CONFIG))
    run = RunDir(root)
    run.state_file.unlink()
    with pytest.raises(RunDirError, match="has vanished"):
        run.update_state(step=1)


def test_the_weights_handle_can_be_put_elsewhere(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_IPC_HANDLE_PATH", raising=False)
    assert RunDir(root).weights_handle == root / "ps_ipc_handle.json"
    monkeypatch.setenv("CUDA_IPC_HANDLE_PATH", str(root.parent / "handle.json"))
    assert RunDir(root).weights_handle == root.parent / "handle.json"


def snapshot(root: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(root.rglob("*"))}


@pytest.mark.parametrize(
    ("state", "step", "flags", "fate"),
    [
        (None, 0, {}, Fate.NEW),
        (runs.FINISHED, 5, {}, Fate.MOVED_ASIDE),
        (runs.STOPPED, 5, {"overwrite": True}, Fate.OVERWRITTEN),
        (runs.STOPPED, 5, {"resume": True}, Fate.RESUMED),
        (runs.STOPPED, 5, {}, "unfinished run"),
        (None, 0, {"resume": True}, "Nothing to resume"),
    ],
)
def test_a_preview_says_what_a_start_would_do_and_does_nothing(
    tmp_path: Path, state: str | None, step: int, flags: dict[str, bool], fate: Fate | str
) -> None:
    root = tmp_path / "worker"
    if state is not None:
        prepare(root, planned(CONFIG))
        RunDir(root).update_state(state=state, step=step)
    before = snapshot(tmp_path)
    if isinstance(fate, str):
        with pytest.raises(RunDirError, match=fate) as foretold:
            preview(root, **flags)
        with pytest.raises(RunDirError) as real:
            prepare(root, planned(CONFIG, **flags))
        assert str(foretold.value) == str(real.value)
        return
    found, folder = preview(root, **flags)
    assert found is fate
    assert snapshot(tmp_path) == before
    prepare(root, planned(CONFIG, **flags))
    assert folder.is_dir()
    assert (folder != root) == (fate is Fate.MOVED_ASIDE)


# --- A worker that ends the run, and the server that hears of it -------------------------------------------------


def test_the_server_ends_with_the_sentence_of_the_first_worker_that_refuses(tmp_path: Path) -> None:
    with closing(ServerQueue.open(tmp_path, "run", watch_workers=False)) as server:
        assert server.finished() == []
        refusal.write_refusal(tmp_path, "dev2", RunRefused("rollout_func returned no log-probabilities."))
        with pytest.raises(RunRefused, match=r"^rollout_func returned no log-probabilities\.$"):
            server.finished()


def test_a_resume_asks_the_workers_again(tmp_path: Path) -> None:
    root, config = tmp_path / "worker", tmp_path / "my_trainer.py"
    RunDir(root).update_state(of=prepare(root, planned(config)).run_id, state="failed", step=3)
    refusal.write_refusal(root, "dev1", RunRefused("no"))
    assert refusal.read_refusal(root) == refusal.Refusal("dev1", "no")
    prepare(root, planned(config, resume=True))
    assert refusal.read_refusal(root) is None


def test_a_file_of_others_is_named(tmp_path: Path) -> None:
    (tmp_path / refusal.FILE).write_text('{"worker": 1}')
    with pytest.raises(BadFileError, match=r"refused\.json"):
        refusal.raise_refusal(tmp_path)
