"""A sweep from its start to its report: look first, run each seed in a place, say what the seeds agree on."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path

from async_grpo.errors import DiskFullError, RunDirError, UsageError
from async_grpo.formatting import counted, printable
from async_grpo.records import WorkerId
from async_grpo.rundir.paths import RunDir
from async_grpo.serving.vllm_server import is_free
from async_grpo.settings import as_flags
from async_grpo.setup.devices import physical_gpus
from async_grpo.setup.generator_choice import STARTED_SERVER
from async_grpo.setup.process import path_to_us
from async_grpo_experiments.slots.foreground import QueueScreen, conclude, held_alone, stopped_by_signals
from async_grpo_experiments.slots.ledger import FINISHED, LEDGER, Ledger, Record, end_leftovers, read
from async_grpo_experiments.slots.places import Place
from async_grpo_experiments.slots.schedule import Command, Task, TaskSchedule
from async_grpo_experiments.sweeps import plan
from async_grpo_experiments.sweeps.plan import ASYNC, OWN_SETTINGS, Run, Sweep
from async_grpo_experiments.sweeps.preflight import Preflight, preflight
from async_grpo_experiments.sweeps.report import agreement, headline, write_report
from async_grpo_experiments.sweeps.run_progress import COLUMNS, Reason, RunRows, finished_runs, steps_left, unfinished

GRACE_S = 15.0  # a run ends within 10 s
PLAIN_GRACE_S = 600.0  # plain TRL ends after its optimizer step
PROGRAM = (sys.executable, "-Pm", "async_grpo.cli")
CACHES = {  # by environment variable: compilers write there, and two that share a folder can clash
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "VLLM_CACHE_ROOT": "vllm",
    "UNSLOTH_COMPILE_LOCATION": "unsloth",
}
_SHARED_BY_MISTAKE = (
    "CUDA_IPC_HANDLE_PATH",
    "WORKER_DEVICE",
    "WANDB_RUN_ID",
)  # one value for all runs would make them meet


def run_sweep(sweep: Sweep, *, resume: bool) -> int:
    """Run to the end; returns 0, 1 if a run failed, 130 if the sweep was asked to stop.

    Raises:
        AsyncGRPOError: nothing can be started, or the folders are not free.
    """
    plan.check(sweep)
    way_out = "Wait for it or stop it, or let this one write elsewhere: --output-base DIR or --run-prefix NAME."
    with held_alone(sweep.folder / "sweep.lock", role="sweep", way_out=way_out):
        if not resume:
            _refuse_old_outputs(sweep)
        end_leftovers(read(sweep.folder / LEDGER).values(), grace_s=_grace_s(sweep), say=_say)
        found = preflight(sweep, _say)
        plan.write(sweep)
        if not resume:
            _claim_outputs(sweep)
        with closing(Ledger(sweep.folder / LEDGER)) as ledger:
            _adopt_finished(sweep, ledger)
            stopped = _run(sweep, found, ledger)
            return _conclude(sweep, ledger.records, stopped=stopped)


def _adopt_finished(sweep: Sweep, ledger: Ledger) -> None:
    """A run may have finished after the sweep was killed, or just before: nobody wrote it down, and it is done."""
    for run in sweep.runs:
        record = ledger.records.get(run.name)
        if record is not None and record.state != FINISHED and not unfinished(run):
            ledger.change(run.name, state=FINISHED, why="")


def _run(sweep: Sweep, found: Preflight, ledger: Ledger) -> bool:
    """Run all that has not finished; returns whether a stop was asked for."""
    rows = RunRows(sweep, ledger.records, found.places)
    screen = QueueScreen("sweep", COLUMNS, rows, rows.in_words)
    tasks = [_task(run, found, screen.say, begun=run.name in ledger.records) for run in sweep.runs]
    schedule = TaskSchedule(tasks, found.places, ledger, say=screen.say, look=screen.look, stagger_s=sweep.stagger_s)
    stopped_by_signals(schedule.stop)
    screen.say(
        f"{counted(len(sweep.seeds), 'run')} of {sweep.setup} ({sweep.mode}), {len(found.places)} at a time on "
        f"{', '.join(place.name for place in found.places)}; logs in {sweep.log_folder}, report in {sweep.folder}"
    )
    with screen:
        schedule.run()
    return schedule.stopping


def _task(run: Run, found: Preflight, say: Callable[[str], None], *, begun: bool) -> Task:
    left = steps_left(run) if begun else None
    reason = Reason(run)

    def begin(place: Place) -> Command:
        reason.begins()
        return command(run, place, found, say)

    return Task(
        name=run.name,
        command=begin,
        expected_s=None if left is None else float(left),  # in steps: it is only compared
        grace_s=_grace_s(run.sweep),
        unfinished=lambda: unfinished(run),
        reason=reason,
    )


def _grace_s(sweep: Sweep) -> float:
    return GRACE_S if sweep.mode == ASYNC else PLAIN_GRACE_S


def _conclude(sweep: Sweep, records: Mapping[str, Record], *, stopped: bool) -> int:
    found = agreement(finished_runs(sweep, records), sweep.mode)
    try:
        write_report(sweep.folder, found)
    except DiskFullError as error:
        print(f"[sweep] the report is not complete: {error}", file=sys.stderr)
    print(printable("\n".join(headline(found))), flush=True)
    print(f"report: {sweep.folder / 'report.md'}", flush=True)
    own = {f"seed {run.seed}": records[run.name] for run in sweep.runs}
    return conclude("sweep", own, stopped=stopped, go_on=f"sweep {sweep.folder} --resume")


def _refuse_old_outputs(sweep: Sweep) -> None:
    old = [sweep.folder] if (sweep.folder / "sweep.json").exists() else []
    old += [run.output for run in sweep.runs if run.output.exists()]
    if old:
        raise _is_there(old[0])


def _claim_outputs(sweep: Sweep) -> None:
    """Make the folder of each run now: a sweep with other instance numbers may have one of the same name later."""
    made: list[Path] = []
    for run in sweep.runs:
        try:
            run.output.mkdir(parents=True)
        except FileExistsError:
            for folder in made:
                folder.rmdir()
            (sweep.folder / "sweep.json").unlink()
            raise _is_there(run.output) from None
        made.append(run.output)


def _is_there(folder: Path) -> RunDirError:
    return RunDirError(
        f"{folder} is there already, from another sweep. Nothing was changed. Three ways out:\n"
        "  --resume                                 continue that sweep; finished runs are kept\n"
        "  --run-prefix NAME or --output-base DIR   leave it alone and write elsewhere\n"
        "  move or delete it yourself, if nobody needs it"
    )


def _say(text: str) -> None:
    print(f"[sweep] {text}", flush=True)


def command(run: Run, place: Place, found: Preflight, say: Callable[[str], None]) -> Command:
    """How the run is started in this place: from its beginning, or from where it was stopped.

    A run that starts vLLM servers gets its own port, or the next free one.
    """
    common = _common(run, found.model)
    arguments = _async(run, place, common) if run.sweep.mode == ASYNC else _trl(run, place, common, serves=found.serves)
    if found.serves:
        port, group_port = _free_ports(run.port_pairs(), what=run.name, say=say)
        arguments += ["--set", f"vllm_server_port={port}", "--set", f"vllm_group_port={group_port}"]
        _name_server_log(run, place)
    log = run.training_log(place)
    log.parent.mkdir(parents=True, exist_ok=True)
    run.output.mkdir(parents=True, exist_ok=True)
    env = environment(run, os.environ, offline=found.offline)
    return Command([*PROGRAM, *arguments], place.environment(env), log)


def _async(run: Run, place: Place, common: Sequence[str]) -> list[str]:
    state = RunDir(run.run_dir).read_state()
    began = ["--resume"] if state is not None and state.state != FINISHED else []
    device = [] if place.gpus else ["--master-device-id", "cpu"]
    return ["train", run.sweep.setup, "--distributed", *device, *began, *common]


def _trl(run: Run, place: Place, common: Sequence[str], *, serves: bool) -> list[str]:
    """The trainer has the first GPU of the place, and its server the others."""
    device = ["--device", "0" if place.gpus else "cpu"]
    server = ["--generator", STARTED_SERVER.name] if serves else []
    if serves and place.gpus:
        server += ["--server-devices", ",".join(physical_gpus(place.gpus[1:], os.environ))]
    return ["train", run.sweep.setup, *device, *server, *common]


def _name_server_log(run: Run, place: Place) -> None:
    """Let the server's output, which is in the run directory, be found next to the run's."""
    written = RunDir(run.run_dir)
    log = written.server_of_worker_log(WorkerId(1)) if run.sweep.mode == ASYNC else written.vllm_server_log
    link = run.server_log(place)
    link.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        link.symlink_to(log)


def _common(run: Run, model: str) -> list[str]:
    """The settings of a run that are its own, and those that were chosen for all."""
    training, work = run.training(model), run.sweep.work
    arguments = ["--run-dir", str(run.run_dir), *as_flags("num_workers", run.sweep.num_workers)]
    for name in (*OWN_SETTINGS, *run.sweep.given):
        arguments += as_flags(name, getattr(training if hasattr(training, name) else work, name))
    return arguments


def environment(run: Run, env: Mapping[str, str], *, offline: bool) -> dict[str, str]:
    """The variables of this run: caches and names of its own."""
    mine = {name: value for name, value in env.items() if name not in _SHARED_BY_MISTAKE}
    mine |= {name: str(run.caches / folder) for name, folder in CACHES.items()}
    mine |= {
        "PYTHONPATH": path_to_us(env),
        "PYTHONUNBUFFERED": "1",
        "PYTHONHASHSEED": str(run.seed % 2**32),
        "WANDB_DIR": str(run.output),
    }
    if run.sweep.dataset is not None:
        mine["DATASET"] = run.sweep.dataset
    if offline:
        mine["WANDB_MODE"] = "offline"
    mine.setdefault("TQDM_DISABLE", "1")
    return mine


def _free_ports(pairs: Sequence[tuple[int, int]], *, what: str, say: Callable[[str], None]) -> tuple[int, int]:
    """The first pair of which both ports are free. Says which are taken.

    Raises:
        UsageError: no pair is free.
    """
    for pair in pairs:
        taken = [port for port in pair if not is_free(port)]
        if not taken:
            if pair != pairs[0]:
                say(f"{what} takes the next free ports, {pair[0]} and {pair[1]}")
            return pair
        if pair == pairs[0]:
            say(f"{what}: port {' and '.join(map(str, taken))} is taken by another program")
    first, last = pairs[0], pairs[-1]
    raise UsageError(
        f"{what}: of all ports from {first[0]} to {last[0]}, none is free together with its group port. Choose "
        "another --base-port."
    )
