"""Tasks run in places: who waits, who starts, what is remembered, and that nothing is left behind. Children sleep."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from slots_yard import Yard

from async_grpo.errors import AsyncGRPOError, UsageError, reason_of
from async_grpo_experiments.slots import held, ledger
from async_grpo_experiments.slots.places import Place, core_places, gpu_places
from async_grpo_experiments.slots.schedule import Command, Task
from kit.waiting import DEADLINE_S, is_gone

HELD = held.__file__
ONLY = [Place(name="only")]
DEAF = "trap '' TERM; echo deaf; while :; do sleep 0.05; done"
POLITE = "echo polite; exec sleep 1000"


def test_more_tasks_than_places_wait_and_the_longest_start_first(yard: Yard) -> None:
    seconds = {"short": 1.0, "long": 9.0, "unknown": None, "middle": 5.0}
    tasks = [yard.task(name, f"echo {name} >> {yard.folder}/order", expected_s=it) for name, it in seconds.items()]
    records = yard.schedule(*tasks, places=ONLY).run()
    assert (yard.folder / "order").read_text().split() == ["unknown", "long", "middle", "short"]
    assert {record.state for record in records.values()} == {ledger.FINISHED}
    assert {record.place for record in records.values()} == {"only"}


def test_a_place_has_one_task_at_a_time(yard: Yard) -> None:
    busy = f"mkdir {yard.folder}/at_$PLACE && sleep 0.02 && rmdir {yard.folder}/at_$PLACE"
    records = yard.schedule(*(yard.task(str(number), busy) for number in range(8))).run()
    assert {record.state for record in records.values()} == {ledger.FINISHED}


def test_a_task_that_fails_ends_none_other_and_its_last_words_are_kept(yard: Yard) -> None:
    records = yard.schedule(yard.task("good", "sleep 0.1"), yard.task("bad", "echo error: no luck >&2; exit 3")).run()
    assert (records["good"].state, records["bad"].state, records["bad"].code) == (ledger.FINISHED, ledger.FAILED, 3)
    assert records["bad"].why == "exit code 3: error: no luck"
    assert records["bad"].last_words == "error: no luck"
    assert ledger.read(yard.folder / "slots.jsonl") == records


def test_the_reason_that_a_task_has_written_is_shown_and_not_its_last_line(yard: Yard) -> None:
    script = "echo error: no luck; echo to continue the run: train --resume; exit 1"
    records = yard.schedule(yard.task("bad", script, reason=lambda: "RuntimeError: no luck")).run()
    assert records["bad"].why == "exit code 1: RuntimeError: no luck"


def test_a_reason_is_one_line() -> None:
    try:
        raise RuntimeError("no\njudge")
    except RuntimeError as error:
        assert reason_of(error) == "RuntimeError: no judge"
        quoting = AsyncGRPOError(f"All groups failed:\n{''.join(traceback.format_exception(error))}")
    assert reason_of(quoting) == "All groups failed: judge"


def test_a_task_whose_log_cannot_be_opened_fails_alone(yard: Yard) -> None:
    (yard.folder / "stuck.log").mkdir()
    records = yard.schedule(yard.task("stuck", "true"), yard.task("good", "true"), places=ONLY).run()
    assert (records["stuck"].state, records["good"].state) == (ledger.FAILED, ledger.FINISHED)
    assert "stuck.log" in records["stuck"].why


def test_a_command_that_does_not_exist_is_said_by_name(yard: Yard) -> None:
    command = Command(["no-such-program"], os.environ, yard.folder / "lost.log")
    records = yard.schedule(Task(name="lost", command=lambda place: command)).run()
    assert records["lost"].why == "exit code 1: error: no-such-program cannot be started: No such file or directory"


def test_a_second_queue_on_the_ledger_does_not_start_again_what_has_finished(yard: Yard) -> None:
    script = f"echo x >> {yard.folder}/starts; test -e {yard.folder}/mended"
    done = yard.task("done", f"echo x >> {yard.folder}/starts")
    yard.schedule(done, yard.task("broken", script), places=ONLY).run()
    (yard.folder / "mended").touch()
    records = yard.schedule(done, yard.task("broken", script)).run()
    assert {record.state for record in records.values()} == {ledger.FINISHED}
    assert len((yard.folder / "starts").read_text().split()) == 3


def test_a_stop_asks_and_a_second_one_kills(yard: Yard) -> None:
    def look() -> None:
        if yard.wrote("deaf") or schedule.stopping:
            schedule.stop()  # while it ends, a second time

    deaf, polite = yard.task("deaf", DEAF, grace_s=1000.0), yard.task("polite", "sleep 1000")
    schedule = yard.schedule(deaf, polite, yard.task("never", "touch never"), look=look)
    records = schedule.run()
    states = {"deaf": ledger.STOPPED, "polite": ledger.STOPPED, "never": ledger.WAITING}
    assert {name: record.state for name, record in records.items()} == states
    assert records["deaf"].code == -signal.SIGKILL


def test_starts_are_staggered(yard: Yard) -> None:
    starts: list[float] = []

    def command(place: Place) -> Command:
        starts.append(time.monotonic())
        return Command(["true"], os.environ, yard.folder / "log")

    yard.schedule(*(Task(name=str(number), command=command) for number in range(3)), stagger_s=0.1).run()
    assert starts[1] - starts[0] >= 0.1 and starts[2] - starts[1] >= 0.1


@contextmanager
def left_over(command: str) -> Iterator[subprocess.Popen[str]]:
    """A process of a killed queue, of which the shell has said something."""
    process = subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


def record_of(process: subprocess.Popen[str], later_s: float = 0.0) -> ledger.Record:
    born = ledger.born(process.pid) - later_s
    return ledger.Record(task=str(process.pid), state=ledger.RUNNING, pid=process.pid, born=born)


def test_what_a_killed_queue_has_left_is_ended_by_its_pid(yard: Yard) -> None:
    with left_over(DEAF) as deaf, left_over(POLITE) as polite:
        ledger.end_leftovers([record_of(deaf), record_of(polite)], grace_s=0.1, say=yard.said.append)
        assert (deaf.poll(), polite.poll()) == (-signal.SIGKILL, -signal.SIGTERM)
        assert f"killing pid {deaf.pid}: it did not end in 0.1 s" in yard.said


def test_what_a_left_process_has_started_and_does_not_end_is_killed_with_it(yard: Yard) -> None:
    """A server that goes on would hold the run's folder, and the resumed run could not start."""
    with left_over(f"({DEAF}) & wait") as launcher:
        servers = psutil.Process(launcher.pid).children(recursive=True)
        try:
            ledger.end_leftovers([record_of(launcher)], grace_s=0.1, say=yard.said.append)
            assert servers and all(map(is_gone, servers))
        finally:
            for server in servers:
                with suppress(psutil.NoSuchProcess):
                    server.kill()


def test_a_task_ends_with_the_process_that_runs_the_queue(yard: Yard) -> None:
    """`held.py` asks the kernel for it. The parent here is a shell that is killed."""
    held = [sys.executable, "-I", "-S", str(HELD), "$$", "all", "sh", "-c", "'echo $$; exec sleep 1000'"]
    shell = subprocess.Popen(["sh", "-c", f"{' '.join(held)} & wait"], stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(shell.stdout.readline()))
    shell.kill()
    shell.communicate()
    assert not psutil.wait_procs([child], timeout=DEADLINE_S)[1]


def test_a_process_that_only_has_the_pid_of_a_task_is_left_alone(yard: Yard) -> None:
    with left_over(POLITE) as stranger:
        ledger.end_leftovers([record_of(stranger, later_s=5)], grace_s=0.1, say=yard.said.append)
        assert stranger.poll() is None and not yard.said


def test_a_clock_that_was_set_makes_no_stranger_of_what_a_killed_queue_has_left(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    with left_over(POLITE) as left:
        record, booted = record_of(left), psutil.boot_time()
        monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: booted + 1)
        ledger.end_leftovers([record], grace_s=10.0, say=yard.said.append)
        assert left.poll() is not None


def test_many_tasks_leave_no_descriptors_and_no_processes(yard: Yard) -> None:
    me = psutil.Process()
    before, children = me.num_fds(), set(me.children())
    schedule = yard.schedule(*(yard.task(str(number), "true") for number in range(40)), places=core_places(8, [0]))
    records = schedule.run()
    assert len(records) == 40 and {record.state for record in records.values()} == {ledger.FINISHED}
    assert me.num_fds() <= before + 1  # the ledger's own
    assert set(me.children()) <= children
    assert not schedule._starter._processes and not schedule._starter.exits


def test_places_of_gpus_are_those_that_there_are() -> None:
    assert [place.gpus for place in gpu_places(8, each=2)] == [("0", "1"), ("2", "3"), ("4", "5"), ("6", "7")]
    assert [place.name for place in gpu_places(8, each=2, first=4, at_most=1)] == ["gpu4-5"]
    [last] = gpu_places(4, each=1, first=3)
    assert last.environment({"CUDA_VISIBLE_DEVICES": "7,6,5,4"})["CUDA_VISIBLE_DEVICES"] == "4"


@pytest.mark.parametrize(
    ("count", "asked", "says"),
    [
        (1, {"each": 2}, "2 GPUs from GPU 0 on were asked for, and 1 GPU can be seen"),
        (4, {"each": 2, "at_most": 4}, "4 places of 2 GPUs"),
    ],
)
def test_places_of_gpus_that_are_not_there_are_refused(count: int, asked: dict[str, int], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        gpu_places(count, **asked)


def test_places_of_cores_share_them_evenly() -> None:
    assert [place.cores for place in core_places(2, [0, 1, 2, 3])] == [(0, 1), (2, 3)]
    assert [place.cores for place in core_places(3, [0, 1])] == [(0,), (1,), (0,)]
    assert len({place.name for place in core_places(3, [0, 1])}) == 3


def test_a_task_runs_on_the_cores_of_its_place(yard: Yard) -> None:
    core = min(os.sched_getaffinity(0))
    script = f"{sys.executable} -S -c 'import os; print(sorted(os.sched_getaffinity(0)))'"
    yard.schedule(yard.task("held", script), places=core_places(1, [core])).run()
    assert yard.wrote("held") == f"[{core}]\n"


# --- A command that runs a queue: --------------------------------------------------------------------------------

UNIT = Path(__file__).parents[1]
SIGNALS_AT_EXIT = """
import atexit, os, signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore it
atexit.register(lambda: [os.kill(os.getpid(), number) for number in (signal.SIGINT, signal.SIGTERM)])
folder = Path(sys.argv[1])
"""
EXPERIMENT = """
from experiment_yard import ExperimentYard, tree
sys.exit(ExperimentYard(folder).run(tree(algos={"DPO": {"lr": 1e-5}}, rounds_of_training=1)))
"""
SWEEP = """
import pytest
from sweep_yard import SweepYard, play
play(pytest.MonkeyPatch(), folder)
yard = SweepYard(folder)
sys.exit(yard.run(yard.sweep(1)))
"""


@pytest.mark.parametrize("command", [EXPERIMENT, SWEEP], ids=["experiment", "sweep"])
def test_a_signal_behind_the_last_line_changes_no_exit_code(command: str, tmp_path: Path) -> None:
    path = os.pathsep.join(str(folder) for folder in (UNIT.parents[1] / "src", UNIT / "runner", UNIT / "sweeps"))
    line = [sys.executable, "-c", SIGNALS_AT_EXIT + command, str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": path}
    ran = subprocess.run(line, env=env, timeout=DEADLINE_S, capture_output=True, text=True)
    assert (ran.returncode, "Exception ignored" in ran.stderr) == (0, False), ran.stdout + ran.stderr
