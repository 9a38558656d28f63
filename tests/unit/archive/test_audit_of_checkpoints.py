"""What the audit concludes from checkpoints: which files were trimmed, and whose states it cannot read."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_grpo.archive import checkpoint_folders
from async_grpo.archive.audit import audit
from async_grpo.archive.rollout_state import FILE_NAME, RolloutState
from async_grpo.errors import BadFileError
from kit.archived_run import RUN, ArchivedRun, save_checkpoint

MANY = 600  # more than a server has open at a time


@pytest.fixture
def run(tmp_path: Path) -> ArchivedRun:
    """Step 1 used `MANY` groups, which its checkpoint has, and whose files were trimmed; group 0 came in later."""
    run = ArchivedRun(tmp_path)
    run.line(step=1, version_used=0, seqs=list(range(1, MANY)), policy_versions=[0] * (MANY - 1))
    state = RolloutState(
        run_id=RUN, step=1, next_seq=MANY, rounds=1, unusable=[], consumed_below=0, consumed=list(range(1, MANY))
    )
    (folder := tmp_path / "outputs" / "checkpoint-1").mkdir(parents=True)
    checkpoint_folders.save(folder, state)
    run.run.update_state(output_dir=str(folder.parent))
    run.use(2, [0])
    return run


def test_a_group_that_was_open_when_later_ones_were_trimmed_may_be_any_number_older(run: ArchivedRun) -> None:
    report = audit(run.root)
    assert report.anomalies == []
    assert report.trimmed == MANY - 1


def test_what_is_gone_while_an_older_group_of_its_batch_is_there_was_not_trimmed(run: ArchivedRun) -> None:
    run.group(300)
    assert audit(run.root).anomalies[0] == "Group 301 was used by step 1, but its file has vanished."


@pytest.mark.parametrize("folder", ["queue", "done", "quarantine"])
def test_a_link_in_the_place_of_a_folder_is_named(run: ArchivedRun, folder: str) -> None:
    (run.root / folder).rename(run.root / "elsewhere")
    (run.root / folder).symlink_to("elsewhere")
    with pytest.raises(BadFileError, match=rf"{run.root / folder} is not a directory"):
        audit(run.root)


@pytest.mark.parametrize(("run_id", "is_told"), [(RUN, True), ("another", False)])
def test_a_state_that_cannot_be_read_is_told_unless_it_says_that_it_is_anothers(
    run: ArchivedRun, run_id: str, is_told: bool, tmp_path: Path
) -> None:
    path = save_checkpoint(tmp_path / "outputs", run_id, 7) / FILE_NAME
    path.write_text(path.read_text().replace('"step": 7', '"step": "7"'))
    told = [text for text in audit(run.root).anomalies if "cannot be used: step is" in text]
    assert len(told) == is_told
