"""What becomes of a version that finds no free slot."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from async_grpo.errors import RunRefused
from async_grpo.setup.generator_choice import HF, VLLM
from async_grpo.training import weight_publisher
from async_grpo.training.weight_publisher import SAY_AFTER_S, WeightPublisher, slots_for, slots_of
from async_grpo_ipc import WeightExporter, open_remote_memory
from async_grpo_ipc.control import MAX_SLOTS
from kit.plans import planned


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
    monkeypatch.setattr(weight_publisher, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_a_version_without_a_slot_is_tried_again_and_told_when_that_lasts(
    clock: SimpleNamespace, warnings: list[str]
) -> None:
    exporter = FakeExporter()
    publication = WeightPublisher(lambda: exporter)  # type: ignore[arg-type,return-value]  # a fake has what is used
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


# --- how many versions there are at a time


def a_model(megabytes: float) -> nn.Module:
    """Half of it frozen."""
    numbers = int(megabytes * 2**20 / 4)
    model = nn.ParameterList([nn.Parameter(torch.empty(numbers, device="meta")) for _ in range(2)])
    model[1].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("megabytes", "max_staleness", "sharing", "slots"),
    [
        (1, 4, 0, 2),  # nothing is read in place
        (1, 4, 1, 3),
        (1, 4, 2, 4),
        (1, 4, 4, 6),
        (1, 4, 40, 6),  # no two of them are further apart than the bound
        (1, 4, None, 6),
        (1, 0, 4, 3),  # all of them have the newest
        (100, 4, 4, 5),
        (257, 4, 4, 3),
        (1, 1000, None, MAX_SLOTS),
    ],
)
def test_there_is_a_slot_for_each_version_that_may_be_held_if_it_is_small(
    megabytes: float, max_staleness: int, sharing: int | None, slots: int
) -> None:
    assert slots_for(a_model(megabytes), max_staleness=max_staleness, sharing=sharing) == slots


@pytest.mark.parametrize(
    ("engine", "options", "slots"),
    [
        (HF, {}, 4),
        (VLLM, {}, 2),
        (VLLM, {"delta_every": 1}, 3),
        (HF, {"master_device": "0", "worker_devices": ("1", "2")}, 2),
        (HF, {"master_device": "0", "worker_devices": ("0", "0"), "weights": "host"}, 2),
        (None, {"workers": 0}, 6),
    ],
    ids=str,
)
def test_workers_that_copy_a_version_get_no_slots_to_read_it_in_place(
    engine: Any, options: dict[str, Any], slots: int
) -> None:
    plan = planned(**{"workers": 2, "max_staleness": 4, **options})
    plan = replace(plan, weights=options.get("weights", "auto"))
    assert slots_of(a_model(1), plan, engine) == slots


def test_every_version_is_published_though_each_worker_holds_another_one(tmp_path: Path) -> None:
    model, workers = nn.Linear(4, 4), 3
    slots = slots_for(model, max_staleness=workers, sharing=workers)
    with WeightExporter.from_model(model, tmp_path / "handle.json", slots=slots) as exporter, ExitStack() as generating:
        for version in range(workers):
            assert exporter.publish(version)
            worker = generating.enter_context(open_remote_memory(tmp_path / "handle.json"))
            assert generating.enter_context(worker.lease()).version == version
        assert all(exporter.publish(version) for version in range(workers, 3 * workers))


def replaces_a_weight(model: nn.Module) -> None:
    model.weight = nn.Parameter(torch.ones(2, 2))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda model: model.bias.requires_grad_(True), "Parameter bias was frozen .* and is trained now"),
        (replaces_a_weight, "weight of the exported model was replaced by another object"),
    ],
)
def test_a_parameter_that_trains_later_is_refused_with_a_way_out(
    change: Callable[[nn.Module], None], found: str, tmp_path: Path
) -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    with WeightExporter.from_model(model, tmp_path / "handle.json") as exporter:
        publication = WeightPublisher(lambda: exporter)
        publication.publish(0)
        change(model)
        with pytest.raises(RunRefused, match=rf"^The model has other .*{found}\. Workers get .*without --distributed"):
            publication.publish(1)
