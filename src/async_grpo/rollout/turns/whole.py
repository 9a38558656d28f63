"""Code of the user's from prompts to completions: a `rollout_func`, an override of TRL's generation.

It is one function, which asks for tokens in its middle, so it runs in a thread. Only one runs at a time: it need not be
thread-safe. While it waits for tokens, others run.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from async_grpo.engines import Fields, PreparedGroup, SampledGroup
from async_grpo.errors import PeerDiedError, WaitTimeoutError
from async_grpo.rollout.threads import KeptThreads, refusing_signals
from async_grpo.rollout.turns.asks import Asks, as_exception
from async_grpo.tokens import ids_and_logprobs

if TYPE_CHECKING:
    from async_grpo.records import Job
    from async_grpo.rollout.trl_group import GeneratedGroup
    from async_grpo.rollout.trl_trainer import Images, RolloutTrainer, Sampled

T = TypeVar("T")
TURN_WAIT_S = 4 * 3600.0  # for the completions of one turn; the worker's thread is watched meanwhile
LOOK_S = 5.0  # waiting code looks this often whether the worker's thread is alive


class Threads:
    """Runs functions beside the event loop that awaits them."""

    def __init__(self) -> None:
        self._threads = KeptThreads()

    async def run(self, work: Callable[[], T], name: str) -> T:
        """What `work` returns. Raises what it raised; `UserCodeExit` for what would end the loop."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[T] = loop.create_future()

        def in_thread() -> None:
            try:
                end = partial(ended.set_result, work())
            except BaseException as raised:  # noqa: BLE001  # of the user's code: it belongs to the job
                end = partial(ended.set_exception, as_exception(raised))
            with contextlib.suppress(RuntimeError):  # the loop is closed: the worker has ended
                loop.call_soon_threadsafe(lambda: ended.done() or end())

        self._threads.run(in_thread, name)
        return await ended


class WholeGenerations:
    """Runs TRL's generation as one function, on a copy of the trainer for each. `worker_thread` steps the loop."""

    def __init__(self, asks: Asks, threads: Threads, worker_thread: threading.Thread) -> None:
        self._asks = asks
        self._threads = threads
        self._worker_thread = worker_thread
        self._alone = threading.Lock()

    async def run(self, trl: RolloutTrainer, jobs: Sequence[Job], version: int) -> list[GeneratedGroup]:
        """The groups of the jobs, generated together."""
        turns: list[SampledGroup] = []
        loop = asyncio.get_running_loop()

        def sample(prompt_ids: list[list[int]], images: Images = None, fields: Fields | None = None) -> Sampled:
            job = replace(jobs[0], sampling=trl.sampling_of(jobs[0]))
            group = PreparedGroup(
                job=job,
                version=version,
                prompt_ids=[list(ids) for ids in prompt_ids],
                images=images,
                fields=(fields,) if fields else (),
                turn=len(turns),
            )
            self._alone.release()
            try:
                turns.append(self._wait(asyncio.run_coroutine_threadsafe(self._asks.sampled(group), loop)))
            finally:
                self._alone.acquire()
            return ids_and_logprobs(turns[-1].tokens)

        def work() -> list[GeneratedGroup]:
            with self._alone, refusing_signals():
                return trl.generate(jobs, version, sample)

        made = await self._threads.run(work, name=f"group {jobs[0].seq}")
        return [noted(group, turns) for group in made]

    def _wait(self, sampled: Future[SampledGroup]) -> SampledGroup:
        deadline = time.monotonic() + TURN_WAIT_S
        while not wait([sampled], LOOK_S).done:
            if not self._worker_thread.is_alive():
                raise PeerDiedError("The worker's thread has ended.")
            if time.monotonic() > deadline:
                raise WaitTimeoutError(f"Timed out after {TURN_WAIT_S:.0f} s waiting for the engine's tokens.")
        return sampled.result()


def noted(group: GeneratedGroup, turns: Sequence[SampledGroup]) -> GeneratedGroup:
    """The group with what the engine noted of the tokens that it sampled.

    A later turn's prompt is the group's prompt and the completion so far, and its rows are in the completions' order.
    """
    all_sampled = [sampled for turn in turns for sampled in turn.tokens]
    names_versions = any(sampled.names_versions for sampled in all_sampled)
    if not (names_versions or any(sampled.names_kept for sampled in all_sampled)):
        return group
    tokens = [*group.tokens]
    for turn in turns:
        row = 0
        for prompt, sampled in zip(turn.prepared.prompt_ids, turn.tokens, strict=True):
            while not _continues(group, row, prompt, sampled.ids):
                row += 1
            tokens[row] = tokens[row].noted(len(prompt) - len(group.prompt_ids[row]), sampled)
            row += 1
    noted = replace(group, tokens=tokens)
    if names_versions:
        noted = replace(group, tokens=[each.of_version(noted.version) for each in tokens])
    return noted


def _continues(group: GeneratedGroup, row: int, prompt: list[int], ids: list[int]) -> bool:
    """Whether `prompt` and then `ids`, which TRL may have cut, is how the row's prompt and completion begin."""
    whole = group.prompt_ids[row] + group.tokens[row].ids
    return whole[: len(prompt)] == prompt and ids[: len(whole) - len(prompt)] == whole[len(prompt) :][: len(ids)]
