"""A node that a test plays, and jobs and groups for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from async_grpo.nodes.node import SentJob
from async_grpo.queue.codec import decode_job, encode_group
from async_grpo.records import Job, RolloutGroup


class FakeVersions:
    """Weights that need not be sent: the node has what a test says."""

    def __init__(self, newest: int = 0) -> None:
        self.at = newest

    def newest(self) -> int | None:
        return self.at

    def pieces(self, since: int | None) -> Iterator[Any]:
        return iter(())


class FakeFarNode:
    """Answers each exchange with what `work` makes of the jobs that it has.

    Args:
        work: takes a sent job and the job; returns a group, a reason for a failure, or None: not yet.
    """

    def __init__(self, work: Callable[[SentJob, Job], RolloutGroup | str | None], *, workers: int = 2) -> None:
        self._work, self._workers = work, workers
        self.version: int | None = 0
        self.scored = 0  # of its groups, those that get their rewards
        self.is_silent = False
        self.death: Exception | None = None  # what each call says from then on
        self.sent: list[SentJob] = []
        self.killed = False
        self.late = 0  # pieces of weights that will not arrive in time
        self.patience: list[float] = []  # with each piece
        self._have: list[tuple[SentJob, Job]] = []

    def exchange(self, jobs: Sequence[SentJob], states: bytes) -> Future[dict[str, Any]]:
        answer: Future[dict[str, Any]] = Future()
        self.sent += jobs
        self._have += [(sent, decode_job(sent.data)) for sent in jobs]
        if self.death is not None:
            answer.set_exception(self.death)
        elif not self.is_silent:
            answer.set_result(self._answer())
        return answer

    def receive(self, about: dict[str, Any], data: Any) -> Future[dict[str, Any]]:
        answer: Future[dict[str, Any]] = Future()
        is_late, self.late = self.late > 0, max(0, self.late - 1)
        self.patience.append(about["patience_s"])
        answer.set_result({"published": self.version, "why": "", "busy": False, "late": is_late})
        return answer

    def end(self, finished: bool) -> Future[None]:
        answer: Future[None] = Future()
        answer.set_result(None)
        return answer

    def kill(self) -> None:
        self.killed = True

    def _answer(self) -> dict[str, Any]:
        done = [(sent, job, self._work(sent, job)) for sent, job in self._have]
        self._have = [(sent, job) for sent, job, result in done if result is None]
        return {
            "groups": [(job.seq, encode_group(result)) for _, job, result in done if isinstance(result, RolloutGroup)],
            "failures": [(job.seq, result) for _, job, result in done if isinstance(result, str)],
            "log": [],
            "workers": self._workers,
            "scored": self.scored,
            "version": self.version,
            "refused": "",
            "gave_up": "",
            "waited_s": 0.0,
        }
