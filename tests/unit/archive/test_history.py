"""The record of what each step used: what a resume goes on from, and what a power cut leaves of it."""

from __future__ import annotations

from pathlib import Path

from async_grpo.archive.history import ConsumptionRecord, UsedBatch, final_history


def _batch(*seqs: int, version: int) -> UsedBatch:
    return UsedBatch(version_used=version, seqs=list(seqs), policy_versions=[version] * len(seqs))


def _record(path: Path, resumed_from: int | None) -> ConsumptionRecord:
    return ConsumptionRecord(path, run_id="r", resumed_from=resumed_from, max_staleness=4)


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
    assert list(final_history(path)) == [(1, _batch(0, 1, version=0)), (2, _batch(3, 2, version=1))]


def test_half_a_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "consumed.jsonl"
    first = _record(path, None)
    first.used(1, [_batch(0, 1, version=0)])
    first.sync()
    first.used(2, [_batch(2, 3, version=1)])
    first.close()
    path.write_bytes(path.read_bytes()[:-20])
    _record(path, 1).close()
    assert list(final_history(path)) == [(1, _batch(0, 1, version=0))]
    assert path.read_text().count("\n") == 3
