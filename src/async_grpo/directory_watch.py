"""Waking when a directory changes: inotify through ctypes, a slow look where the kernel has none to give.

An instance or a watch may be refused (128 instances a user is a usual limit) and events may overflow, so
nobody may rely on an event: a waiter is told when it must look for itself, and looks once in a while anyhow.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

IN_MODIFY, IN_MOVED_TO, IN_CREATE = 0x2, 0x80, 0x100
_IN_Q_OVERFLOW, _IN_UNMOUNT, _IN_IGNORED, _IN_DELETE_SELF, _IN_MOVE_SELF = (
    0x4000,
    0x2000,
    0x8000,
    0x400,
    0x800,
)
_BLINDING = _IN_Q_OVERFLOW | _IN_UNMOUNT | _IN_IGNORED | _IN_DELETE_SELF | _IN_MOVE_SELF
_EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name that follows

BLIND_RESCAN_S = 0.02  # between looks without inotify


@dataclass(slots=True)
class Woken:
    """What a wait ended with."""

    names: list[str] = field(default_factory=list)  # files that changed, as events gave them
    ready: list[int] = field(default_factory=list)  # descriptors of `also` that became readable
    look: bool = False  # events may be missing: list the directory yourself


class DirectoryWatch:
    """Watch directories for `{path: mask}`; events that come between two waits are kept for the next."""

    def __init__(self, masks: Mapping[Path, int]) -> None:
        self._fd = _inotify(masks)

    @property
    def blind(self) -> bool:
        """Whether the kernel gave no inotify, so that every wait is a short sleep."""
        return self._fd < 0

    def wait(self, timeout_s: float, also: Iterable[int] = ()) -> Woken:
        """Sleep until something changes, a descriptor of `also` is readable, or the time is over."""
        poll = select.poll()
        others = list(also)
        for fd in others if self.blind else (self._fd, *others):
            poll.register(fd, select.POLLIN)
        limit_s = min(timeout_s, BLIND_RESCAN_S) if self.blind else timeout_s
        ready = [fd for fd, _ in poll.poll(max(0, -int(-limit_s * 1000 // 1)))]
        woken = Woken(ready=[fd for fd in ready if fd != self._fd], look=self.blind)
        if self._fd in ready:
            self._read(woken)
        return woken

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read(self, woken: Woken) -> None:
        try:
            events = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return
        at = 0
        while at < len(events):
            _, mask, _, length = _EVENT.unpack_from(events, at)
            at += _EVENT.size + length
            if mask & _BLINDING:
                woken.look = True
            elif length:
                woken.names.append(os.fsdecode(events[at - length : at].rstrip(b"\0")))


def _inotify(masks: Mapping[Path, int]) -> int:
    """A descriptor that watches every directory, or -1 when the kernel gives none."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    except AttributeError:  # a C library without inotify
        return -1
    for path, mask in masks.items():
        if fd >= 0 and libc.inotify_add_watch(fd, os.fsencode(path), mask | _IN_DELETE_SELF | _IN_MOVE_SELF) < 0:
            os.close(fd)
            fd = -1
    return fd


def sleep_until(deadline: float, at_most_s: float) -> float:
    """Seconds that a wait may still last: up to `at_most_s`, never past the (monotonic) deadline."""
    return max(0.0, min(deadline - time.monotonic(), at_most_s))
