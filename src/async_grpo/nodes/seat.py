"""One far node, as the server's machine sees it: a worker of the queue whose work is done elsewhere.

A thread exchanges jobs for groups, and another sends weights. What the node has is handed back with the same attempt
where the node is lost; only a failure that the node reports counts.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections import deque
from collections.abc import Container, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from async_grpo.archive.disk_space import retry_while_full
from async_grpo.errors import MOST_OF_A_REASON, AsyncGRPOError, BadGroupError, PeerDiedError
from async_grpo.log import logger
from async_grpo.nodes.node import SentJob
from async_grpo.nodes.sending import PublishedVersions, WeightsPiece
from async_grpo.queue import Claim, WorkerQueue
from async_grpo.queue.codec import decode_group, encode_job
from async_grpo.queue.names import NOT_TRAINED_ON
from async_grpo.rundir.files import LineFile
from async_grpo.rundir.reading import LineReader
from async_grpo.rundir.run_plan import RunPlan
from async_grpo.telemetry.activity import GENERATING, Activity
from async_grpo.telemetry.nodes_file import NodeRecord
from async_grpo.telemetry.waiting import wait_until

SILENCE_S = 10.0  # without an answer a node is lost
HUNGRY_S = 0.02  # a node that has capacity for jobs is asked for so often
BUSY_S = 0.25
HEAD_START_S = 2.0  # that other workers have with a job that failed on this node
WEIGHTS_POLL_S = 0.005
PIECE_S = 600.0  # for a piece of weights to arrive and to be written
PATIENCE_S = 10.0  # for a piece to arrive, and its time on a slow link; then it is sent again, with twice the patience
SLOW_BYTES_PER_S = 25e6
MOST_PATIENCE_S = 300.0
COLOUR = re.compile(r"\x1b\[\d*m")  # Ray writes the names of calls in one
FIRST_WORDS = "The actor died unexpectedly before finishing this task. "  # of Ray; what follows says why
MOST_STATES = 1000  # lines of trainer_states.jsonl, an exchange


class NodeCalls(Protocol):
    """What can be asked of a node. Each call returns at once."""

    def exchange(self, jobs: Sequence[SentJob], states: bytes) -> Future[dict[str, Any]]: ...

    def receive(self, about: dict[str, Any], data: Any) -> Future[dict[str, Any]]:
        """As `ReceivedWeights.receive`, and `late`: the data has not arrived in `about["patience_s"]` seconds."""

    def end(self, finished: bool) -> Future[None]: ...

    def kill(self) -> None: ...


class NodeRefused(AsyncGRPOError):
    """A worker of a node has refused the setup, or the node cannot have workers."""


class NodeGaveUp(AsyncGRPOError):
    """The workers of a node have failed time and again."""

    exit_code = 1


class _SentExchange(NamedTuple):
    answer: Future[dict[str, Any]]
    sent: float


class _Skipped(Container[int]):
    """Jobs that this node does not claim now."""

    def __init__(self, failed: Container[int], *, evaluations: bool) -> None:
        self._failed, self._evaluations = failed, evaluations

    def __contains__(self, seq: object) -> bool:
        return seq in self._failed or (self._evaluations and isinstance(seq, int) and seq >= NOT_TRAINED_ON)


class FarNodeSeat:
    """Serves one node, from its first exchange to its end.

    Args:
        queue: of the run, opened for this node.
        name: of the machine.
        workers: of the node.
        states: `trainer_states.jsonl` of the run.
        log: the last words of the node's workers are appended there.
        figures: what it has cost is written there.
    """

    def __init__(
        self,
        calls: NodeCalls,
        queue: WorkerQueue,
        versions: PublishedVersions,
        plan: RunPlan,
        *,
        name: str,
        workers: int,
        states: Path,
        log: Path,
        activity: Activity,
        figures: NodeRecord,
    ) -> None:
        self._calls, self._queue, self._versions, self._plan = calls, queue, versions, plan
        self._name, self._workers, self._activity = name, workers, activity
        self._states, self._log, self._figures = LineReader(states), LineFile(log), figures
        self._claims: dict[int, Claim] = {}
        self._failed: dict[int, float] = {}  # job that failed here -> when (monotonic seconds)
        self._waiting: deque[_SentExchange] = deque()
        self._published: int | None = None  # version that the node's workers can see
        self._alive = self._scored = 0  # workers of the node; groups that they score
        self._waited_s, self._looked = 0.0, time.monotonic()  # for the answer that is due
        self._done = threading.Event()
        self._trouble: BaseException | None = None  # of the thread that sends weights
        self._patience = 1  # doubled with each piece that does not arrive

    def serve(self, goes_on: threading.Event) -> None:
        """Exchange until `goes_on` is cleared.

        Raises:
            PeerDiedError: the node is gone, or silent.
            NodeRefused: it cannot work.
        """
        sender = threading.Thread(target=self._send_guarded, name=f"weights-{self._name}", daemon=True)
        sender.start()
        try:
            while goes_on.is_set():
                self._exchange()
        finally:
            self._done.set()
            self._log.close()
            for seq in list(self._claims):
                self._activity.no_longer_has(seq)

    # Jobs and groups

    def _exchange(self) -> None:
        if self._waited_s == 0.0:
            self._looked = time.monotonic()
        if self._trouble is not None:
            raise PeerDiedError(f"cannot get its weights: {words_of(self._trouble)}") from self._trouble
        capacity = self._capacity()
        claims = self._queue.claim(capacity, skip=self._skipped()) if capacity else []
        if claims or not self._waiting:
            self._send(claims)
        oldest = self._waiting[0]
        try:
            answer = oldest.answer.result(HUNGRY_S if capacity else BUSY_S)
        except NotYet:
            self._wait_on()
            return
        except Exception as error:
            raise PeerDiedError(f"is gone: {words_of(error)}") from error
        self._waiting.popleft()
        self._waited_s = 0.0
        self._figures.exchange_ms = round(1000 * (time.monotonic() - oldest.sent - answer["waited_s"]), 2)
        self._take(answer)

    def _wait_on(self) -> None:
        """Count the silence in looks: a gate that was itself stopped for a while has heard nothing either."""
        now = time.monotonic()
        self._waited_s += min(now - self._looked, 1.0)
        self._looked = now
        if self._waited_s > SILENCE_S:
            raise PeerDiedError(f"has not answered for {SILENCE_S:g} s")

    def _send(self, claims: Sequence[Claim]) -> None:
        """Claimed jobs must not be sampled by weights older than the newest when they were claimed."""
        jobs = []
        newest = self._versions.newest() if claims else None
        for claim in claims:
            self._claims[claim.job.seq] = claim
            jobs.append(SentJob(newest or 0, claim.attempt, encode_job(claim.job)))
        self._activity.has_jobs((claim.job.seq for claim in claims), GENERATING)
        self._waiting.append(_SentExchange(self._calls.exchange(jobs, self._new_states()), time.monotonic()))

    def _capacity(self) -> int:
        """As `Worker._capacity` has it, for all workers of the node."""
        if not self._alive or self._published is None or not self._queue.served():
            return 0
        mine, pending = max(0, len(self._claims) - self._scored), self._queue.pending()
        share = math.ceil((pending + mine) * self._workers / max(self._workers, self._queue.alive_workers()))
        most: float = math.inf
        if self._plan.training.deterministic:
            most = self._workers
        elif self._plan.work.groups_per_claim:
            most = self._workers * self._plan.work.groups_per_claim
        return max(0, int(min(most, share)) - mine)

    def _skipped(self) -> _Skipped:
        """An evaluation is of one version: a node that does not have it yet takes none."""
        now, others = time.monotonic(), self._queue.alive_workers() > self._workers
        self._failed = {seq: when for seq, when in self._failed.items() if now - when < HEAD_START_S}
        is_behind = self._published != self._versions.newest()
        return _Skipped(self._failed.keys() if others else (), evaluations=is_behind)

    def _take(self, answer: dict[str, Any]) -> None:
        for line in answer["log"]:
            self._log.append(line)
        self._alive, self._scored, self._published = int(answer["workers"]), int(answer["scored"]), answer["version"]
        for seq, data in answer["groups"]:
            self._complete(int(seq), bytes(data))
        for seq, reason in answer["failures"]:
            self._fail(int(seq), str(reason))
        if self._alive:
            self._activity.doing(GENERATING, version=self._published)
            if not self._claims:
                self._activity.waits("jobs", on=["server"])
        self._activity.flush()
        if answer["refused"]:
            raise NodeRefused(f"on node {self._name}: {answer['refused']}")
        if answer["gave_up"]:
            raise NodeGaveUp(answer["gave_up"])

    def _complete(self, seq: int, data: bytes) -> None:
        if (claim := self._claims.pop(seq, None)) is None:
            return
        group = decode_group(bytearray(data))
        group = replace(group, job=claim.job, attempt=claim.attempt, worker=self._queue.name, node=self._name)
        try:
            retry_while_full(lambda: self._queue.complete(claim, group), should_stop=self._done.is_set)
        except BadGroupError as error:
            self._queue.fail(claim, str(error))
        self._figures.bytes += len(data)
        self._activity.no_longer_has(seq, done=True)

    def _fail(self, seq: int, reason: str) -> None:
        if (claim := self._claims.pop(seq, None)) is None:
            return
        self._failed[seq] = time.monotonic()
        retry_while_full(
            lambda: self._queue.fail(claim, f"on node {self._name}: {reason}"), should_stop=self._done.is_set
        )
        self._activity.no_longer_has(seq, failed=True)

    def _new_states(self) -> bytes:
        """Whole lines of `trainer_states.jsonl` that the node does not have yet."""
        return "".join(f"{line}\n" for line in islice(self._states.new_lines(), MOST_STATES)).encode()

    # Weights, in a thread of their own: a long transfer is no silence

    def _send_guarded(self) -> None:
        try:
            self._send_weights()
        except Exception as error:  # noqa: BLE001 - raised in the thread that exchanges
            self._trouble = error

    def _send_weights(self) -> None:
        has: int | None = None
        while not self._done.is_set():
            newest = self._versions.newest()
            if newest is None:
                self._done.wait(HUNGRY_S)
                continue
            if has == newest:
                time.sleep(WEIGHTS_POLL_S)
                continue
            has = self._send_version(has)

    def _send_version(self, has: int | None) -> int | None:
        """Bring the node to the newest version; returns the one that it has then."""
        began, sent, kinds = time.monotonic(), 0, set()
        for piece in self._versions.pieces(has):
            asked = time.monotonic()
            patience_s = min(MOST_PATIENCE_S, self._patience * (PATIENCE_S + piece.nbytes / SLOW_BYTES_PER_S))
            answer = self._await(self._calls.receive({**piece.about, "patience_s": patience_s}, piece.data))
            if answer["late"]:
                self._put_again(piece, patience_s)
                return has
            if answer["why"]:
                logger.warning("{} asks for the whole weights: {}", self._name, answer["why"])
                return None
            if answer["busy"]:  # workers read every slot
                return has
            if piece.about["kind"] == "whole":
                self._versions.took(piece.nbytes, time.monotonic() - asked)
            sent += piece.nbytes
            kinds.add(piece.about["kind"])
            has = self._published = answer["published"]
        seconds, now = time.monotonic() - began, self._figures
        now.weights_s, now.weights_bytes, now.bytes = round(seconds, 4), sent, now.bytes + sent
        now.deltas, now.wholes = now.deltas + ("delta" in kinds), now.wholes + ("whole" in kinds)
        return has

    def _put_again(self, piece: WeightsPiece, waited_s: float) -> None:
        """Ray may fetch a copy from a machine that is lost."""
        logger.warning(
            "weights have not arrived on {} within {:.0f} s, as where another machine is lost: they are sent again",
            self._name,
            waited_s,
        )
        self._versions.put_again(piece)
        self._patience *= 2

    def _await(self, answer: Future[dict[str, Any]]) -> dict[str, Any]:
        return wait_until(
            lambda: answer.result() if answer.done() else None,
            what=f"weights to arrive on {self._name}",
            timeout_s=PIECE_S,
            check_peer=self._check,
            poll_s=WEIGHTS_POLL_S,
        )

    def _check(self) -> None:
        if self._done.is_set():
            raise PeerDiedError(f"{self._name} is not served any more")


def words_of(error: BaseException) -> str:
    """What Ray says of a lost actor, without its ids; of an error of our own there, what a traceback ends with."""
    text = COLOUR.sub("", str(error)).strip()
    lines = (text or type(error).__name__).splitlines()
    if lines[0].startswith("ray::"):
        return lines[-1]
    said = " ".join(line for line in lines if not line.startswith(("\t", " ")))
    return said.removeprefix(FIRST_WORDS).partition(" Some common causes")[0][:MOST_OF_A_REASON]
