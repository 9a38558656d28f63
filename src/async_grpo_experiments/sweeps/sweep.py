"""A sweep from its start to its report: look first, run each seed in a place, say what the seeds agree on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

from async_grpo.errors import DiskFullError, RunDirError
from async_grpo.formatting import counted, printable
from async_grpo_experiments.slots.foreground import QueueScreen, conclude, held_alone, stopped_by_signals
from async_grpo_experiments.slots.ledger import FINISHED, LEDGER, Ledger, Record, end_leftovers, read
from async_grpo_experiments.slots.places import Place
from async_grpo_experiments.slots.schedule import Command, Task, TaskSchedule
from async_grpo_experiments.sweeps import plan
from async_grpo_experiments.sweeps.commands import command
from async_grpo_experiments.sweeps.plan import ASYNC, Run, Sweep
from async_grpo_experiments.sweeps.preflight import Preflight, preflight
from async_grpo_experiments.sweeps.report import agreement, headline, write_report
from async_grpo_experiments.sweeps.run_progress import COLUMNS, Reason, RunRows, finished_runs, steps_left, unfinished

GRACE_S = 15.0  # a run ends within 10 s
PLAIN_GRACE_S = 600.0  # plain TRL ends after its optimizer step


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
