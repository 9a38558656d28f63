"""Who dies, stops or forks when: what docs/ipc.md promises, with real processes and real signals."""

import signal
from pathlib import Path

import pytest
import torch
from weights_actors import (
    STEPS,
    Nursery,
    is_torn,
    logged,
    model_of,
    processes_mapping,
    tensors_of,
)
from weights_kill_loop import check_reads, kill_loop

from async_grpo_ipc import ExporterDiedError, WeightExporter, open_remote_memory
from kit.waiting import is_gone, until


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
