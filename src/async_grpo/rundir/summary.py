"""The table at the end of a run, read from `summary.json`."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from async_grpo.errors import BadFileError
from async_grpo.formatting import counted, printable
from async_grpo.rundir import paths as runs
from async_grpo.rundir.files import write_json
from async_grpo.rundir.paths import RunDir
from async_grpo.rundir.reading import naming, read_object
from async_grpo.rundir.shape import read_shaped, shaped

_FOLDERS = (("checkpoints", "checkpoints"), ("TensorBoard", "tensorboard"))
_ALWAYS = ("steps", "rollouts", "wall_seconds")  # of a run that has trained
_OF_A_PROCESS = (
    *("rollouts_per_second", "staleness_mean", "staleness_max", "trainer_wait_fraction", "worker_busy_fraction"),
    *("worker_restarts", "jobs_quarantined", "groups_dropped"),
)
_PAIRS = (  # where the one is there, the other is
    *(("resumed_from", "rollouts_before"), ("reward_first", "reward_last"), ("evaluated_after", "evaluated_before")),
    ("undecided_tokens", "undecided_nats"),
)
_TEXTS = ("state", "run_id", "checkpoints", "tensorboard", "evaluated", "evaluated_with")
_EVALUATED = {"success_rate": "success rate", "reward_mean": "mean reward"}


def read(path: Path) -> dict[str, Any]:
    """What the summary says; empty where there is none."""
    return read_shaped(dict[str, Any], path) or {}


def read_figures(path: Path, needed: Sequence[str] = _ALWAYS) -> dict[str, Any]:
    """The summary, to be shown.

    Raises:
        BadFileError: it has no figure that a run which has trained has, or another value in its place.
    """
    found = read_object(path)
    with naming(path):
        for name in _TEXTS:
            shaped(str, found.get(name, ""), name)
        for name in (*_ALWAYS, *_OF_A_PROCESS, "padding_fraction") if "rollouts" in found else ():
            if name in needed or found.get(name) is not None:
                shaped(float, found.get(name), name)
        shaped(list[str], found.get("workers_lost", []), "workers_lost")
        for pair in (*_PAIRS, *_accuracies(found)):
            for name in pair if found.get(pair[0]) is not None else ():
                shaped(float, found.get(name), name)
    return found


def add(path: Path, *, server_pid: int, **figures: object) -> None:
    """Add the launcher's own figures to the summary that its own server wrote.

    None is there when that server was killed, and another's when it found the run directory in use.
    """
    summary = read(path)
    if summary.get("server_pid") == server_pid:
        write_json(path, {**summary, **figures})


def show(run: RunDir) -> None:
    """Print the summary of the run, and what to do next."""
    from rich.console import Console
    from rich.table import Table

    try:
        figures = read_figures(run.summary, (*_ALWAYS, *_OF_A_PROCESS))
    except FileNotFoundError:
        return
    except BadFileError as error:
        print(printable(f"{error}, so the table of the run's end cannot be shown"))
        return
    name, state = printable(figures.get("run_id", "")), printable(figures.get("state", ""))
    if "rollouts" not in figures:
        print(f"run {name} {state} before training began")
        return
    table = Table(title=f"run {name} {state}", show_header=False, title_justify="left")
    for section in _sections(figures, run):
        for label, text in section:
            table.add_row(printable(label), printable(text))
        table.add_section()
    console = Console(soft_wrap=True, markup=False)  # a path may hold square brackets
    console.print(table)
    if (state_of_run := run.read_state()) is not None and state_of_run.tips:
        console.print(printable(state_of_run.tips), highlight=False)
    console.print(printable(f"next: {next_command(state, run)}"), highlight=False)


Row = tuple[str, str]


def _sections(figures: dict[str, Any], run: RunDir) -> list[list[Row]]:
    """The figures of the run; apart from them, where it was resumed, those of the process that resumed it."""
    steps, rollouts, resumed_from = figures["steps"], figures["rollouts"], figures.get("resumed_from")
    time = f"in {figures['wall_seconds']:.0f} s (loading included)"
    rate = f"{figures['rollouts_per_second']:.1f} a second"
    folders = [(name, _shortest(Path(figures.get(key, "")))) for name, key in _FOLDERS]
    if not any(Path(figures.get("checkpoints", "")).glob("checkpoint-*")):
        folders[0] = ("checkpoints", "none (save_strategy and save_steps say when one is saved)")
    if resumed_from is None:
        counts = [("steps", f"{steps} {time}"), *_learning(figures), ("rollouts", f"{rollouts}, {rate}")]
        return [[*counts, *_of_process(figures, run), *folders]]
    totals = [("steps", f"{steps}"), *_learning(figures), ("rollouts", f"{rollouts + figures['rollouts_before']}")]
    since = [
        (f"since the resume at step {resumed_from}", f"{counted(steps - resumed_from, 'step')} {time}"),
        ("rollouts", f"{rollouts}, {rate}"),
    ]
    return [totals, [*since, *_of_process(figures, run)], folders]


def _learning(figures: dict[str, Any]) -> list[Row]:
    rows = []
    if "reward_first" in figures:
        rows.append(("reward first → last", f"{figures['reward_first']:.3f} → {figures['reward_last']:.3f}"))
    if "evaluated_after" in figures:
        name = _EVALUATED.get(figures.get("evaluated", ""), "figure")
        rows.append((f"evaluations: {name}", f"{figures['evaluated_before']:.3f} → {figures['evaluated_after']:.3f}"))
        rows.append(("evaluations sampled with", figures.get("evaluated_with", "")))
        return rows
    for after, before in _accuracies(figures):
        of_set = after.removeprefix("accuracy_after").replace("/", " of ", 1)
        rows.append((f"TRL's own evaluations: accuracy{of_set}", f"{figures[before]:.3f} → {figures[after]:.3f}"))
    return rows


def _accuracies(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """The names of the last and the first accuracy, of each dataset that TRL has evaluated."""
    return [(name, name.replace("after", "before", 1)) for name in figures if name.startswith("accuracy_after")]


def _of_process(figures: dict[str, Any], run: RunDir) -> list[Row]:
    rows = [
        ("staleness, in versions", f"mean {figures['staleness_mean']:.2f}, max {figures['staleness_max']}"),
        ("trainer waited", f"{figures['trainer_wait_fraction']:.0%} of the time"),
        ("workers busy", f"{figures['worker_busy_fraction']:.0%} of the time"),
        ("worker restarts", str(figures["worker_restarts"])),
    ]
    if "padding_fraction" in figures:
        rows.insert(2, ("trainer computed", f"{figures['padding_fraction']:.2f} × the real tokens"))
    if "undecided_tokens" in figures:
        seen = f"{figures['undecided_tokens']} fresh tokens are too few ({figures['undecided_nats']:.2g} nats apart)"
        rows.append(("trainer and sampler", f"undecided: {seen}"))
    if figures.get("workers_lost"):
        rows.append(("workers lost at the end", ", ".join(map(str, figures["workers_lost"]))))
    if figures["jobs_quarantined"]:
        rows.append(("groups set aside", f"{figures['jobs_quarantined']}, with reasons in {run.root / 'quarantine'}"))
    if figures["groups_dropped"]:
        rows.append(("groups dropped", f"{figures['groups_dropped']}, of equal rewards or over age"))
    return rows


def next_command(state_of_run: str, run: RunDir) -> str:
    """The command to type after a run that finished, or to continue one that did not, with the options that it had."""
    command = program()
    if state_of_run == runs.FINISHED:
        return f"{command} {shlex.join(['board', _shortest(run.root), '--serve'])}"
    state = run.read_state()
    config = _shortest(state.plan.config) if state else "SETUP_FILE"
    by_hand = state is not None and not state.plan.num_workers and state.plan.launch.ray is None
    if state is not None and state.plan.trl:  # `--resume` knows the arguments of TRL
        start = ["server" if by_hand else "train"]
    else:
        start = ["server", "--config", config] if by_hand else ["train", config, "--distributed"]
    launch = state.plan.launch if state else None
    address = launch.main_process if launch and launch.trainer_nodes == 1 else None  # else Ray's
    place = [] if address is None else ["--main-process", address, "--machine-rank", "0"]
    typed = shlex.join([*start, "--run-dir", _shortest(run.root), "--resume", *place])
    return f"{command} {typed}{'  # on each other machine its own command, with --resume' if place else ''}"


def program() -> str:
    """How the user can call us from where they are."""
    if shutil.which("async-grpo"):
        return "async-grpo"
    beside_python = Path(sys.executable).with_name("async-grpo")
    if beside_python.exists():
        return shlex.quote(_shortest(beside_python))
    return f"{shlex.quote(sys.executable)} -m async_grpo.cli"


def _shortest(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
