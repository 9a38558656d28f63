"""TensorBoard event files of a run, made whole from its archived groups and its `metrics.jsonl`.

    board/run/events.out.tfevents.*   everything, by optimizer step
    board/dev1/ board/dev2/ …         the same few series of each worker: TensorBoard draws them over each other

Each `Board` writes new files and empties those of the board before it; within its life, `update()` adds what is new.
`series.py` has the series. The run itself logs to `tensorboard/`, by transformers' own callback.
"""

from __future__ import annotations

import errno
import math
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.histogram.summary_v2 import histogram_pb
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.api_pb2 import Status
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from async_grpo.archive.groups import FinishedGroups, RunResumed, UsedStep, open_run
from async_grpo.archive.history import Dropped
from async_grpo.errors import DiskFullError, RunDirError
from async_grpo.reports import series
from async_grpo.rundir.folders import make_folder
from async_grpo.rundir.locks import KernelLock
from async_grpo.rundir.paths import FINISHED
from async_grpo.telemetry.entries import Entries, happened, step_of

_RUN = "run"  # the folder of what is not one worker's


class BoardKeptError(RunDirError):
    """Another process keeps this board up to date."""


class Added(NamedTuple):
    """The additions of one look."""

    steps: int  # of the archive
    logged: int  # lines of metrics.jsonl
    missing: int  # groups of those steps that were trimmed (`--keep-done`), or cannot be used


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
        self._begin()

    def _begin(self) -> None:
        """Nothing is written yet, and nothing read."""
        self._groups = FinishedGroups(self.run.root)
        self._metrics = Entries(self.run.metrics)
        self._files: EventFiles | None = None
        self._described = False  # whether the settings are shown
        self._ended = False  # whether it says that the run has finished
        self._dropped = 0  # groups, so far
        self._times = {0: self.run.state_file.stat().st_mtime}  # of each step of which a group was there

    def _locked(self) -> KernelLock:
        try:
            make_folder(self.folder)
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
        if self._files is not None:
            self._files.close()
        self._lock.release()

    @property
    def skipped(self) -> dict[str, str]:
        """Files that cannot be used, each with a sentence."""
        return self._groups.skipped

    def update(self) -> Added:
        """Write everything, or in later calls what is new.

        Raises:
            DiskFullError: the disk is full. The next call makes the files again.
            RunDirError: the directory holds another run by now.
        """
        state = self.run.read_state()
        if state is None or state.run_id != self._run_id:
            raise RunDirError(f"{self.run.root} holds another run now. Start again.")
        try:
            if self._files is None:
                self._files = EventFiles(self.folder)
            steps, missing = self._add_groups(self._files)
            logged = self._add_metrics(self._files)
            self._describe(self._files, is_finished=state.state == FINISHED)
            self._files.flush()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            if self._files is not None:
                self._files.close()
            self._begin()
            raise DiskFullError(f"The disk is full: no room for {self.folder}.") from error
        return Added(steps, logged, missing)

    def _describe(self, files: EventFiles, *, is_finished: bool) -> None:
        if not self._described and self._groups.hyperparameters:
            table = series.hyperparameter_table(self._groups.hyperparameters)
            files.text(_RUN, "hyperparameters", table, 0, self._times[0])
            values = series.hyperparameter_values(self._groups.hyperparameters)
            name = f"{self.run.root.name} {self._run_id[:6]}"
            files.session_starts(_RUN, name, values, self._times[0])
            self._described = True
        if self._described and is_finished and not self._ended:
            files.session_ends(_RUN, max(self._times.values()))
            self._ended = True

    def _add_groups(self, files: EventFiles) -> tuple[int, int]:
        """How many steps were added, and how many of their groups have no file."""
        steps = missing = 0
        for news in self._groups.news():
            if isinstance(news, RunResumed):
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

    def _add_step(self, files: EventFiles, used: UsedStep) -> None:
        step, at = used.step, self._times[used.step]
        for tag, value in series.scalars(used).items():
            files.scalar(_RUN, tag, value, step, at)
        files.scalar(_RUN, f"{series.COMPLETIONS}/dropped_groups", self._dropped, step, at)
        for tag, values in series.histograms(used, self._groups.rule).items():
            files.histogram(_RUN, tag, values, step, at)
        for tag, text in series.samples(used.groups).items():
            files.text(_RUN, tag, text, step, at)
        for worker, scalars in series.of_workers(used.groups).items():
            for tag, value in scalars.items():
                files.scalar(worker, tag, value, step, at)

    def _add_metrics(self, files: EventFiles) -> int:
        """How many lines were added."""
        entries = happened(self._metrics.news())
        for number, reason in self._metrics.broken.items():
            name = self.run.metrics.name
            self.skipped[f"{name}:{number}"] = f"Line {number} of {name} is broken: {reason}."
        for entry in entries:
            step = step_of(entry)
            at = self._times[max(known for known in self._times if known <= step)]  # about when it was
            for tag, value in series.logged(entry):
                files.scalar(_RUN, tag, value, step, at)
        return len(entries)


class EventFiles:
    """One new event file in each folder below `root`, from its first event on. Empties those of an earlier board."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files: dict[str, BinaryIO] = {}
        for old in root.glob("*/events.out.tfevents.*.async-grpo"):
            if old.parent.is_symlink():
                continue
            if old.is_symlink() or old.stat().st_size == 0:
                old.unlink()
            else:
                os.truncate(old, 0)  # TensorBoard would stop at a deleted file and not read the next

    def flush(self) -> None:
        for file in self._files.values():
            file.flush()

    def close(self) -> None:
        for file in self._files.values():
            with suppress(OSError):  # of a full disk, which was reported
                file.close()

    def restart(self, step: int) -> None:
        """TensorBoard forgets what it has of this step and later ones."""
        for folder in self._files:
            self._add(folder, _session_starts(step))

    def scalar(self, folder: str, tag: str, value: float, step: int, at: float) -> None:
        if math.isfinite(value):
            self._add(folder, Event(step=step, wall_time=at, summary=scalar_pb(tag, float(value))))

    def histogram(self, folder: str, tag: str, values: NDArray[Any], step: int, at: float) -> None:
        finite = values[np.isfinite(values)].astype(float)
        if len(finite):
            self._add(folder, Event(step=step, wall_time=at, summary=histogram_pb(tag, finite)))

    def text(self, folder: str, tag: str, markdown: str, step: int, at: float) -> None:
        if markdown:
            self._add(folder, Event(step=step, wall_time=at, summary=text_pb(tag, markdown)))

    def session_starts(self, folder: str, name: str, values: dict[str, bool | float | str], at: float) -> None:
        """The row of TensorBoard's HPARAMS tab; its figures are the newest of each curve in the folder."""
        summary = hparams_pb(values, trial_id=name, start_time_secs=at)
        self._add(folder, Event(step=0, wall_time=at, summary=summary))

    def session_ends(self, folder: str, at: float) -> None:
        ended = SessionEndInfo(status=Status.STATUS_SUCCESS, end_time_secs=at)
        content = metadata.create_summary_metadata(HParamsPluginData(session_end_info=ended))
        summary = Summary()
        summary.value.add(tag=metadata.SESSION_END_INFO_TAG, metadata=content, tensor=metadata.NULL_TENSOR)
        self._add(folder, Event(step=0, wall_time=at, summary=summary))

    def image(self, folder: str, tag: str, png: bytes, step: int, at: float) -> None:
        width, height = (int.from_bytes(png[start : start + 4]) for start in (16, 20))  # the header of every PNG
        image = Summary.Image(width=width, height=height, encoded_image_string=png)
        summary = Summary(value=[Summary.Value(tag=tag, image=image)])
        self._add(folder, Event(step=step, wall_time=at, summary=summary))

    def _add(self, folder: str, event: Event) -> None:
        if folder not in self._files:
            self._files[folder] = self._open(folder)
        RecordWriter(self._files[folder]).write(event.SerializeToString())

    def _open(self, folder: str) -> BinaryIO:
        make_folder(self._root / folder)
        seconds, nanoseconds = divmod(time.time_ns(), 10**9)  # TensorBoard reads files in the order of their names
        path = self._root / folder / f"events.out.tfevents.{seconds:010}.{nanoseconds:09}.async-grpo"
        file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")
        for event in (Event(file_version="brain.Event:2"), _session_starts(0)):  # TensorBoard forgets an earlier board
            RecordWriter(file).write(event.SerializeToString())
        return file


def _session_starts(step: int) -> Event:
    """An event after which TensorBoard drops what it has read of this step and later ones."""
    return Event(step=step, session_log=SessionLog(status=SessionLog.START))
