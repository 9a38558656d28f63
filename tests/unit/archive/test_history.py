"""The record of what each step used: what a resume continues from, and what a power cut leaves of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_grpo.archive.history import ConsumptionRecord, Used, UsedBatch, final_history, parse_entry, read_record
from async_grpo.errors import BadFileError


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
    assert [line.partition(" is broken: ")[0] for line in broken] == [
        f"Line {number} of consumed.jsonl" for number in (1, 2, 3, 5, 6)
    ]
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
