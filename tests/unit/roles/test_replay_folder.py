"""A replay writes into a folder of its own: nothing that is there is ever replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_grpo.errors import RunDirError, UsageError
from async_grpo.roles.replay import ReplayOptions, made, run_replay
from kit.archived_run import ArchivedRun


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put(path: str, content: str = "of the run") -> Path:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)
    return file


@pytest.mark.parametrize(
    ("folder", "says"),
    [
        ("outputs/checkpoint-8", "has files in it"),  # the weights of the run's only checkpoint were replaced
        ("worker", "has files in it"),  # its metrics.jsonl was displaced
        ("outputs", "has files in it"),
        ("outputs/checkpoint-9", "name of a checkpoint"),
        ("outputs/checkpoint-8/replay", "which is a run's"),
        ("worker/replay", "which is a run's"),
        ("a_file", "is no folder"),
        ("dangling", "is no folder"),
    ],
)
def test_a_folder_in_use_is_refused_and_stays(folder: str, says: str) -> None:
    files = [put("outputs/checkpoint-8/model.safetensors"), put("worker/run.json"), put("a_file")]
    Path("dangling").symlink_to("nowhere")
    before = sorted(Path().rglob("*"))
    with pytest.raises(UsageError, match=says), made(Path(folder)):
        pytest.fail("it was given out")
    assert [file.read_text() for file in files] == ["of the run"] * 3
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize("folder", ["new/folder", "empty", "linked"])
def test_a_new_or_empty_folder_is_taken(folder: str) -> None:
    Path("empty").mkdir()
    Path("elsewhere").mkdir()
    Path("linked").symlink_to("elsewhere")
    with made(Path(folder)) as taken:
        (taken / "model.safetensors").write_text("replayed")
    assert (Path(folder) / "model.safetensors").read_text() == "replayed"


def test_each_default_replay_has_a_number_of_its_own() -> None:
    taken = []
    for _ in range(3):
        with made(None) as folder:
            put(str(folder / "metrics.jsonl"), folder.name)
            taken.append(folder)
    assert taken == [Path("outputs/replay-1"), Path("outputs/replay-2"), Path("outputs/replay-3")]
    assert [(folder / "metrics.jsonl").read_text() for folder in taken] == ["replay-1", "replay-2", "replay-3"]


@pytest.mark.parametrize("named", [None, Path("mine")])
def test_a_replay_that_wrote_nothing_leaves_no_folder(named: Path | None) -> None:
    with pytest.raises(KeyboardInterrupt), made(named) as folder:
        raise KeyboardInterrupt
    assert not folder.exists()


def test_the_run_itself_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    """Its setup file does not exist: building the trainer would say so."""
    run = ArchivedRun(tmp_path)
    run.use(1, [0, 1])
    metrics = run.run.metrics.read_text()
    with pytest.raises(UsageError, match="has files in it"):
        run_replay(ReplayOptions(run_dir=run.root, output_dir=run.root))
    assert run.run.metrics.read_text() == metrics


def test_a_run_whose_audit_is_not_clean_is_not_replayed(tmp_path: Path) -> None:
    run = ArchivedRun(tmp_path)
    run.use(1, [0, 1])
    run.use(2, [1, 2])
    with pytest.raises(RunDirError, match=r"its audit is not clean: Group 1 was used 2 times.*async-grpo audit"):
        run_replay(ReplayOptions(run_dir=run.root))
    assert not Path("outputs").exists()
