"""What condition a run is in: one word, and a sentence that says what to do about it."""

from __future__ import annotations

from pathlib import Path

from async_grpo.activity import ENDING, LOADING, SERVER, STARTING, TRAINING
from async_grpo.errors import RunDirError
from async_grpo.process_view import Processes
from async_grpo.queue_liveness import live_workers
from async_grpo.run_dir import FAILED, FINISHED, RUNNING, STOPPED, RunDir, RunState
from async_grpo.summary import next_command
from async_grpo.wording import counted

DEAD = "dead"  # the others are STARTING, LOADING, TRAINING and ENDING, and what run.json says of a run that has ended
LIVE = (STARTING, LOADING, TRAINING, ENDING)  # a parameter server is alive, or expected


def state_of(run: RunDir) -> RunState:
    """What `run.json` says. `RunDirError` says why there is none."""
    if not run.root.exists():
        raise RunDirError(f"{run.root} does not exist, so no run has begun there (yet). Name the run's --run-dir.")
    if not run.root.is_dir():
        raise RunDirError(f"{run.root} is a file. Name a run directory, such as worker/.")
    state = run.read_state()
    if state is not None:
        return state
    if (run.root / "alive").is_dir() and (waiting := live_workers(run.root)):
        names = ", ".join(worker.name for worker in waiting)
        raise RunDirError(
            f"{run.root} holds no run yet: {names} wait for a parameter server. Start one with the same --run-dir."
        )
    raise RunDirError(f"{run.root} is no run directory: it has no run.json. Name one, such as worker/.")


def condition(state: RunState, processes: Processes) -> str:
    """The word."""
    server = processes.server
    alive = server is not None and server.alive
    if state.state != RUNNING:
        return ENDING if alive else state.state
    if server is None:
        return STARTING
    if not alive:
        return DEAD
    if server.state in (STARTING, ENDING):
        return server.state
    record = processes.records.get(SERVER)
    return TRAINING if record is not None and record.step is not None else LOADING


def sentence(word: str, state: RunState, processes: Processes, run: RunDir) -> str:
    """What the word means, and what to do about it."""
    server, workers = processes.server, sum(worker.alive for worker in processes.workers)
    if word == STARTING:
        return "no parameter server is alive yet. If none comes, what prepared this run has ended: start it again."
    if word == LOADING:
        return (
            f"the parameter server is loading {Path(state.config).name}; workers load meanwhile, or wait for weights."
        )
    if word == DEAD:
        assert server is not None
        waits = "waits" if workers == 1 else "wait"
        waiting = f" {counted(workers, 'worker')} {waits} for it to come back." if workers else ""
        return (
            f"the parameter server (pid {server.pid}, last seen {server.state}) is gone without a word: it was killed, "
            f"or the machine went down.{waiting} To go on from the last checkpoint: {next_command(STOPPED, run)}"
        )
    if word == FAILED:
        return f"the run failed; the end of {run.server_log} says why. To go on: {next_command(word, run)}"
    if word == STOPPED:
        return f"the run was stopped. To go on: {next_command(word, run)}"
    if word == FINISHED:
        return f"the run has finished. Next: {next_command(word, run)}"
    if word == ENDING:
        return "the run is ending: the last checkpoint and the summary are written."
    return "the run is training." if workers else "the run has no live worker: start one with `async-grpo worker`."
