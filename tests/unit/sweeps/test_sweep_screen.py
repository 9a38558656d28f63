"""What the terminal shows of a sweep, and what the runs use."""

from __future__ import annotations

import functools
import io
import os
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console
from sweep_yard import SweepYard

from async_grpo_experiments.slots import gpu_usage
from async_grpo_experiments.slots.foreground import QueueScreen
from async_grpo_experiments.slots.ledger import FAILED, RUNNING, Record
from async_grpo_experiments.slots.places import Place
from async_grpo_experiments.sweeps.plan import Sweep
from async_grpo_experiments.sweeps.run_progress import COLUMNS, RunRows
from kit.waiting import until

OF_NOTHING = RunRows(Sweep(setup="", seeds=(), name="x"), {}, [])


def screen_of(sweep: Sweep, records: dict[str, Record], *places: Place) -> QueueScreen:
    rows = RunRows(sweep, records, places)
    return QueueScreen("sweep", COLUMNS, rows, rows.in_words)


def test_a_table_has_a_row_for_each_run(yard: SweepYard) -> None:
    wanted = yard.sweep(1, 2, 3)
    assert yard.run(yard.sweep(1)) == 0
    one, two, _ = [run.name for run in wanted.runs]
    running = Record(task=one, state=RUNNING, place="core0", pid=os.getpid())
    records = {one: running, two: Record(task=two, state=FAILED, place="core1")}
    drawn = io.StringIO()
    Console(file=drawn, width=100).print(screen_of(wanted, records, Place(name="core0", cores=(0,))).table())
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in drawn.getvalue().splitlines()]
    rows = {row[0]: row for row in cells if row[0].isdecimal()}
    assert rows["1"][:5] == ["1", "core0", "finished", "5", "0.500"]
    assert rows["2"][:3] == ["2", "core1", "failed"]
    assert rows["3"][:3] == ["3", "", "waiting"]


def test_a_line_a_minute_where_there_is_no_terminal(yard: SweepYard, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = yard.sweep(1, 2)
    assert yard.run(yard.sweep(1)) == 0
    name = wanted.runs[0].name
    screen = screen_of(wanted, {name: Record(task=name, state="finished")})
    capsys.readouterr()
    with screen:
        screen.look()
        assert capsys.readouterr().out == ""  # not before a minute is over
        screen._next_look = 0.0
        for _ in range(2):
            screen.look()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("seed 1: finished, step 5, reward 0.500 | seed 2: waiting")


def test_cores_are_counted_between_two_looks() -> None:
    assert OF_NOTHING.use([os.getpid()], ()) == ""
    until(lambda: OF_NOTHING.use([os.getpid()], ()).endswith(" cores"))


class FakeDriver:
    """The functions of pynvml that we call: three GPUs, one of which does not report its use."""

    class NVMLError(Exception): ...

    def __init__(self, *, there: bool) -> None:
        self.there = there

    def nvmlInit(self) -> None:
        if not self.there:
            raise self.NVMLError

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return ["GPU-a", "GPU-b", "GPU-c"][index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        if handle == "GPU-c":
            raise self.NVMLError("not supported")
        return SimpleNamespace(gpu={"GPU-a": 90, "GPU-b": 40}[handle])


@pytest.mark.parametrize(
    ("visible", "gpus", "shown", "there"),
    [
        ("GPU-b,GPU-a", ["0"], "GPU 40%", True),
        ("GPU-b,GPU-a", ["0", "1"], "GPU 65%", True),
        ("", ["0", "2"], "GPU 90%", True),
        ("", ["2"], "", True),
        ("", ["0"], "", False),
    ],
)
def test_the_use_of_gpus_comes_from_the_driver(
    monkeypatch: pytest.MonkeyPatch, visible: str, gpus: list[str], shown: str, there: bool
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(gpu_usage, "_driver", functools.cache(gpu_usage._driver.__wrapped__))
    monkeypatch.setitem(sys.modules, "pynvml", FakeDriver(there=there))
    assert OF_NOTHING.use((), gpus) == shown
