"""Files of TensorBoard events that grow from look to look. TensorBoard's own protos and record writer, no torch."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.plugins.histogram.summary_v2 import histogram_pb
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

if TYPE_CHECKING:
    from numpy.typing import NDArray


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
