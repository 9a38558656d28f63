"""A worker whose engine decodes many groups at once: groups join and leave between two steps of the engine.

    claim jobs while there is room  ->  adopt the newest weights  ->  start groups
    turns that groups began         ->  requests of the engine    ->  one step  ->  tokens back to their groups
    groups that have ended          ->  scored beside             ->  handed back

One thread does all of this but slow rewards, and the code of groups that wait for tokens in its middle
(`group_threads`). New weights: with `--in-flight-update off` no group starts until those in flight are done, and then
the weights are adopted (a LoRA adapter needs no such pause: old and new are kept side by side); with `on` they are
adopted between two steps, what was computed of the running requests is computed again with them, and every token knows
the version that sampled it.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import deque
from itertools import count
from typing import TYPE_CHECKING, Any

from async_grpo.errors import WaitTimeoutError
from async_grpo.queue import Claim
from async_grpo.records import Timings
from async_grpo.rollout.group_threads import GroupThreads
from async_grpo.rollout.in_flight import GroupCode, GroupInFlight, Turn, versions_of_tokens
from async_grpo.rollout.scoring import score_one
from async_grpo.rollout.whole_groups import WholeGroups
from async_grpo.rollout.worker import (
    IDLE_WAKE_S,
    SCORING_WAKE_S,
    WEIGHTS_WAIT_S,
    Rollout,
    StopWorking,
    Worker,
)
from async_grpo.rundir.paths import SERVER
from async_grpo.telemetry.activity import ADOPTING, GENERATING, SCORING, activity
from async_grpo.telemetry.waiting import Reminder
from async_grpo_ipc import ExporterDiedError

if TYPE_CHECKING:
    from async_grpo.rollout.engines.vllm import VLLMEngine

QUICK_CODE_S = 0.01  # a group's own code that takes longer runs beside the engine
LOOK_S = 0.02  # a worker whose engine is busy looks for jobs and weights this often
BREAK_OFF_S = 2.0  # that a worker which ends waits for code of groups in flight
WEIGHTS_POLL_S = 0.002  # a worker that has nothing to do but wait for weights looks for them this often


class StreamingWorker(Worker):
    """For an engine with continuous batching.

    Args:
        in_flight_update: adopt new weights while groups are in flight.
    """

    def __init__(self, *, engine: VLLMEngine, in_flight_update: bool, **surroundings: Any) -> None:
        super().__init__(**surroundings)
        self._engine = engine
        self._in_flight_update = in_flight_update
        kind = WholeGroups if self._trainer.samples_whole else GroupThreads
        self._code: GroupCode = kind(self._trainer, self._afterwards)
        self._scoring.on_done = self._code.wake
        self._held: deque[Claim] = deque()  # claimed, and waiting for newer weights
        self._held_since = 0.0
        self._groups: set[GroupInFlight] = set()
        self._requests: dict[str, tuple[Turn, int]] = {}  # request -> its turn and its place there
        self._request_ids = map(str, count())
        self._turns = 0  # that wait for tokens, each of another group
        self._version = -1  # of the engine's weights
        self._adopted: tuple[str, int] | None = None  # their generation and version
        self._draining = False  # newer weights wait until nothing is in flight
        self._adopt_s = 0.0  # spent on adopting since a group was started
        self._busy_clock = 0.0  # grows by an engine step's seconds, divided by the groups that shared it
        self._look_at = self._check_run_at = 0.0

    def _work(self) -> None:
        reminder = self._new_reminder()
        try:
            while not self._stop and self._goes_on():
                self._look()
                if self._engine.busy and not self._groups_are_quick():
                    self._step()
                for event in self._code.events(timeout_s=self._patience()):
                    self._submit(event) if isinstance(event, Turn) else self._ended(event)
                self._publish_scored(timeout_s=0)
                if self._groups or self._scoring.busy:
                    activity.doing(GENERATING if self._groups else SCORING)
                    reminder = self._new_reminder()
                    continue
                reminder.tick()
                if self._held:
                    time.sleep(WEIGHTS_POLL_S)
                else:
                    self._queue.wait(IDLE_WAKE_S, skip=self._better_left_to_others())
        finally:
            self._break_off()

    def _new_reminder(self) -> Reminder:
        return Reminder(self._waiting_for, lambda: [SERVER])

    def _waiting_for(self) -> str:
        if self._held:
            return f"version {min(claim.job.min_version for claim in self._held)} of the weights"
        return super()._waiting_for()

    def _goes_on(self) -> bool:
        now = time.monotonic()
        if now < self._check_run_at:
            return True
        self._check_run_at = now + (IDLE_WAKE_S if self._groups else 0)
        return self._run_goes_on()

    def _groups_are_quick(self) -> bool:
        """Whether a group's own code runs and has only just begun. Then the engine's thread leaves Python to it:
        short code is done sooner than the two would take by turns, and groups that start together decode together."""
        in_code = len(self._groups) > self._turns
        return in_code and time.monotonic() - self._code.code_since < QUICK_CODE_S

    def _patience(self) -> float:
        """How long to wait for groups: not at all while the engine should decode."""
        if self._engine.busy:
            return QUICK_CODE_S if self._groups_are_quick() else 0.0
        return SCORING_WAKE_S if self._groups or self._scoring.busy else 0.0

    # Jobs and weights

    def _look(self) -> None:
        """Claim what there is room for, adopt what is new, start what can be started, in this order: a job is never
        generated by weights that are older than the newest when it was claimed."""
        now = time.monotonic()
        if self._groups and now < self._look_at:
            return
        self._look_at = now + LOOK_S
        claims = self._claim()
        if claims and not self._held:
            self._held_since = now
        self._held += claims
        self._adopt_newest()
        self._start_groups()

    def _room(self) -> int:
        """An even share of what is pending or in flight here, as far as the engine's batch has room for it."""
        if self._draining:
            return 0
        mine = len(self._groups) + len(self._held)
        if self._deterministic:
            most = 1  # who shares a batch changes the bits
        else:
            most = self._groups_per_claim or max(1, self._engine.max_num_seqs // self._trainer.num_generations)
        if mine >= most:
            return 0
        workers = max(1, self._queue.alive_workers())
        fair = math.ceil((self._queue.pending() + mine) / workers)
        return max(0, min(most, fair) - mine)

    def _adopt_newest(self) -> None:
        newest = self._weights.version
        if newest is None or self._adopted == (self._weights.generation, newest):
            self._draining = False
            return
        in_flight = {group.version for group in self._groups}
        if not self._in_flight_update and len(in_flight) >= self._engine.versions_at_once:
            self._draining = self._engine.versions_at_once == 1
            return
        started = time.monotonic()
        activity.doing(ADOPTING)
        try:
            with self._weights.lease() as view:
                self._engine.load(dict(view.items()), view.version, in_use=in_flight)
                self._version = view.version
                self._adopted = (view.generation, view.version)
        except ExporterDiedError:  # nothing can be read any more; `_run_goes_on` waits for another
            return
        self._draining = False
        activity.doing(GENERATING, version=self._version)
        self._adopt_s += time.monotonic() - started
        self.statistics.add("weight adoption", time.monotonic() - started)

    def _start_groups(self) -> None:
        if self._server_died_at is not None:
            self._hand_back(list(self._held))
            self._held.clear()
        ready = [claim for claim in self._held if not self._draining and claim.job.min_version <= self._version]
        for group in self._code.start(ready, self._version) if ready else ():
            group.busy_s = -self._busy_clock
            group.adopt_s, self._adopt_s = self._adopt_s, 0.0
            self._groups.add(group)
            self._held.remove(group.claim)
        if self._groups:
            self._held_since = time.monotonic()
        elif self._held and time.monotonic() - self._held_since > WEIGHTS_WAIT_S:
            needed = min(claim.job.min_version for claim in self._held)
            raise WaitTimeoutError(f"Version {needed} of the weights did not appear in {WEIGHTS_WAIT_S:.0f} s.")

    # The engine

    def _submit(self, turn: Turn) -> None:
        """Make requests of a turn. What the engine refuses is the group's failure, nobody else's."""
        requests: list[str] = []
        for place, prompt_ids in enumerate(turn.prompt_ids):
            request = next(self._request_ids)
            version = self._version if self._in_flight_update else turn.group.version
            try:
                self._engine.submit(request, prompt_ids, seed=self._seed(turn, place), version=version)
            except ValueError as error:
                self._engine.abort(requests)
                for done in requests:
                    del self._requests[done]
                turn.fail(error)
                return
            self._requests[request] = (turn, place)
            requests.append(request)
        self._turns += 1

    def _seed(self, turn: Turn, place: int) -> int | None:
        """Of one completion: in deterministic mode the job's own, so that it is the same whoever samples it."""
        if not self._deterministic:
            return None
        text = f"{turn.group.claim.job.seed}:{turn.number}:{place}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1

    def _step(self) -> None:
        started = time.monotonic()
        chunks = self._engine.step()
        self._busy_clock += (time.monotonic() - started) / max(1, len(self._groups))
        activity.progress()
        for chunk in chunks:
            turn, place = self._requests[chunk.request_id]
            version = self._version if self._in_flight_update else turn.group.version
            turn.add(place, chunk.token_ids, chunk.logprobs, version, finished=chunk.finished)
            if chunk.finished:
                del self._requests[chunk.request_id]
                self._turns -= turn.complete

    # Groups that have ended

    def _ended(self, group: GroupInFlight) -> None:
        self._groups.discard(group)
        if group.error is not None:
            self._failed(group.claim, group.traceback)
            return
        assert group.group is not None
        self.statistics.add("generation", group.seconds)
        if group.result is not None:
            self._publish(group.result)
        else:
            activity.has_jobs([group.claim.job.seq], SCORING)
            self._scoring.start(self._rollout(group), group.group)

    def _afterwards(self, trainer: Any, group: GroupInFlight) -> Any:
        """What the user's code can make fail, so that it costs this group alone. Its scores, where scoring cannot wait:
        an environment is used again for the next group of the thread's trainer."""
        assert group.group is not None
        if self._in_flight_update:
            group.token_versions = versions_of_tokens(group.group, group.turns, group.oldest_version())
        if self._score_beside:
            return None
        return score_one(trainer.score, self._rollout(group), group.group)

    def _rollout(self, group: GroupInFlight) -> Rollout:
        return Rollout(
            group.claim,
            group.oldest_version(),
            Timings(adopt_s=group.adopt_s, generate_s=group.busy_s + self._busy_clock),
            group.token_versions,
        )

    def _break_off(self) -> None:
        """Nobody waits for the engine any more; the queue hands the groups' jobs back when it is closed."""
        self._engine.abort(list(self._requests))
        for turn in {turn for turn, _ in self._requests.values()}:
            turn.fail(StopWorking())
        deadline = time.monotonic() + BREAK_OFF_S
        while self._groups and time.monotonic() < deadline:
            for event in self._code.events(timeout_s=0.05):
                if isinstance(event, Turn):  # its code asks for tokens only now
                    event.fail(StopWorking())
                else:
                    self._groups.discard(event)
