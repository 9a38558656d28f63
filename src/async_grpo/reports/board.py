"""TensorBoard event files of a run, made from its archived groups and its `metrics.jsonl`.

    board/run/events.out.tfevents.*   everything, by optimizer step
    board/dev1/ board/dev2/ …         the same few series of each worker: TensorBoard draws them over each other
    board/state.json                  how far the run's files have been read, and how long the event files are then:
                                      the next look cuts off what a crash left beyond that, and adds what is new

`series.py` has the series; here a run's files are read on from where the last look ended.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.plugins.histogram.summary_v2 import histogram_pb
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from async_grpo.archive.groups import FinishedGroups, Resumed, UsedStep, open_run
from async_grpo.archive.history import Dropped
from async_grpo.errors import DiskFullError, RunDirError
from async_grpo.reports import series
from async_grpo.rundir.files import LineReader
from async_grpo.rundir.locks import KernelLock
from async_grpo.rundir.paths import write_json

if TYPE_CHECKING:
    from numpy.typing import NDArray


FORMAT = 1  # of state.json
_RUN = "run"  # the folder of what is not one worker's


class BoardKeptError(RunDirError):
    """Another process keeps this board up to date."""


class Added(NamedTuple):
    """What one look added."""

    steps: int  # of the archive
    logged: int  # lines of metrics.jsonl
    missing: int  # groups of those steps whose files made room, or cannot be used


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a look has come: `state.json`."""

    format: int = FORMAT
    run_id: str
    record: int = 0  # bytes of consumed.jsonl
    metrics: int = 0  # bytes of metrics.jsonl
    described: bool = False  # whether the settings are shown
    dropped: int = 0  # groups, so far
    sizes: dict[str, int] = field(default_factory=dict)  # bytes of each folder's event file
    step: int = 0  # the last one of which a group was there
    time: float  # of that step, wall clock

    @staticmethod
    def read(path: Path, *, run_id: str, began: float) -> Progress:
        """Nothing, of a run that began at that time, where there is no such file.

        Raises:
            RunDirError: the file cannot be used.
        """
        try:
            state = json.loads(path.read_text())
        except FileNotFoundError:
            return Progress(run_id=run_id, time=began)
        except ValueError:
            state = None
        if not isinstance(state, dict) or state.keys() != {entry.name for entry in fields(Progress)}:
            raise RunDirError(f"{path} is broken, or of another version. Move {path.parent} away and start again.")
        if (state["format"], state["run_id"]) != (FORMAT, run_id):
            raise RunDirError(f"{path.parent} is the board of another run. Move it away and start again.")
        return Progress(**state)


class Board:
    """The board of the run in `root`. Use as a context manager: one process at a time keeps a board.

    Raises:
        RunDirError: there is no run, its files may not be read, or the board is kept by another process.
    """

    def __init__(self, root: Path) -> None:
        self.run, state = open_run(root)
        self._run_id = state.run_id
        self.folder = self.run.board
        self._progress_file = self.folder / "state.json"
        self._lock = self._locked()
        began = self.run.state_file.stat().st_mtime
        try:
            seen = Progress.read(self._progress_file, run_id=self._run_id, began=began)
        except RunDirError:
            self._lock.release()
            raise
        self._groups = FinishedGroups(root, position=seen.record)
        self._metrics = LineReader(self.run.metrics, seen.metrics)
        self._described = seen.described
        self._dropped = seen.dropped
        self._sizes = seen.sizes
        self._times = {0: began, seen.step: seen.time}

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
            with EventFiles(self.folder, self._sizes) as files:
                steps, missing = self._add_groups(files)
                logged = self._add_metrics(files)
                self._describe(files)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise DiskFullError(f"The disk is full: no room for {self.folder}.") from error
        if files.sizes != self._sizes:
            self._sizes = files.sizes
            self._write_progress()
        return Added(steps, logged, missing)

    def _write_progress(self) -> None:
        last = max(self._times)
        progress = Progress(
            run_id=self._run_id,
            record=self._groups.position,
            metrics=self._metrics.position,
            described=self._described,
            dropped=self._dropped,
            sizes=self._sizes,
            step=last,
            time=self._times[last],
        )
        write_json(self._progress_file, asdict(progress))

    def _describe(self, files: EventFiles) -> None:
        if not self._described and self._groups.hyperparameters:
            table = series.hyperparameter_table(self._groups.hyperparameters)
            files.text(_RUN, "hyperparameters", table, 0, self._times[0])
            self._described = True

    def _add_groups(self, files: EventFiles) -> tuple[int, int]:
        """How many steps were added, and how many of their groups have no file."""
        steps = missing = 0
        for news in self._groups.news():
            if isinstance(news, Resumed):
                files.restart(news.from_step + 1)
                self._times = {step: at for step, at in self._times.items() if step <= news.from_step}
            elif isinstance(news, Dropped):
                self._dropped += 1
            else:
                steps += 1
                missing += news.missing
                if news.groups:
                    self._times[news.step] = max(found.finished_at for found in news.groups)
                    self._add_step(files, news)
        return steps, missing

    def _time_of(self, step: int) -> float:
        """About when: TensorBoard draws series over relative time, too."""
        return self._times[max(known for known in self._times if known <= step)]

    def _add_step(self, files: EventFiles, used: UsedStep) -> None:
        step, at = used.step, self._times[used.step]
        for tag, value in series.scalars(used).items():
            files.scalar(_RUN, tag, value, step, at)
        files.scalar(_RUN, "groups/dropped", self._dropped, step, at)
        for tag, values in series.histograms(used, self._groups.rule).items():
            files.histogram(_RUN, tag, values, step, at)
        for tag, text in series.samples(used.groups).items():
            files.text(_RUN, tag, text, step, at)
        for worker, scalars in series.of_workers(used.groups).items():
            for tag, value in scalars.items():
                files.scalar(worker, tag, value, step, at)

    def _add_metrics(self, files: EventFiles) -> int:
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
            for tag, value in series.logged(entry):
                files.scalar(_RUN, tag, value, entry["step"], self._time_of(entry["step"]))
        return len(entries)


class EventFiles:
    """One event file for each folder below `root`, open from its first event to the end of the `with` block.

    Args:
        sizes: of each folder's file, in bytes, when the last look was done. What a file has beyond that was left by a
            crash, and is cut off.
    """

    def __init__(self, root: Path, sizes: Mapping[str, int]) -> None:
        self._root = root
        self._before = sizes
        self._files: dict[str, BinaryIO] = {}
        self.sizes = dict(sizes)  # after this look, once it is closed

    def __enter__(self) -> EventFiles:
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
        (self._root / folder).mkdir(mode=0o700, exist_ok=True)
        path = self._root / folder / "events.out.tfevents.0000000000.async-grpo"
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
