"""TensorBoard event files of a run, made from its archived groups and its `metrics.jsonl`.

    board/run/events.out.tfevents.*   everything, by optimizer step
    board/dev1/ board/dev2/ …         the same few series of each worker: TensorBoard draws them over each other
    board/state.json                  how far the run's files have been read, and how long the event files are then:
                                      the next look cuts off what a crash left beyond that, and adds what is new

`docs/seeing.md` lists the series. No torch: TensorBoard's own event writer and protos.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.plugins.histogram.summary_v2 import histogram_pb
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from async_grpo.errors import DiskFullError, RunDirError
from async_grpo.finished_groups import FinishedGroup, FinishedGroups, Resumed, UsedStep, open_run
from async_grpo.line_file import LineReader
from async_grpo.locks import KernelLock
from async_grpo.run_dir import write_json
from async_grpo.training.consumption import Dropped
from async_grpo.transcript import as_text, printable

if TYPE_CHECKING:
    from numpy.typing import NDArray

FORMAT = 1  # of state.json
_RUN = "run"  # the folder of what is not one worker's
_NO_SERIES = ("step", "monotonic_s")  # of metrics.jsonl
_SAMPLE_CHARACTERS = 4000  # of a prompt or a completion that is shown as text


class BoardKeptError(RunDirError):
    """Another process keeps this board up to date."""


class Added(NamedTuple):
    """What one look added."""

    steps: int  # of the archive
    logged: int  # lines of metrics.jsonl
    missing: int  # groups of those steps whose files made room, or cannot be used


class Board:
    """The board of the run in `root`. Use as a context manager: one process at a time keeps a board.

    Raises:
        RunDirError: there is no run, its files may not be read, or the board is kept by another process.
    """

    def __init__(self, root: Path) -> None:
        self.run, state = open_run(root)
        self._run_id = state.run_id
        self.folder = self.run.board
        self._lock = self._locked()
        try:
            seen = self._read_state()
        except RunDirError:
            self._lock.release()
            raise
        self._groups = FinishedGroups(root, position=seen["record"])
        self._metrics = LineReader(self.run.metrics, seen["metrics"])
        self._described = bool(seen["described"])
        self._dropped = int(seen["dropped"])
        self._sizes: dict[str, int] = dict(seen["sizes"])
        self._times = {0: self.run.state_file.stat().st_mtime, int(seen["step"]): float(seen["time"])}

    def _locked(self) -> KernelLock:
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            lock = KernelLock(self.folder / "board.lock")
            if lock.try_acquire({"role": "board"}):
                return lock
        except PermissionError as error:
            raise RunDirError(f"{self.folder} cannot be written by this user: the run is someone else's.") from error
        holder = (lock.holder() or {}).get("pid", "unknown")
        raise BoardKeptError(
            f"{self.folder} is kept up to date by another process (pid {holder}): look at its TensorBoard, "
            "or open one more with --serve."
        )

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *exc: object) -> None:
        self._lock.release()

    @property
    def skipped(self) -> dict[str, str]:
        """Files that cannot be used, each with a sentence."""
        return self._groups.skipped

    def run_is_live(self) -> bool:
        """Whether a parameter server runs."""
        return self._groups.is_live()

    def update(self) -> Added:
        """Add what is new. `DiskFullError` if there is no room: call again, nothing is lost."""
        state = self.run.read_state()
        if state is None or state.run_id != self._run_id:
            raise RunDirError(f"{self.run.root} holds another run now. Start again.")
        try:
            with _Writers(self.folder, self._sizes) as writers:
                steps, missing = self._add_groups(writers)
                logged = self._add_metrics(writers)
                self._describe(writers)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise DiskFullError(f"The disk is full: no room for {self.folder}.") from error
        if writers.sizes != self._sizes:
            self._sizes = writers.sizes
            self._write_state()
        return Added(steps, logged, missing)

    def _read_state(self) -> dict[str, Any]:
        path = self.folder / "state.json"
        began = self.run.state_file.stat().st_mtime
        fresh: dict[str, Any] = {"format": FORMAT, "run_id": self._run_id, "record": 0, "metrics": 0}
        fresh |= {"described": False, "dropped": 0, "sizes": {}, "step": 0, "time": began}
        try:
            state = json.loads(path.read_text())
        except FileNotFoundError:
            return fresh
        except ValueError:
            state = None
        if not isinstance(state, dict) or state.keys() != fresh.keys():
            raise RunDirError(f"{path} is broken, or of another version. Move {self.folder} away and start again.")
        if (state["format"], state["run_id"]) != (FORMAT, self._run_id):
            raise RunDirError(f"{self.folder} is the board of another run. Move it away and start again.")
        return state

    def _write_state(self) -> None:
        state = {
            "format": FORMAT,
            "run_id": self._run_id,
            "record": self._groups.position,
            "metrics": self._metrics.position,
            "described": self._described,
            "dropped": self._dropped,
            "sizes": self._sizes,
            "step": max(self._times),
            "time": self._times[max(self._times)],
        }
        write_json(self.folder / "state.json", state)

    def _describe(self, writers: _Writers) -> None:
        if not self._described and self._groups.hyperparameters:
            writers.text(_RUN, "hyperparameters", _table(self._groups.hyperparameters), 0, self._times[0])
            self._described = True

    def _add_groups(self, writers: _Writers) -> tuple[int, int]:
        """How many steps were added, and how many of their groups have no file."""
        steps = missing = 0
        for news in self._groups.news():
            if isinstance(news, Resumed):
                writers.restart(news.from_step + 1)
                self._times = {step: at for step, at in self._times.items() if step <= news.from_step}
            elif isinstance(news, Dropped):
                self._dropped += 1
            else:
                steps += 1
                missing += news.missing
                if news.groups:
                    self._times[news.step] = max(found.finished_at for found in news.groups)
                    self._add_step(writers, news)
        return steps, missing

    def _time_of(self, step: int) -> float:
        """About when: TensorBoard draws series over relative time, too."""
        return self._times[max(known for known in self._times if known <= step)]

    def _add_step(self, writers: _Writers, used: UsedStep) -> None:
        import numpy as np

        step, at, groups = used.step, self._times[used.step], used.groups
        advantages = np.concatenate(self._groups.rule.advantages([found.group.rewards for found in groups]))
        lengths = np.concatenate([found.group.completion_lengths for found in groups])
        totals = np.concatenate([found.totals for found in groups])
        staleness = np.array([used.version_used - found.group.policy_version for found in groups])
        ages = [used.version_used - found.group.job.born_version for found in groups]
        scalars = {
            **_rewards(groups, totals),
            "completions/length": lengths.mean(),
            "staleness/mean": staleness.mean(),
            "staleness/max": staleness.max(),
            "staleness/job_age": float(np.mean(ages)),
            "groups/dropped": float(self._dropped),
            **_seconds(groups),
        }
        for tag, value in scalars.items():
            writers.scalar(_RUN, tag, value, step, at)
        known = totals[~np.isnan(totals)]
        writers.histogram(_RUN, "rewards/total", known, step, at)
        writers.histogram(_RUN, "rewards/advantages", advantages, step, at)
        writers.histogram(_RUN, "completions/length", lengths, step, at)
        writers.histogram(_RUN, "staleness/versions", staleness, step, at)
        for name, (found, index) in _samples(groups).items():
            writers.text(_RUN, f"completions/{name}", _sample(found, index), step, at)
        for worker in sorted({found.group.worker for found in groups}):
            mine = [found for found in groups if found.group.worker == worker]
            for tag, value in _of_worker(mine).items():
                writers.scalar(worker, tag, value, step, at)

    def _add_metrics(self, writers: _Writers) -> int:
        """How many lines were added."""
        entries: list[dict[str, Any]] = []
        for line in self._metrics.new_lines():
            try:
                entry = json.loads(line)
                step = int(entry["step"])
            except (ValueError, KeyError, TypeError) as error:
                self.skipped[line[:80]] = f"A line of {self.run.metrics.name} is broken: {type(error).__name__}."
                continue
            if "loss" in entry:  # of a resumed run: what came after its checkpoint has not happened
                entries = [earlier for earlier in entries if earlier["step"] < step or "loss" not in earlier]
            entries.append(entry)
        for entry in entries:
            for tag, value in _logged(entry):
                writers.scalar(_RUN, tag, value, entry["step"], self._time_of(entry["step"]))
        return len(entries)


class _Writers:
    """One event file for each folder, which grows from look to look.

    Args:
        sizes: of each folder's file, in bytes, when the last look was done.
    """

    def __init__(self, folder: Path, sizes: Mapping[str, int]) -> None:
        self._folder = folder
        self._before = sizes
        self._files: dict[str, BinaryIO] = {}
        self.sizes = dict(sizes)  # after this look, once it is closed

    def __enter__(self) -> _Writers:
        return self

    def __exit__(self, *exc: object) -> None:
        for folder, file in self._files.items():
            with closing(file):
                file.flush()
                self.sizes[folder] = file.tell()

    def restart(self, step: int) -> None:
        """TensorBoard forgets what it has of this step and later ones."""
        for folder in sorted({*self._before, *self._files}):
            self._add(folder, _session_starts(step))

    def scalar(self, folder: str, tag: str, value: float, step: int, at: float) -> None:
        if math.isfinite(value):
            self._add(folder, Event(step=step, wall_time=at, summary=scalar_pb(tag, float(value))))

    def histogram(self, folder: str, tag: str, values: NDArray[Any], step: int, at: float) -> None:
        if len(values):
            summary = histogram_pb(f"{tag}_distribution", values.astype(float))
            self._add(folder, Event(step=step, wall_time=at, summary=summary))

    def text(self, folder: str, tag: str, markdown: str, step: int, at: float) -> None:
        if markdown:
            self._add(folder, Event(step=step, wall_time=at, summary=text_pb(tag, markdown)))

    def _add(self, folder: str, event: Event) -> None:
        if folder not in self._files:
            self._files[folder] = self._open(folder)
        RecordWriter(self._files[folder]).write(event.SerializeToString())

    def _open(self, folder: str) -> BinaryIO:
        (self._folder / folder).mkdir(mode=0o700, exist_ok=True)
        path = self._folder / folder / "events.out.tfevents.0000000000.async-grpo"
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "r+b")
        known = self._before.get(folder, 0)
        if file.seek(0, os.SEEK_END) != known:
            file.truncate(known)
            file.seek(known)
        if known == 0:
            for event in (Event(file_version="brain.Event:2"), _session_starts(0)):
                RecordWriter(file).write(event.SerializeToString())
        return file


def _session_starts(step: int) -> Event:
    """The second of these and later ones make TensorBoard drop what it has from this step on."""
    return Event(step=step, session_log=SessionLog(status=SessionLog.START))


def _rewards(groups: Sequence[FinishedGroup], totals: NDArray[Any]) -> dict[str, float]:
    """Means over the completions that have a reward."""
    by_name: dict[str, list[float]] = {}
    for found in groups:
        for index, name in enumerate(found.group.reward_names):
            by_name.setdefault(name, []).extend(found.group.rewards[:, index].tolist())
    named = {f"rewards/{name}": _mean(values) for name, values in by_name.items()}
    return {"rewards/total": _mean(totals.tolist()), **named}


def _seconds(groups: Sequence[FinishedGroup]) -> dict[str, float]:
    """A worker's seconds for a group, in the mean."""
    spent = [found.group.timings for found in groups]
    return {
        "timing/generation_s": _mean(times.generate_s for times in spent),
        "timing/scoring_s": _mean(times.score_s for times in spent),
        "timing/queue_s": _mean(times.queue_s for times in spent),
        "timing/weights_s": _mean(times.adopt_s for times in spent),
    }


def _of_worker(groups: Sequence[FinishedGroup]) -> dict[str, float]:
    spent = [found.group.timings for found in groups]
    generating = sum(times.generate_s for times in spent)
    busy = generating + sum(times.adopt_s + times.score_s + times.queue_s for times in spent)
    tokens = sum(int(found.group.completion_lengths.sum()) for found in groups)
    return {
        "workers/groups": float(len(groups)),
        "workers/seconds_per_group": busy / len(groups),
        "workers/tokens_per_generating_second": tokens / generating if generating else math.nan,
        "workers/reward": _mean(value for found in groups for value in found.totals.tolist()),
        "workers/staleness": _mean(found.staleness for found in groups if found.staleness is not None),
    }


def _mean(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _logged(entry: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The series of one line of metrics.jsonl, under the tags that transformers gives them."""
    for name, value in entry.items():
        if name in _NO_SERIES or isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        yield (f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"), float(value)
    rate, length = entry.get("async/rollouts_per_second"), entry.get("completions/mean_length")
    if isinstance(rate, float) and isinstance(length, float):
        yield "speed/tokens_per_second", rate * length


def _samples(groups: Sequence[FinishedGroup]) -> dict[str, tuple[FinishedGroup, int]]:
    """The completions with the highest and the lowest reward of a step."""
    scored = [
        (total, found.group.job.seq, index, found)
        for found in groups
        for index, total in enumerate(found.totals.tolist())
        if not math.isnan(total)
    ]
    if not scored:
        return {}
    best, worst = max(scored, key=lambda it: it[:3]), min(scored, key=lambda it: it[:3])
    return {"best": (best[3], best[2]), "worst": (worst[3], worst[2])}


def _sample(found: FinishedGroup, index: int) -> str:
    group = found.group
    rewards = ", ".join(
        f"{name} {reward:g}" for name, reward in zip(group.reward_names, group.rewards[index].tolist(), strict=True)
    )
    about = f"group {group.job.seq}, {group.worker}, version {group.policy_version}, {rewards}"
    return (
        f"**prompt**\n\n{_fenced(as_text(group.job.row.get('prompt', group.job.row)))}\n\n"
        f"**completion** ({about.replace('_', chr(92) + '_')})\n\n{_fenced(as_text(group.completions[index]))}"
    )


def _fenced(text: str) -> str:
    """Markdown that shows a text as it is: indented, so that nothing in it can end the block."""
    shown = printable(text[:_SAMPLE_CHARACTERS]) + (" …" if len(text) > _SAMPLE_CHARACTERS else "")
    return "\n".join(f"    {line}" for line in shown.split("\n"))


def _table(hyperparameters: dict[str, Any]) -> str:
    rows = [f"| {name} | {_cell(value)} |" for name, value in _flat(hyperparameters)]
    return "\n".join(["| name | value |", "|---|---|", *rows]) if rows else ""


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _cell(value: Any) -> str:
    text = printable(value if isinstance(value, str) else json.dumps(value)).replace("\n", " ")
    return text.replace("|", "\\|")
