"""Prompt groups that one policy version is asked for: issued, answered by the workers, and collected.

It goes through the queue that training uses. Evaluations and `roles.row_sampler` share it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from async_grpo.errors import DiskFullError, WaitTimeoutError
from async_grpo.formatting import counted, eta
from async_grpo.log import logger
from async_grpo.queue import ServerQueue
from async_grpo.queue.server import MAX_OPEN
from async_grpo.records import Job, Purpose, RolloutGroup
from async_grpo.telemetry.activity import EVALUATING, activity
from async_grpo.telemetry.waiting import Reminder

REASON_CHARACTERS = 300  # so that the line of an evaluation stays one that is read again
PATIENCE_S = 1800.0  # without one answered problem
SAY_EVERY_S = 5.0
WAKE_S = 0.5
_WORDS: Final = {"eval": "evaluation", "generate": "generation"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """Asks for completions of a problem: what a plan of `generate` yields.

    Attributes:
        sampling: as `Job.sampling` has it. Without `max_tokens`, prefix and continuation are together as long as the
            setup file lets completions be.
    """

    problem: int  # index of its row in the dataset
    samples: int = 1  # how many
    prefix_ids: tuple[int, ...] = ()  # tokens that each of them begins with
    sampling: dict[str, Any] = field(default_factory=dict)


Plan: TypeAlias = Generator[Sequence[SampleRequest], Sequence[RolloutGroup | None], None]
"""Yields waves of requests, and is sent their groups, each at the index of its request; None: it has failed."""


class Asking:
    """Jobs on their way to the workers and back. Call `look` until none is left, or `wait`.

    Args:
        job_of: makes the job of an index with a sequence number. Only the number differs from call to call.
        take: gets each group with its index. What it raises is why that job counts as failed.
        version: the only version that workers can see until the end.
        finished: groups that an earlier process left; those that answer one of these jobs are used again.
    """

    def __init__(
        self,
        queue: ServerQueue,
        total: int,
        job_of: Callable[[int, int], Job],
        take: Callable[[int, RolloutGroup], None],
        *,
        purpose: Purpose,
        version: int,
        most_open: int,
        finished: Iterable[RolloutGroup] = (),
    ) -> None:
        self.total, self.version = total, version
        self._queue, self._job_of, self._take, self._purpose = queue, job_of, take, purpose
        self._most_open = most_open
        self._unissued = deque(range(total))
        self._open: dict[int, int] = {}  # sequence number -> index
        self._taken = 0
        self._disk_full = False
        self.first_seq = -1
        self.failed: dict[int, str] = {}  # index -> why it has no group
        by_seed = {group.job.seed: group for group in finished if group.policy_version == version}
        for index in list(self._unissued) if by_seed else ():
            group = by_seed.get(job_of(index, 0).seed)
            if group is not None and group.job == job_of(index, group.job.seq):
                self._unissued.remove(index)
                self._came_back(index, group)

    @property
    def done(self) -> int:
        """Jobs that are answered or have failed."""
        return self._taken + len(self.failed)

    def look(self) -> bool:
        """Take what is finished and issue more; whether every job is answered or has failed."""
        try:
            self._collect()
            self._issue()
        except DiskFullError as error:  # the next look tries again; the trainer makes space
            if not self._disk_full:
                logger.warning("{} The {} of version {} waits for room.", error, _WORDS[self._purpose], self.version)
            self._disk_full = True
            return False
        self._disk_full = False
        return not (self._open or self._unissued)

    def wait(self, should_stop: Callable[[], bool]) -> bool:
        """Look until every job is answered or has failed; False where the process was asked to stop.

        Raises:
            WaitTimeoutError: nothing was answered for long.
        """
        activity.doing(EVALUATING, version=self.version)
        pace = _Pace(self)
        with Reminder(lambda: f"answers from {counted(len(self._queue.workers()), 'worker')}") as reminder:
            while not self.look():
                if should_stop():
                    return False
                pace.tell()
                reminder.tick()
                self._queue.wait(WAKE_S)
        pace.tell()
        return True

    def _issue(self) -> None:
        while self._unissued and len(self._open) < self._most_open and self._queue.open_jobs < MAX_OPEN:
            job = self._job_of(self._unissued[0], self._queue.new_seq())
            self._queue.submit(job)
            self.first_seq = job.seq if self.first_seq < 0 else self.first_seq
            self._open[job.seq] = self._unissued.popleft()

    def _collect(self) -> None:
        for name in self._queue.finished(self._purpose):
            index = self._open.get(name.seq)
            group = self._queue.take(name)
            if group is not None and index is not None:
                self._came_back(index, group)
                del self._open[name.seq]
        for seq in [seq for seq in self._open if seq in self._queue.given_up]:
            self._failed(self._open.pop(seq), self._queue.given_up[seq].reason)

    def _came_back(self, index: int, group: RolloutGroup) -> None:
        versions = {group.policy_version}
        if group.token_versions is not None:
            versions |= set(group.token_versions.tolist())
        if versions != {self.version}:
            self._failed(index, f"it was answered by version {sorted(versions)}, not {self.version}")
            return
        try:
            self._take(index, group)
        except Exception as error:  # noqa: BLE001  # `final_answer` is the user's
            self._failed(index, f"{type(error).__name__}: {error}")
        else:
            self._taken += 1

    def _failed(self, index: int, reason: str) -> None:
        self.failed[index] = reason.strip().rsplit("\n", 1)[-1][:REASON_CHARACTERS]


class _Pace:
    """How far the answers are: for the bar on the screen, a line now and then, and the end of patience."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking
        self._done, self._began_with = -1, asking.done  # answers of an earlier process took no time now
        self._began = self._progress_at = self._said_at = time.monotonic()

    def tell(self) -> None:
        """Call it after each look. `WaitTimeoutError` where nothing was answered for long."""
        now, done, total = time.monotonic(), self._asking.done, self._asking.total
        if done != self._done:
            self._done, self._progress_at = done, now
            activity.evaluates(answered=done, problems=total, eta_s=self._eta_s(now))
        elif now > self._progress_at + PATIENCE_S:
            raise WaitTimeoutError(f"Timed out after {PATIENCE_S:.0f} s waiting for an answered problem.")
        if now > self._said_at + SAY_EVERY_S:
            self._said_at = now
            left = self._eta_s(now)
            logger.info("{} of {} problems answered, ETA {}", done, total, "?" if left is None else eta(left))

    def _eta_s(self, now: float) -> float | None:
        answered = self._done - self._began_with
        return (self._asking.total - self._done) * (now - self._began) / answered if answered else None
