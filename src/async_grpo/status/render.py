"""A run on the screen: the report of `status`, and the panel under the launcher's step lines. 80 columns suffice."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from async_grpo.formatting import counted, eta, for_people, printable, size
from async_grpo.rundir import paths as runs
from async_grpo.rundir.summary import program
from async_grpo.status.diagnosis import DEAD
from async_grpo.status.processes import ProcessView
from async_grpo.status.snapshot import RunView
from async_grpo.telemetry.activity import ENDING, TRAINING
from async_grpo.telemetry.nodes_file import NodeRecord

REASONS_SHOWN = 5
_COLOURS = {TRAINING: "green", runs.FINISHED: "green", DEAD: "red", runs.FAILED: "red", runs.STOPPED: "yellow"}


def panel(view: RunView) -> RenderableType:
    """The figures that change during a run, in a frame."""
    texts = [_plain(text) for text in (_figures(view), _queue(view)) if text]
    return Panel(
        Group(_progress(view), *texts, _processes(view), *_conclusions(view)),
        title=_title(view),
        title_align="left",
        border_style="dim",
    )


def report(view: RunView) -> RenderableType:
    """Everything that `status` has to say."""
    lines: list[RenderableType] = [_title(view)]
    if view.state != TRAINING or not any(worker.alive for worker in view.workers):
        lines += _sentence(view.sentence)
    if view.live or view.state == DEAD:
        if view.total_steps or view.problems:
            lines.append(_progress(view))
        lines += [_plain(text) for text in (_figures(view), _queue(view)) if text]
        lines += [Text(), _processes(view)] if view.server or view.workers else []
        lines += [Text(), _slots(view)] if view.slots else []
    elif view.summary is not None and "rollouts" in view.summary:
        lines.append(_outcome(view))
    return Group(*lines, *_conclusions(view), *_quarantine(view))


def _sentence(sentence: str) -> Iterator[Text]:
    """The state in words. A command at their end has a line of its own, unbroken: it is there to be pasted."""
    words, colon, command = printable(sentence).rpartition(": ")
    if colon and program() in command:
        yield Text(f"{words}:")
        yield Text(f"  {command}", no_wrap=True, overflow="ignore")
    elif sentence:
        yield _plain(sentence)


def _title(view: RunView) -> Text:
    colour = f"bold {_COLOURS.get(view.state, 'cyan')}"
    return Text.assemble("run ", _plain(view.run_id, "bold"), ", ", (view.state, colour), _plain(f" in {view.run_dir}"))


def _progress(view: RunView) -> RenderableType:
    if view.problems:
        what, done, total = "problem", view.answered or 0, view.problems
    elif view.total_steps:
        what, done, total = "step", view.step, view.total_steps
    else:
        return _plain(view.sentence)
    row = Table.grid(Column(no_wrap=True), Column(ratio=1), Column(no_wrap=True), padding=(0, 1), expand=True)
    left = f"ETA {'?' if view.eta_s is None else eta(view.eta_s)}" if view.live else ""
    row.add_row(f"{what} {done}/{total}", ProgressBar(total=total, completed=done), left)
    return row


def _figures(view: RunView) -> str:
    """`reward 0.969 · 854 rollouts/s · staleness 1.0 · computes 1.08 × the real tokens`."""
    if (rates := view.rates) is None:
        return ""
    per_second = rates.rollouts_per_second
    parts = (
        ("reward {:.3f}", rates.reward),
        ("{:.0f} rollouts/s" if per_second and per_second >= 9.95 else "{:.1f} rollouts/s", per_second),
        ("staleness {:.1f}", rates.staleness_mean),
        ("computes {:.2f} × the real tokens", rates.padding_fraction),
    )
    return " · ".join(text.format(value) for text, value in parts if value is not None)


def _queue(view: RunView) -> str:
    """`queue: 6 pending, 10 in process, 10 complete; the oldest, 2246, is 0.3 s old`."""
    queue = view.queue
    text = f"queue: {queue.pending} pending, {queue.processing} in process, {queue.complete} complete"
    if queue.oldest_group is None or queue.oldest_s is None:
        return text
    return f"{text}; the oldest, {queue.oldest_group}, is {for_people(queue.oldest_s)} old"


def _processes(view: RunView) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("process", "pid", "on", "version", "busy", "groups"):
        table.add_column(column, no_wrap=True, justify="left" if column in ("process", "on") else "right")
    table.add_column("now", ratio=1)
    for process in (view.server, *view.workers):
        if process is not None:
            table.add_row(*_cells(process), style="" if process.alive else "dim")
    return table


def _cells(process: ProcessView) -> tuple[RenderableType, ...]:
    device = process.device if process.device in ("", "cpu") or ":" in process.device else f"GPU {process.device}"
    version = "" if process.version is None else str(process.version)
    busy = "" if process.busy is None else f"{process.busy:.0%}"
    done = str(process.jobs_done) if process.jobs_done else ""
    return process.name, str(process.pid), _plain(device), version, busy, done, _now(process)


def _now(process: ProcessView) -> Text:
    if not process.alive:
        return _plain(process.text, "" if process.state == ENDING else "red")
    if process.paused:
        return Text(f"paused by a signal: kill -CONT {process.pid}", "bold yellow")
    failed = f"; {process.jobs_failed} failed" if process.jobs_failed else ""
    return _plain(f"{process.text}{failed}", "yellow" if process.no_progress_s is not None else "")


def _slots(view: RunView) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for slot in view.slots:
        version = "-" if slot.version is None else f"v{slot.version}"
        held = f"held by {', '.join(slot.held_by)}" if slot.held_by else ""
        table.add_row(f"slot {slot.slot}", slot.state.lower(), version, "newest" if slot.newest else "", held)
    return table


def _outcome(view: RunView) -> Text:
    assert view.summary is not None
    figures = view.summary
    steps, rollouts, resumed_from = figures["steps"], figures["rollouts"], figures.get("resumed_from")
    time = f"in {for_people(figures['wall_seconds'])}"
    text = f"{steps} steps {time}, {rollouts} rollouts"
    if resumed_from is not None:
        text = f"{steps} steps, {rollouts + figures['rollouts_before']} rollouts"
    if "reward_first" in figures:
        text += f", reward {figures['reward_first']:.3f} → {figures['reward_last']:.3f}"
    if resumed_from is not None:
        text += f"; since the resume at step {resumed_from}: {steps - resumed_from} steps {time}, {rollouts} rollouts"
    return Text(text)


def _conclusions(view: RunView) -> Iterator[Text]:
    yield from map(_node, view.nodes) if view.live else ()
    for name, rank in view.ranks.items() if view.live else ():
        yield _plain(f"{name}: {'has left' if rank.left else rank.doing}, step {rank.step}", "dim")
    for stall in view.stalls:
        yield _plain(stall, "bold yellow")
    if view.tips:
        yield _plain(view.tips, "bold yellow")
    if view.bottleneck:
        yield _plain(view.bottleneck, "italic")
    if view.jobs_quarantined:
        command = f"async-grpo queue {shlex.quote(view.run_dir)} quarantine"
        yield _plain(f"{view.jobs_quarantined} prompt groups were given up: {command}", "yellow")


def _node(node: NodeRecord) -> Text:
    """What the weights of another machine cost, or since when it is gone."""
    if node.gone:
        since = for_people(time.monotonic() - node.gone_s)
        return _plain(f"{node.name} ({node.worker}) gone since {since}: {node.gone}. It joins again when it is back")
    how = "delta" if node.deltas > node.wholes else "whole"
    weights = f"weights {size(node.weights_bytes)} a version ({how}), {node.weights_s:.2g} s"
    return _plain(f"{node.name} ({node.worker}): {counted(node.workers, 'worker')}, {weights}", "dim")


def _quarantine(view: RunView) -> Iterator[RenderableType]:
    shown = view.quarantined[-REASONS_SHOWN:]
    for aside in shown:
        what = "given up" if aside["kind"] == "failed" else aside["kind"]
        last_line = aside["reason"].strip().rsplit("\n", 1)[-1]
        yield _plain(f"  group {aside['group']}, try {aside['attempt'] + 1}, {what}: {last_line}")
    if len(view.quarantined) > len(shown):
        yield Text(f"  … and {len(view.quarantined) - len(shown)} before these")


def _plain(text: str, style: str = "") -> Text:
    """Text from files: it neither steers the terminal nor is markup."""
    return Text(printable(text), style)
