"""Tasks that need others, share places by bytes, or take several of them."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Self

import pytest
from slots_yard import Yard

from async_grpo.errors import UsageError
from async_grpo.launch.supervisor import Child, Exit, Exits
from async_grpo_experiments.slots.ledger import BLOCKED, FAILED, FINISHED, Ledger, read
from async_grpo_experiments.slots.places import Need, Packing, Place
from async_grpo_experiments.slots.schedule import OUT_OF_MEMORY, PATIENCE, Command, Task, TaskSchedule

ONLY = [Place(name="only")]


class Simulation:
    """A starter without processes: each look ends the child that ends next. A task's command is its duration."""

    def __init__(self, *, say: Callable[[str], None], look: Callable[[], None]) -> None:
        self.exits: dict[str, Exit] = {}
        self._look, self._stopping = look, False
        self._ends: dict[str, float] = {}
        self.now = 0.0
        self.order: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._look()

    def add(self, child: Child) -> int:
        self._ends[child.name] = self.now + float(child.command[-1])
        self.order.append(child.name)
        return 0

    def forget(self, name: str) -> None:
        del self.exits[name]

    def stop(self) -> None:
        self._stopping = True

    def hurry(self) -> None:
        return None

    def run_until(self, first_exit: Callable[[Exits], bool]) -> Exits:
        while not self._stopping and not first_exit(self.exits):
            self._look()
            if self._ends:
                name = min(self._ends, key=self._ends.__getitem__)
                self.now = self._ends.pop(name)
                self.exits[name] = Exit(0, 0, 1)
        return self.exits


class Simulated:
    """Runs tasks in a simulation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.starter: Simulation

    def task(self, name: str, seconds: float = 1.0, **more: Any) -> Task:
        command = Command([str(seconds)], os.environ, self.folder / f"{name}.log")
        return Task(name=name, command=lambda place: command, **more)

    def run(self, tasks: list[Task], places: list[Place]) -> list[str]:
        def opened(**surroundings: Any) -> Simulation:
            self.starter = Simulation(**surroundings)
            return self.starter

        with closing(Ledger(self.folder / "slots.jsonl")) as ledger:
            TaskSchedule(tasks, places, ledger, say=lambda text: None, open_starter=opened).run()
        return self.starter.order


@pytest.fixture
def simulated(tmp_path: Path) -> Simulated:
    return Simulated(tmp_path)


def test_a_task_starts_after_those_that_it_needs_whatever_its_priority(simulated: Simulated) -> None:
    tasks = [
        simulated.task("b", priority=9.0, needs=("a",)),
        simulated.task("a"),
        simulated.task("c", priority=99.0, needs=("a", "b")),
        simulated.task("d", priority=5.0),
    ]
    assert simulated.run(tasks, ONLY) == ["d", "a", "b", "c"]


def test_what_needs_a_failed_task_is_blocked_and_the_rest_goes_on(yard: Yard) -> None:
    needing = [yard.task("r2", "true", needs=("r1",)), yard.task("r3", "true", needs=("r2",))]
    others = [*needing, yard.task("other", "true"), yard.task("o2", "true")]
    records = yard.schedule(yard.task("r1", "exit 3"), *others, places=ONLY).run()
    states = {name: record.state for name, record in records.items()}
    assert states == {"r1": FAILED, "r2": BLOCKED, "r3": BLOCKED, "other": FINISHED, "o2": FINISHED}
    assert records["r3"].why == "r1 failed"
    assert "r1 failed, so these will not start: r2, r3" in yard.said
    again = yard.schedule(yard.task("r1", "true"), *others, places=ONLY).run()
    assert {record.state for record in again.values()} == {FINISHED}


def test_an_unknown_need_is_refused(simulated: Simulated) -> None:
    with pytest.raises(UsageError, match="b needs a, and there is no such task"):
        simulated.run([simulated.task("b", needs=("a",))], ONLY)


def test_tasks_share_a_place_up_to_its_bytes_and_the_fullest_one_is_filled_first() -> None:
    packing = Packing([Place(name="x", bytes=10), Place(name="y", bytes=10)])

    def took(task: str, nbytes: int | None, gpus: int = 1) -> str | None:
        place = packing.take(task, Need(bytes=nbytes, gpus=gpus))
        return place.name if place else None

    assert [took("a", 6), took("b", 5), took("c", 4), took("d", 6)] == ["x", "y", "x", None]
    assert took("alone", None) is None
    packing.give_back("b")
    assert packing.idle() == 1
    assert took("alone", None) == "y"
    assert took("e", 1) is None  # x is full, y is another's alone
    for task in ("a", "c", "alone"):
        packing.give_back(task)
    assert took("two", None, gpus=2) == "x+y"
    assert took("f", 1) is None
    packing.give_back("two")
    assert packing.idle() == 2


def test_what_no_place_can_take_is_refused_at_the_start(simulated: Simulated) -> None:
    places = [Place(name="x", bytes=4 * 10**9)]
    with pytest.raises(UsageError, match=r"big needs 5\.0 GB, and the largest place has 4\.0 GB"):
        simulated.run([simulated.task("big", need=Need(bytes=5 * 10**9))], places)
    with pytest.raises(UsageError, match="two needs 2 places at once, and there are 1"):
        simulated.run([simulated.task("two", need=Need(gpus=2))], places)


@pytest.mark.parametrize(
    ("each", "most", "places"),
    [
        (Need(bytes=4), Need(bytes=10), [Place(name="x", bytes=10)]),
        (Need(), Need(gpus=2), [Place(name="x"), Place(name="y")]),
    ],
)
def test_a_large_task_is_overtaken_a_few_times_only(
    simulated: Simulated, each: Need, most: Need, places: list[Place]
) -> None:
    small = [simulated.task(f"s{n}", 1.0 + n / 100, need=each) for n in range(40)]
    large = simulated.task("large", need=most)
    order = simulated.run([*small[:2], large, *small[2:]], places)
    assert order.index("large") == 2 + PATIENCE


def test_a_task_that_spreads_takes_the_places_that_nothing_else_waits_for() -> None:
    packing = Packing([Place(name=str(n)) for n in range(8)])
    spreads, one, two = Need(spreads=True), Need(), Need(gpus=2)
    others = ([], [one, two], [spreads, two], [two] * 4)
    assert [packing.spread(spreads, [spreads, *wait]).gpus for wait in others] == [8, 5, 3, 1]
    assert packing.spread(two, [spreads, two]) == two


def test_packing_by_bytes_wastes_little(simulated: Simulated) -> None:
    """40 tasks of .1 to .8 of a place: the longest first, into the fullest place that has room."""
    draw, factors = random.Random(0), []
    for number in range(20):
        wanted = [(draw.randrange(10, 81), draw.uniform(1, 8)) for _ in range(40)]
        tasks = [
            simulated.task(f"{number}_{index}", seconds, need=Need(bytes=nbytes), expected_s=seconds)
            for index, (nbytes, seconds) in enumerate(wanted)
        ]
        simulated.run(tasks, [Place(name=str(n), bytes=100) for n in range(2)])
        bound = max(sum(nbytes * seconds for nbytes, seconds in wanted) / 200, max(s for _, s in wanted))
        factors.append(simulated.starter.now / bound)
    assert sum(factors) / len(factors) <= 1.35
    assert max(factors) <= 1.55


def test_out_of_memory_beside_others_is_tried_again_alone(yard: Yard) -> None:
    script = f"echo x >> {yard.folder}/starts; exit {OUT_OF_MEMORY}"
    record = yard.alone(yard.task("a", script, need=Need(bytes=1), peak_bytes=lambda: 7), bytes=9)
    assert (record.state, record.peak_bytes) == (FAILED, 7)
    assert len((yard.folder / "starts").read_text().split()) == 2
    assert any("it gets a place alone" in one for one in yard.said)
    assert read(yard.folder / "slots.jsonl") == {"a": record}


@pytest.mark.parametrize(
    ("script", "more", "why"),
    [
        (f"exit {OUT_OF_MEMORY}", {}, "out of memory alone on x: set batch_size=2"),
        ("exit 1", {"ran_out": lambda: True}, "out of memory alone on x: set batch_size=2"),
        ("exit 1", {}, "exit code 1: it wrote nothing"),
    ],
)
def test_out_of_memory_alone_says_what_would_help(yard: Yard, script: str, more: dict[str, Any], why: str) -> None:
    task = yard.task("a", script, way_out=lambda place: f"{place.name}: set batch_size=2", **more)
    assert yard.alone(task).why == why


def test_a_task_that_the_kernel_kills_for_lack_of_memory_was_out_of_memory(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("async_grpo.launch.host_memory._kills_of_our_group", iter(range(9)).__next__)
    task = yard.task("a", "kill -9 $$", need=Need(bytes=1), way_out=lambda place: place.name)
    assert yard.alone(task, bytes=9).why == "out of memory alone on x"
    assert any("it gets a place alone" in one for one in yard.said)


def test_a_task_is_killed_at_its_deadline(yard: Yard) -> None:
    record = yard.alone(yard.task("a", "exec sleep 1000", deadline_s=0.05))
    assert (record.state, record.code) == (FAILED, -signal.SIGKILL)
    assert "killing a: it has taken 0.05 s, its deadline" in yard.said
    assert record.why == "it has taken 0.05 s, its deadline"


def test_a_task_whose_log_says_nothing_new_is_killed_and_says_so(yard: Yard) -> None:
    (yard.folder / "a.log").write_text("words of an earlier attempt")
    record = yard.alone(yard.task("a", "echo hello; sleep 1000", silence_s=0.05))
    assert (record.state, record.code, record.why) == (FAILED, -9, "its log has said nothing for 0.05 s")
    assert "killing a: its log has said nothing for 0.05 s" in yard.said
