"""A worker that generates batch by batch: claim some groups, adopt the newest weights, generate them all, go on."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from async_grpo.errors import GeneratorError, PeerDiedError, WaitTimeoutError
from async_grpo.queue import Claim
from async_grpo.records import Timings
from async_grpo.rollout.worker import (
    IDLE_WAKE_S,
    SCORING_WAKE_S,
    WEIGHTS_WAIT_S,
    Rollout,
    StopWorking,
    Worker,
    check_server,
)
from async_grpo.rundir.paths import SERVER
from async_grpo.telemetry.activity import ADOPTING, GENERATING, SCORING, activity
from async_grpo.telemetry.waiting import Reminder

if TYPE_CHECKING:
    from async_grpo.rollout.engines.vllm_server import ServedPolicy, VLLMServer
    from async_grpo.rollout.policy import PolicyWeights
    from async_grpo.rollout.trl_trainer import GeneratedGroup


ISSUING_S = 0.002  # longer than the server takes to issue the next job of a round


@dataclass(slots=True)
class _Batch:
    """Claims that are generated together, and which of them have been handed over to scoring."""

    claims: list[Claim]
    version: int
    adopt_s: float  # that no group has been charged with yet
    since: float  # when groups were last handed over, or generation began (monotonic seconds)
    done: set[int] = field(default_factory=set)  # indices of claims

    def left(self) -> list[Claim]:
        return [claim for index, claim in enumerate(self.claims) if index not in self.done]

    def share(self, groups: int) -> Timings:
        """What each of the groups is charged with that are handed over now: an equal share of the time since then."""
        now = time.monotonic()
        timings = Timings(adopt_s=self.adopt_s / groups, generate_s=(now - self.since) / groups)
        self.adopt_s, self.since = 0.0, now
        return timings


class BatchWorker(Worker):
    """For engines that generate a batch to its end, as `generate` of transformers does.

    Args:
        server: generates in place of the worker's own model, which then only carries the weights to it.
    """

    def __init__(self, *, server: VLLMServer | None = None, **surroundings: Any) -> None:
        super().__init__(**surroundings)
        from async_grpo.rollout.policy import PolicyWeights

        policy = PolicyWeights(self._weights, self._trainer.model)
        self._policy: PolicyWeights | ServedPolicy = policy
        if server is not None:
            from async_grpo.rollout.engines.vllm_server import ServedPolicy

            self._policy = ServedPolicy(self._weights, policy, server)
            self._trainer.generator = server
        self._trainer.generator.on_step = self._between_tokens
        self._publishing = False  # between two tokens

    def _work(self) -> None:
        reminder = Reminder(self._waiting_for, lambda: [SERVER])
        while not self._stop and self._run_goes_on():
            claims = self._claim()
            if claims:
                self._serve(claims)
                reminder = Reminder(self._waiting_for, lambda: [SERVER])
            elif self._scoring.busy:
                activity.doing(SCORING)
                self._publish_scored(timeout_s=SCORING_WAKE_S)
            else:
                reminder.tick()
                self._queue.wait(IDLE_WAKE_S, skip=self._better_left_to_others())

    def _serve(self, claims: list[Claim]) -> None:
        started = time.monotonic()
        activity.doing(ADOPTING)
        try:
            version = self._adopt(needed=max(claim.job.min_version for claim in claims))
        except (StopWorking, PeerDiedError):
            self._hand_back(claims)
            return
        except BaseException:  # no fault of the jobs: others may have them
            self._hand_back(claims)
            raise
        adopted = time.monotonic()
        self.statistics.add("weight adoption", adopted - started)
        batch = _Batch(claims, version, adopted - started, since=adopted)
        try:
            activity.doing(GENERATING, version=version)
            generated = self._generate(batch)
        except StopWorking:
            self._hand_back(batch.left())
            return
        except GeneratorError:  # no fault of the jobs: others may have them
            self._hand_back(batch.left())
            raise
        except Exception:  # the user's tools run inside: whatever they raise belongs to the job
            if self._publishing:  # but this is our own
                raise
            self._serve_one_by_one(batch.left(), traceback.format_exc())
            return
        self.statistics.add("generation", time.monotonic() - adopted)
        self._hand_over(batch, generated)
        self._publish_scored(timeout_s=0)

    def _serve_one_by_one(self, claims: list[Claim], error: str) -> None:
        """A batch failed: find the job that is to blame, so that it costs only itself."""
        if len(claims) == 1:
            self._failed(claims[0], error)
        else:
            for claim in claims:
                self._serve([claim])

    def _generate(self, batch: _Batch) -> dict[int, GeneratedGroup]:
        """All groups of the batch, by index; some may have been handed over before the last one was done."""
        self._trainer.state.global_step = batch.version  # what a reward function sees as `trainer_state`
        generated: dict[int, GeneratedGroup] = {}
        try:
            parts = [range(len(batch.claims))] if not self._deterministic else [[i] for i in range(len(batch.claims))]
            for part in parts:
                generated.update(zip(part, self._generate_part(batch, part), strict=True))
        finally:
            self._policy.release()
        return generated

    def _generate_part(self, batch: _Batch, part: Sequence[int]) -> list[GeneratedGroup]:
        import torch

        jobs = [batch.claims[index].job for index in part]
        torch.manual_seed(jobs[0].seed)
        # Scored here and now, a group waits until all are generated: the weights are not to be held meanwhile.
        hand_over = partial(self._hand_over, batch) if self._score_beside else None
        return self._trainer.generate_groups([job.row for job in jobs], jobs[0].num_generations, hand_over)

    def _hand_over(self, batch: _Batch, groups: dict[int, GeneratedGroup]) -> None:
        """Have those of the groups scored that are not yet, and published once they are."""
        new = {index: group for index, group in groups.items() if index not in batch.done}
        if not new:
            return
        share = batch.share(len(new))
        for index, group in new.items():
            batch.done.add(index)
            self._score(Rollout(batch.claims[index], batch.version, share), group)

    def _adopt(self, needed: int) -> int:
        """Take on the newest weights, at least version `needed`; they stay readable until `release()`."""
        deadline = time.monotonic() + WEIGHTS_WAIT_S
        reminder = Reminder(lambda: f"version {needed} of the weights", lambda: [SERVER])
        while (version := self._policy.adopt(WEIGHTS_WAIT_S)) < needed:
            self._policy.release()
            if self._stop:
                raise StopWorking
            if time.monotonic() > deadline:
                raise WaitTimeoutError(f"Version {needed} of the weights did not appear in {WEIGHTS_WAIT_S:.0f} s.")
            check_server(self._run)
            reminder.tick()
            time.sleep(0.002)
        return version

    def _between_tokens(self) -> None:
        activity.progress()
        if self._stop:
            raise StopWorking
        if self._scoring.busy:
            self._publishing = True
            self._publish_scored(timeout_s=0)
            self._publishing = False

    def _room(self) -> int:
        """An even share of what is pending, and at most one round: so many rows TRL would generate at once, too."""
        enough = self._groups_per_claim or self._groups_per_round
        pending = once_issued(self._queue.pending, enough)
        if self._groups_per_claim is not None:
            return self._groups_per_claim
        return max(1, min(enough, math.ceil(pending / max(1, self._queue.alive_workers()))))


def once_issued(pending: Callable[[], int], enough: int) -> int:
    """How many jobs are pending when there are `enough`, or no more of them are being issued.

    The server issues a round job by job, and a batch of its first few takes nearly as long as one of them all.
    """
    before, now = 0, pending()
    while before < now < enough:
        time.sleep(ISSUING_S)
        before, now = now, pending()
    return now
