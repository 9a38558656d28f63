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

from async_grpo_experiments.slots import gpu_driver
from async_grpo_experiments.slots.ledger import FAILED, RUNNING, Record
from async_grpo_experiments.slots.places import Place
from async_grpo_experiments.sweeps.screen import SweepScreen, Usage, table


def test_a_table_has_a_row_for_each_run(yard: SweepYard) -> None:
    wanted = yard.sweep(1, 2, 3)
    assert yard.run(yard.sweep(1)) == 0
    names = [run.name for run in wanted.runs]
    records = {
        names[0]: Record(task=names[0], state=RUNNING, place="core0", pid=os.getpid()),
        names[1]: Record(task=names[1], state=FAILED, place="core1"),
    }
    screen = SweepScreen(wanted, records, [Place(name="core0", cores=(0,))])
    drawn = io.StringIO()
    Console(file=drawn, width=100).print(table(screen.rows()))
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in drawn.getvalue().splitlines()]
    rows = {row[0]: row for row in cells if row[0].isdecimal()}
    assert rows["1"][:5] == ["1", "core0", "finished", "5", "0.500"]
    assert rows["2"][:3] == ["2", "core1", "failed"]
    assert rows["3"][:3] == ["3", "", "waiting"]


def test_a_line_a_minute_where_there_is_no_terminal(yard: SweepYard, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = yard.sweep(1, 2)
    assert yard.run(yard.sweep(1)) == 0
    name = wanted.runs[0].name
    screen = SweepScreen(wanted, {name: Record(task=name, state="finished")}, [])
    capsys.readouterr()
    with screen:
        screen.look()
        assert capsys.readouterr().out == ""  # not before a minute is over
        screen._next_look = 0.0
        screen.look()
        screen.look()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("seed 1: finished, step 5, reward 0.500 | seed 2: waiting")


def test_cores_are_counted_between_two_looks() -> None:
    times = iter([0.0, 1e-9])
    used = Usage(now=lambda: next(times))
    assert used.of("run", [os.getpid()], ()) == ""
    assert used.of("run", [os.getpid()], ()).endswith(" cores")


class FakeDriver:
    """The functions of pynvml that we call: three GPUs, one of which does not report its use."""

    class NVMLError(Exception): ...

    def __init__(self, *, there: bool = True) -> None:
        self.there = there

    def nvmlInit(self) -> None:
        if not self.there:
            raise self.NVMLError("no library")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return ["GPU-a", "GPU-b", "GPU-c"][index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        if handle == "GPU-c":
            raise self.NVMLError("not supported")
        return SimpleNamespace(gpu={"GPU-a": 90, "GPU-b": 40}[handle])


@pytest.mark.parametrize(
    ("visible", "gpus", "shown"),
    [
        ("GPU-b,GPU-a", ["0"], "GPU 40%"),
        ("GPU-b,GPU-a", ["0", "1"], "GPU 65%"),
        ("", ["0", "2"], "GPU 90%"),
        ("", ["2"], ""),
    ],
)
def test_the_use_of_gpus_comes_from_the_driver(
    monkeypatch: pytest.MonkeyPatch, visible: str, gpus: list[str], shown: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(gpu_driver, "_driver", functools.cache(gpu_driver._driver.__wrapped__))
    monkeypatch.setitem(sys.modules, "pynvml", FakeDriver())
    assert Usage().of("run", (), gpus) == shown


def test_without_a_driver_nothing_is_said_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_driver, "_driver", functools.cache(gpu_driver._driver.__wrapped__))
    monkeypatch.setitem(sys.modules, "pynvml", FakeDriver(there=False))
    assert Usage().of("run", (), ["0"]) == ""
