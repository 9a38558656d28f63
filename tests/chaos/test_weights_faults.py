"""Who dies, stops or forks when: what docs/ipc.md promises, with real processes and real signals."""

import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from weights_actors import (
    STEPS,
    Nursery,
    is_torn,
    logged,
    model_of,
    processes_mapping,
    read_log,
    tensors_of,
)

from async_grpo_ipc import ExporterDiedError, WeightExporter, open_remote_memory
from kit.waiting import is_gone, until

ACTORS = ("writer", "pull", "alias", "alias2")


@pytest.fixture(scope="module")
def nursery():
    with Nursery() as nursery:
        yield nursery


@pytest.fixture
def handle(tmp_path: Path) -> Path:
    return tmp_path / "handle.json"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "actor.log"


def kill_loop(nursery: Nursery, handle: Path, kills: int, seed: int) -> dict[str, list[dict[str, Any]]]:
    """A writer without pause and three readers; one of them, by chance, is killed and replaced, `kills`
    times.
    """
    chance = random.Random(seed)
    logs = {name: handle.with_name(f"{name}.log") for name in ACTORS}

    def start(name: str) -> int:
        common = {"path": str(handle), "log": str(logs[name])}
        if name == "writer":
            return nursery.spawn("write_forever", **common)
        return nursery.spawn("read_forever", way=name.rstrip("2"), seed=chance.randrange(2**30), **common)

    running = {name: start(name) for name in ACTORS}
    killed: Counter[str] = Counter()
    for _ in range(kills):
        time.sleep(chance.random() * 0.06)
        name = chance.choice(ACTORS)
        status = nursery.kill(running[name])
        assert status == signal.SIGKILL, f"{name} had ended by itself: {read_log(logs[name])[-1]}"
        killed[name] += 1
        running[name] = start(name)
    for name in ACTORS:
        events_before = len(read_log(logs[name]))
        until(lambda name=name, n=events_before: len(read_log(logs[name])) > n + 3, f"{name} to go on")
    for name in chance.sample(ACTORS, len(ACTORS)):
        assert nursery.kill(running[name]) == signal.SIGKILL
    print(f"seed {seed}: {dict(killed)} killed")
    return {name: read_log(logs[name]) for name in ACTORS}


def check_reads(events: dict[str, list[dict[str, Any]]]) -> None:
    reads = [event for name in ACTORS for event in events[name] if event["kind"] == "read"]
    assert [event for name in ACTORS for event in events[name] if event["kind"] == "failed"] == []
    assert [event for event in reads if event["torn"]] == []
    last: dict[tuple[int, str], int] = {}
    for event in reads:
        reader = (event["pid"], event["generation"])
        assert event["version"] >= last.get(reader, 0), f"{event} after version {last[reader]}"
        last[reader] = event["version"]
    published = sum(event["kind"] == "published" for event in events["writer"])
    waits = sorted(event["waited"] for event in reads)
    print(f"{len(reads)} reads of {published} versions, longest wait {waits[-1]:.3f} s, 0 torn, 0 backwards")
    assert waits[-1] < 10, "a dead holder's lock is free at once; this bound is for a machine with other work"
    generations = {event["generation"] for event in events["writer"] if event["kind"] == "exporter"}
    for generation in generations:
        assert processes_mapping(generation) == [], f"memory of generation {generation} is left behind"


@pytest.mark.parametrize(
    ("kills", "seed"),
    [(40, 1), pytest.param(500, 20, marks=pytest.mark.slow), pytest.param(500, 21, marks=pytest.mark.slow)],
)
def test_random_kills_tear_nothing_and_leak_nothing(nursery, handle, kills, seed):
    check_reads(kill_loop(nursery, handle, kills, seed))


@pytest.mark.parametrize(
    ("step", "when"), [*((step, when) for step in STEPS for when in ("before", "after")), ("copy", "middle")]
)
def test_writer_killed_at_any_step_leaves_a_whole_version(nursery, handle, log, step, when):
    writer = nursery.spawn("write_and_die", path=str(handle), log=str(log), step=step, when=when)
    generation = until(lambda: logged(log, "published"), "version 1")[0]["generation"]
    model = model_of({name: torch.zeros_like(tensor) for name, tensor in tensors_of(0).items()})
    with open_remote_memory(handle) as remote:
        assert remote.pull(model) == 1
        Path(f"{log}.go").touch()
        assert nursery.wait(writer) == signal.SIGKILL
        marked = step in ("release", "announce") or (step, when) == ("mark READY", "after")
        expected = 2 if marked else 1
        assert not remote.exporter_alive()
        assert remote.version == expected
        with remote.lease() as view:
            assert view.version == expected
            assert not is_torn(dict(view.items()), expected)
        assert remote.pull(model) == expected
        with pytest.raises(ExporterDiedError, match=r"exporter \(pid \d+\) has ended"):
            open_remote_memory(handle)
        with WeightExporter.from_tensors(tensors_of(7), handle) as successor:
            assert remote.exporter_alive()
            successor.publish(7)
            assert remote.pull(model) == 7
    assert processes_mapping(generation) == []


def test_stopped_reader_blocks_its_slot_and_nothing_else(nursery, handle, log, caplog):
    with WeightExporter.from_tensors(tensors_of(1), handle) as exporter:
        exporter.publish(1)
        reader = nursery.spawn("hold_a_lease", path=str(handle), log=str(log))
        until(lambda: logged(log, "held"), "the reader's lease")
        nursery.signal(reader, signal.SIGSTOP)
        assert exporter.publish(2), "the other slot is free"
        assert not exporter.publish(3)
        assert not exporter.publish(3)
        assert exporter.skipped == 2
        assert f"pids [{reader}]" in caplog.text
        nursery.kill(reader)
        assert exporter.publish(3), "its death frees the lease at once"


def test_forked_child_does_not_keep_its_parents_lease(nursery, handle, log):
    with WeightExporter.from_tensors(tensors_of(1), handle, slots=1) as exporter:
        exporter.publish(1)
        reader = nursery.spawn("hold_a_lease", path=str(handle), log=str(log), fork_a_child=True)
        until(lambda: logged(log, "held") and logged(log, "child"), "the reader and its child")
        assert "Open the handle again in this process" in logged(log, "child")[0]["error"]
        assert not exporter.publish(2)
        nursery.kill(reader)
        child = logged(log, "child")[0]["pid"]
        assert Path(f"/proc/{child}").exists()
        assert exporter.publish(2)
        Path(f"{log}.stop").touch()
        until(lambda: is_gone(child), "the child's end")


def test_forked_child_does_not_keep_its_parents_exporter_alive(nursery, handle, log):
    exporter = nursery.spawn("export_and_fork", path=str(handle), log=str(log))
    child = until(lambda: logged(log, "child"), "the exporter's child")[0]["pid"]
    with open_remote_memory(handle) as remote:
        assert remote.exporter_alive()
        nursery.kill(exporter)
        assert Path(f"/proc/{child}").exists()
        assert not remote.exporter_alive()
        with WeightExporter.from_tensors(tensors_of(2), handle) as successor:
            successor.publish(2)
            assert remote.version == 2
    Path(f"{log}.stop").touch()


@pytest.mark.parametrize("order", ["writer first", "reader first"])
def test_memory_goes_with_the_last_process_in_either_order(nursery, handle, log, order):
    writer = nursery.spawn("write_forever", path=str(handle), log=str(log), pause_s=0.01)
    held = log.with_name("reader.log")
    reader = nursery.spawn("hold_a_lease", path=str(handle), log=str(held))
    generation = until(lambda: logged(held, "held"), "the reader's lease")[0]["generation"]
    first, second = (writer, reader) if order == "writer first" else (reader, writer)
    assert sorted(processes_mapping(generation)) == sorted([writer, reader])
    nursery.kill(first)
    assert processes_mapping(generation) == [second]
    nursery.kill(second)
    assert processes_mapping(generation) == []
