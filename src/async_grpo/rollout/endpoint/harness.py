"""The groups of an agent: plays the episodes of each side by side, and makes the group of what they recorded."""

from __future__ import annotations

import asyncio
import copy
import inspect
import itertools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from aiohttp import ServerDisconnectedError

from async_grpo.engines import PreparedGroup
from async_grpo.errors import GeneratorError, UnsupportedError, reason_of
from async_grpo.images import images_in
from async_grpo.log import logger
from async_grpo.rollout.endpoint.chat_template import Chat
from async_grpo.rollout.endpoint.episode import Episode
from async_grpo.rollout.endpoint.protocol import Rules
from async_grpo.rollout.endpoint.server import EndpointServer
from async_grpo.rollout.failures import causes_of
from async_grpo.rollout.threads import refusing_signals
from async_grpo.rollout.trl_group import GeneratedGroup, merge_extra_fields, prompt_of, rows_of
from async_grpo.rollout.turns.asks import as_exception
from async_grpo.rollout.turns.calls import Outcome
from async_grpo.rollout.turns.groups import Threads
from async_grpo.setup.openai_harness import Endpoint, OpenAIHarness
from async_grpo.setup.sampling import effective_sampling
from async_grpo.tokens.transcript import TokenLimits

if TYPE_CHECKING:
    from async_grpo.engines import Engine
    from async_grpo.records import Job
    from async_grpo.rollout.trl_trainer import RolloutTrainer
    from async_grpo.rollout.trl_view import ScoringContext
    from async_grpo.rollout.turns.asks import Asks
    from async_grpo.setup.openai_harness import Agent
    from async_grpo.tokens import Tokens

ERROR_COLUMN = "agent_error"  # what reward functions get of an agent that raised
_SAMPLED_WITH = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # by OpenAI's names and vLLM's
SAY_AT_MOST = 3  # errors of an agent that are logged
_HTTPX_DISCONNECTED = "RemoteProtocolError"  # httpx is installed with `openai` only
MOST_LEFT_BEHIND = 16  # calls that did not end in time and still run; one more ends the worker


@dataclass(frozen=True, slots=True)
class _PlayedEpisode:
    """What an episode came to beside its tokens."""

    columns: Mapping[str, Any]
    error: str | None = None


class Harness:
    """Used on the worker's event loop. An agent may take `timeout_s` between two requests."""

    def __init__(
        self,
        given: OpenAIHarness,
        trl: RolloutTrainer,
        engine: Engine,
        asks: Asks,
        loop: asyncio.AbstractEventLoop,
        timeout_s: float,
    ) -> None:
        if trl.trainer.tools or trl.trainer.environment_factories:
            raise UnsupportedError(
                "OpenAIHarness and tools, or an environment_factory, in one trainer: an agent calls its own tools, and "
                "those of the trainer would be called by nobody. Remove them, or give them to the agent."
            )
        self._model, self._trl, self._asks, self._timeout_s = given.model, trl, asks, timeout_s
        self._chat = Chat(trl.trainer)
        self._agents = Agents(given.agent)
        self._server = EndpointServer(loop)
        self._base_url = ""  # until the first episode
        sampling = effective_sampling(trl.trainer, engine.capabilities)
        self._sampling = {name: getattr(sampling, name) for name in _SAMPLED_WITH}
        self._open: set[Episode] = set()
        self._said: set[str] = set()

    @property
    def in_time(self) -> bool:
        """Whether agents are at work whose time is not over."""
        return any(0 < episode.idle_s <= self._timeout_s for episode in self._open)

    def check(self) -> None:
        """Raise `GeneratorError` if too many calls of the agent will not end."""
        self._agents.check(self._timeout_s)

    async def play(self, job: Job, version: int) -> GeneratedGroup:
        """The group of G episodes. Raises what is the fault of the agent, or of a prompt."""
        rows = rows_of(job)
        prompts = [prompt_of(row) for row in rows]
        if any(map(images_in, prompts)):
            raise UnsupportedError("OpenAIHarness takes prompts of text, and this dataset has images in them.")
        episodes = [self._episode(job, version, index) for index in range(len(rows))]

        def note(error: BaseException) -> None:
            for episode in episodes:
                episode.cause = reason_of(error)

        works = [self._play(*each) for each in zip(episodes, prompts, strict=True)]
        with self._trl.view.during(job, version) as call:
            played = await self._asks.side_by_side(works, note)
            return self._group(job, version, rows, prompts, episodes, played, call)

    def _episode(self, job: Job, version: int, index: int) -> Episode:
        args = self._trl.trainer.args
        config = self._trl.trainer.model.config
        sequence = getattr(config, "text_config", config).max_position_embeddings

        async def sample(prompt_ids: list[int], turn: int) -> Tokens:
            group = PreparedGroup(job=job, version=version, prompt_ids=[prompt_ids], turn=turn, first_index=index)
            return await self._asks.continued(group)

        return Episode(
            self._chat,
            Rules(model=self._model, sampling=_allowed(self._sampling, job)),
            TokenLimits(completion=job.sampling.get("max_tokens", args.max_completion_length), sequence=sequence),
            sample,
            index=index,
            number=f"{job.seq}_{index}",
        )

    async def _play(self, episode: Episode, prompt: Any) -> _PlayedEpisode:
        self._base_url = self._base_url or self._server.start()
        key = self._server.open(episode)
        self._open.add(episode)
        with self._asks.working():
            endpoint = Endpoint(base_url=self._base_url, api_key=key, model=self._model)
            ended = self._agents.start(copy.deepcopy(prompt), endpoint)
            try:
                return self._played(episode, await self._outcome(episode, ended))
            finally:
                self._server.close(key)
                self._open.discard(episode)
                ended.cancel()
                await episode.close()

    async def _outcome(self, episode: Episode, ended: asyncio.Future[Outcome]) -> Outcome | None:
        """None: the agent's time is over."""
        waited_for: list[asyncio.Future[Any]] = [ended, episode.failed]
        while (left := self._timeout_s - episode.idle_s) > 0:
            await asyncio.wait(waited_for, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if episode.failed.done():
                episode.failed.result()  # raises
            if ended.done():
                return ended.result()
        return None

    def _played(self, episode: Episode, outcome: Outcome | None) -> _PlayedEpisode:
        error = outcome.error if outcome is not None else None
        text = None if error is None else f"{type(error).__name__}: {error}"
        if outcome is None:
            text = f"The agent made no request and did not return within {self._timeout_s:g} s (--tool-timeout)."
        if error is not None and is_lost_connection(error, self._base_url):
            raise GeneratorError(
                f"An agent's connection to the endpoint broke ({text}). That is an error of the machine: what the "
                "model said until then is not taken for its completion, and the group is tried again."
            ) from error
        if not episode.transcript.turns:
            raise UnsupportedError(_said_nothing(text)) from error
        if text is not None and episode.is_full:  # how agents end where no tokens are left
            return _PlayedEpisode({})
        if text is not None:
            self._say(text, error)
            return _PlayedEpisode({}, text)
        assert outcome is not None
        return _PlayedEpisode(_columns(outcome.value))

    def _say(self, text: str, error: Exception | None) -> None:
        if text not in self._said and len(self._said) < SAY_AT_MOST:
            self._said.add(text)
            logger.opt(exception=error).warning(
                "an agent's call ended with an error; its completion is what the model said until then, and reward "
                "functions get the error as `{}`: {}",
                ERROR_COLUMN,
                text,
            )

    def _group(
        self,
        job: Job,
        version: int,
        rows: list[dict[str, Any]],
        prompts: list[Any],
        episodes: Sequence[Episode],
        played: Sequence[_PlayedEpisode],
        call: ScoringContext,
    ) -> GeneratedGroup:
        names = dict.fromkeys(chain.from_iterable(each.columns for each in played))
        columns = {name: [each.columns.get(name) for each in played] for name in names}
        merge_extra_fields(rows, {**columns, ERROR_COLUMN: [each.error for each in played]})
        transcripts, taken = [episode.transcript for episode in episodes], call.taken()
        return GeneratedGroup(
            job=job,
            begun_by=version,
            rows=rows,
            prompts=prompts,
            completions=[_completion(self._chat, each, prompt) for each, prompt in zip(episodes, prompts, strict=True)],
            prompt_ids=[transcript.prompt_ids for transcript in transcripts],
            tokens=[transcript.tokens for transcript in transcripts],
            has_masks=True,
            environments=None,
            metrics={
                "agent/turns": [sum(transcript.turns for transcript in transcripts) / len(transcripts)],
                "agent/failure_frequency": [sum(each.error is not None for each in played) / len(played)],
            }
            | taken["metrics"],
            added=taken["added"],
        )


def _completion(chat: Chat, episode: Episode, prompt: Any) -> Any:
    """Messages, or a text where the row's prompt is one, as in TRL."""
    return episode.messages if isinstance(prompt, list) else chat.text(episode.transcript.tokens.ids)


def _columns(value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise UnsupportedError(
            f"The agent returned {type(value).__name__}. It must return None, or a dict with columns for the reward "
            'functions, such as {"solved": True}.'
        )
    return value


def _said_nothing(error: str | None) -> str:
    how = "returned" if error is None else f"ended ({error})"
    return (
        f"The agent {how} without an answer of the endpoint, so there is no completion to train on. It has to ask "
        "endpoint.base_url with endpoint.api_key, for endpoint.model, in each of its calls."
    )


def _allowed(sampling: Mapping[str, float], job: Job) -> dict[str, list[float]]:
    """An evaluation samples with its own settings, whatever the agent says for training."""
    allowed = {name: [job.sampling.get(name, value), value] for name, value in sampling.items()}
    if 0 in allowed["top_k"]:
        allowed["top_k"].append(-1)
    return allowed


class Agents:
    """The calls of one agent beside the worker's loop: an async one on a loop of its own, any other in a thread.

    Each has the time of `--tool-timeout` between two requests, before the first, and behind the last answer.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent: Any = agent
        self._is_async = any(map(inspect.iscoroutinefunction, (agent, getattr(agent, "__call__", None))))  # noqa: B004
        self._threads = Threads()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._numbers = itertools.count()
        self._running: set[int] = set()  # calls in threads
        self._waited_for: set[int] = set()  # those of them that have time left

    def start(self, prompt: Any, endpoint: Endpoint) -> asyncio.Future[Outcome]:
        """What the call comes to. To cancel it ends an async call; a thread is left behind."""
        if self._is_async:
            awaited = asyncio.run_coroutine_threadsafe(self._awaited(prompt, endpoint), self._own_loop())
            return asyncio.wrap_future(awaited)
        return asyncio.ensure_future(self._in_thread(prompt, endpoint))

    def check(self, timeout_s: float) -> None:
        """Raise `GeneratorError` if too many calls will not end: each keeps a thread, and what it holds."""
        if (left_behind := len(self._running - self._waited_for)) > MOST_LEFT_BEHIND:
            raise GeneratorError(
                f"{left_behind} calls of the agent still run after their {timeout_s:g} s without a request "
                "(--tool-timeout). Python cannot stop a thread, so this worker ends and another takes its place. Give "
                "what the agent waits for a time-out of its own, or raise --tool-timeout."
            )

    async def _in_thread(self, prompt: Any, endpoint: Endpoint) -> Outcome:
        number = next(self._numbers)

        def work() -> Outcome:
            try:
                with refusing_signals():
                    return Outcome(self._agent(prompt, endpoint))
            except BaseException as error:  # noqa: BLE001  # of the user's code: it belongs to the episode
                return Outcome(error=as_exception(error))
            finally:
                self._running.discard(number)

        self._waited_for.add(number)
        self._running.add(number)
        try:
            return await self._threads.run(work, name="agent")
        finally:
            self._waited_for.discard(number)

    async def _awaited(self, prompt: Any, endpoint: Endpoint) -> Outcome:
        try:
            return Outcome(await self._agent(prompt, endpoint))
        except BaseException as error:  # noqa: BLE001  # an `exit()` would end the loop
            return Outcome(error=as_exception(error))

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="agents", daemon=True).start()
        return self._loop


def is_lost_connection(error: BaseException, base_url: str) -> bool:
    """Whether an agent's error is that its connection to the endpoint broke.

    An error that names another address, such as that of a search engine, is not. Where a client waited for too long, it
    hung up itself.
    """
    causes = causes_of(error)
    if any(not url.startswith(base_url) for url in filter(None, map(_url, causes))):
        return False
    return any(
        isinstance(cause, (ConnectionError, ServerDisconnectedError)) or type(cause).__name__ == _HTTPX_DISCONNECTED
        for cause in causes
    )


def _url(error: BaseException) -> str | None:
    """The address of the request that failed, as `openai`, httpx and requests note it."""
    try:
        return str(error.request.url)  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):  # httpx: it was not noted
        return None
