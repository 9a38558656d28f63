"""What becomes of a version that finds no free slot."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from loguru import logger

from async_grpo.training import weight_publication
from async_grpo.training.weight_publication import SAY_AFTER_S, WeightPublication


class FakeExporter:
    """Publishes while `free`."""

    free = True
    version: int | None = None

    def publish(self, version: int) -> bool:
        if self.free:
            self.version = version
        return self.free


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(weight_publication, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(message.record["message"]), level="WARNING")
    yield lines
    logger.remove(sink)


def test_a_version_without_a_slot_is_tried_again_and_told_when_that_lasts(
    clock: SimpleNamespace, warnings: list[str]
) -> None:
    exporter = FakeExporter()
    publication = WeightPublication(lambda: exporter)  # type: ignore[arg-type,return-value]  # a fake has what is used
    publication.publish(0)
    exporter.free = False
    publication.publish(1)
    clock.now += SAY_AFTER_S - 1
    publication.publish(2)
    assert (publication.version, warnings) == (0, [])
    clock.now += 1
    publication.retry()
    publication.retry()
    [warning] = warnings
    assert warning.startswith("for 10 s no new version of the weights could be published")
    assert "--groups-per-claim 1" in warning
    exporter.free = True
    publication.retry()
    assert publication.version == 2, "the newest of those that were due"
    exporter.free = False
    publication.publish(3)
    assert len(warnings) == 1, "another wait begins"
