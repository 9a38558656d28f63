"""How much of the archive of used groups stays, and how slow is told from hung."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from async_grpo.errors import UsageError
from async_grpo.records import WorkerId
from async_grpo.rundir.paths import activity_file
from async_grpo.settings import ArchiveLimit
from async_grpo.telemetry import stalls
from async_grpo.telemetry.activity import LOADING, Activity, read_count
from async_grpo.telemetry.stalls import StallWatch


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("10000", ArchiveLimit(10000)),
        ("0", ArchiveLimit(0)),
        ("2GB", ArchiveLimit(2 * 10**9, in_bytes=True)),
        (" 500 mb ", ArchiveLimit(500 * 10**6, in_bytes=True)),
    ],
)
def test_a_limit_is_read_and_passed_on_as_it_is(text: str, limit: ArchiveLimit) -> None:
    assert ArchiveLimit.parse(text) == limit
    assert ArchiveLimit.parse(str(limit)) == limit


@pytest.mark.parametrize("text", ["", "-1", "1.5GB", "GB", "2 gigabytes", "2GiB"])
def test_no_limit(text: str) -> None:
    with pytest.raises(UsageError, match="--keep-done must be a number of groups or a size"):
        ArchiveLimit.parse(text)


def test_a_size_keeps_the_newest_groups_that_fit(tmp_path: Path) -> None:
    for number in range(6):
        folder = tmp_path / f"{number // 3:05d}"
        folder.mkdir(exist_ok=True)
        (folder / f"{number:010d}.a00_complete").write_bytes(bytes(1000))
    kept = {size: ArchiveLimit(size, in_bytes=True).groups(tmp_path) for size in (0, 999, 2000, 2999, 10**9)}
    assert kept == {0: 0, 999: 0, 2000: 2, 2999: 2, 10**9: 6}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(stalls, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_a_worker_with_a_job_that_does_not_move_is_hung(tmp_path: Path, clock: SimpleNamespace) -> None:
    for name in ("queue", "alive"):
        (tmp_path / name).mkdir()
    watch = StallWatch(tmp_path, WorkerId(1), timeout_s=60.0)

    def hung_after(seconds: float) -> bool:
        clock.now += seconds
        return watch.is_hung()

    assert not hung_after(1000), "it has not even begun: it may be loading a large model"
    worker = Activity()
    worker.publish(tmp_path, "dev1", device="cpu", run_id="x", state=LOADING)
    assert not hung_after(1000), "it has no job: idle"
    claim = tmp_path / "queue" / "0000000001.a00_processing_by_dev1.safetensors"
    claim.touch()
    worker.progress()
    assert not hung_after(59)
    assert not hung_after(59)
    worker.progress()
    assert not hung_after(59), "slow, and not hung"
    assert hung_after(61)
    claim.unlink()
    assert not hung_after(61), "its job is gone"


def test_another_worker_s_job_is_no_sign_of_life_or_death(tmp_path: Path, clock: SimpleNamespace) -> None:
    (tmp_path / "queue").mkdir()
    (tmp_path / "queue" / "0000000001.a00_processing_by_dev11.safetensors").touch()
    watch = StallWatch(tmp_path, WorkerId(1), timeout_s=60.0)
    clock.now += 1000
    assert not watch.is_hung()


def test_a_restarted_worker_goes_on_counting(tmp_path: Path) -> None:
    counts = []
    for _ in range(2):
        worker = Activity()
        worker.publish(tmp_path, "dev1", device="cpu", run_id="x", state=LOADING)
        counts.append(read_count(activity_file(tmp_path, "dev1")))
        worker.progress()
        counts.append(read_count(activity_file(tmp_path, "dev1")))
    assert counts[1] == counts[2], "starting is no progress"
    assert len(set(counts)) == 3
