"""What is in flight on an engine: prompt groups, and the turns in which they ask for tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from async_grpo.queue import Claim
    from async_grpo.rollout.trl_trainer import GeneratedGroup


class Turn:
    """Prompts of one group that want a completion each. The engine's thread fills it.

    Args:
        number: of the group's turns, from 0.
        on_done: called once every completion is there, or none will be (`error`).
    """

    def __init__(
        self, group: GroupInFlight, number: int, prompt_ids: Sequence[list[int]], on_done: Callable[[], None]
    ) -> None:
        self.group = group
        self.number = number
        self.prompt_ids = [list(ids) for ids in prompt_ids]
        self.token_ids: list[list[int]] = [[] for _ in prompt_ids]
        self.logprobs: list[list[float]] = [[] for _ in prompt_ids]
        self.versions: list[list[int]] = [[] for _ in prompt_ids]  # of the weights that sampled each token
        self.error: BaseException | None = None
        self._open = len(self.prompt_ids)
        self._on_done = on_done

    def add(self, place: int, token_ids: list[int], logprobs: list[float], version: int, *, finished: bool) -> None:
        self.token_ids[place] += token_ids
        self.logprobs[place] += logprobs
        self.versions[place] += [version] * len(token_ids)
        self._open -= finished
        if self.complete:
            self._on_done()

    @property
    def complete(self) -> bool:
        """Whether every completion is there."""
        return self._open == 0

    def fail(self, error: BaseException) -> None:
        """Have the group fail with `error`."""
        self.error = error
        self._on_done()

    def sampled(self) -> tuple[list[list[int]], list[list[float]]]:
        """The completions' tokens and log-probabilities; raises what the turn failed with."""
        if self.error is not None:
            raise self.error
        return [list(ids) for ids in self.token_ids], [list(values) for values in self.logprobs]


class GroupInFlight:
    """One claimed job on its way through TRL. In the end it has a `group` or an `error`."""

    def __init__(self, claim: Claim, version: int) -> None:
        self.claim = claim
        self.version = version  # the weights' when it started
        self.turns: list[Turn] = []
        self.group: GeneratedGroup | None = None
        self.token_versions: list[list[int]] | None = None  # set by `afterwards` where weights change meanwhile
        self.result: Any = None  # of `afterwards`
        self.error: BaseException | None = None
        self.traceback = ""
        self.started = time.monotonic()
        self.seconds = 0.0  # from its start to its end
        self.busy_s = 0.0  # its share of the engine's time
        self.adopt_s = 0.0  # its share of the time for adopting weights

    def oldest_version(self) -> int:
        """The oldest weights that sampled any of its tokens."""
        return min((version for turn in self.turns for row in turn.versions for version in row), default=self.version)


class Events:
    """What happened to groups, for the thread that steps the engine; from any thread."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Turn | GroupInFlight | None] = SimpleQueue()  # None: only wake up

    def put(self, event: Turn | GroupInFlight) -> None:
        self._queue.put(event)

    def wake(self) -> None:
        """End a wait: there is something else to do."""
        self._queue.put(None)

    def take(self, timeout_s: float) -> list[Turn | GroupInFlight]:
        """All there are; waits up to `timeout_s` for the first, or for `wake`."""
        found: list[Turn | GroupInFlight] = []
        try:
            while True:
                event = self._queue.get(timeout=timeout_s)
                timeout_s = 0
                if event is not None:
                    found.append(event)
        except Empty:
            return found


class GroupCode(Protocol):
    """Runs TRL's code of the groups, before they ask for tokens and after they have them.

    Made and used by the thread that steps the engine.
    """

    code_since: float  # when a group's own code last began to run, or was let go on (monotonic seconds)

    def start(self, claims: Sequence[Claim], version: int) -> list[GroupInFlight]:
        """Start the groups of claimed jobs."""
        ...

    def events(self, timeout_s: float) -> list[Turn | GroupInFlight]:
        """Turns that were begun and groups that have ended; waits up to `timeout_s` for the first, or for `wake`."""
        ...

    def wake(self) -> None:
        """End a wait for events: there is something else to do. From any thread."""
        ...


Afterwards = Callable[[Any, GroupInFlight], Any]  # what is done with a generated group by the trainer that made it


def versions_of_tokens(group: GeneratedGroup, turns: Sequence[Turn], default: int) -> list[list[int]]:
    """The policy version of each token of each completion; `default` for what a tool wrote.

    A later turn's prompt is the group's prompt and the completion so far, and its rows are in the completions' order.
    """
    versions = [[default] * len(ids) for ids in group.completion_ids]
    for turn in turns:
        row = 0
        for prompt, ids, sampled in zip(turn.prompt_ids, turn.token_ids, turn.versions, strict=True):
            while not _continues(group, row, prompt, ids):
                row += 1
            start = len(prompt) - len(group.prompt_ids[row])
            kept = versions[row][start : start + len(sampled)]
            versions[row][start : start + len(kept)] = sampled[: len(kept)]
            row += 1
    return versions


def _continues(group: GeneratedGroup, row: int, prompt: list[int], ids: list[int]) -> bool:
    """Whether `prompt` and then `ids`, which TRL may have cut, is how the row's prompt and completion begin."""
    whole = group.prompt_ids[row] + group.completion_ids[row]
    return whole[: len(prompt)] == prompt and ids[: len(whole) - len(prompt)] == whole[len(prompt) :][: len(ids)]
