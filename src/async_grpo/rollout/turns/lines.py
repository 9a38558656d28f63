"""Lines of calls, each of one tool that is not thread-safe: a thread makes them one after another.

The event loop runs only between two steps of the engine. If it began each call, one call would be made in a step.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable


class Waiting:
    """A call in a line.

    Args:
        make: makes it, and raises nothing.
        refuse: says that nobody will make it.
    """

    def __init__(self, make: Callable[[], None], refuse: Callable[[Exception], None]) -> None:
        self.make, self.refuse = make, refuse
        self._began: float | None = None  # monotonic seconds

    def begin(self) -> None:
        self._began = time.monotonic()

    def seconds_left(self, timeout_s: float) -> float:
        """Seconds that are left of its time, which begins with the call."""
        return timeout_s if self._began is None else self._began + timeout_s - time.monotonic()


class WaitingLine:
    """The calls of one tool. Used by the event loop, and by the thread that makes them."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._waiting: deque[Waiting] = deque()
        self._made: Waiting | None = None  # the call that is being made

    def __len__(self) -> int:
        return len(self._waiting)

    def join(self, call: Waiting) -> None:
        with self._changing:
            self._waiting.append(call)

    def make(self) -> None:
        """Make the calls that wait now, in their order, up to one that is left behind."""
        for _ in range(len(self._waiting)):
            with self._changing:
                if not self._waiting:
                    return
                call = self._made = self._waiting.popleft()
                call.begin()
            call.make()
            with self._changing:
                if self._made is not call:
                    return
                self._made = None

    def leave(self, call: Waiting) -> bool:
        """Have the line go on without this call; returns whether it is being made, so its thread is left behind."""
        with self._changing:
            if self._made is call:
                self._made = None
                return True
            if call in self._waiting:
                self._waiting.remove(call)
            return False

    def refuse(self, error: Exception) -> None:
        """No call that waits will be made."""
        with self._changing:
            refused, self._waiting = list(self._waiting), deque()
        for call in refused:
            call.refuse(error)
