"""What goes on beside a training, and is given to it by the role that composes both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from async_grpo.queue import ServerQueue
from async_grpo.training.weight_publisher import VersionKeeper, WeightPublisher


class Evaluations(Protocol):
    """Evaluations of the published versions, one after the other, by the workers that the training uses."""

    @property
    def busy(self) -> bool:
        """Whether one is under way."""

    @property
    def done(self) -> int:
        """Problems that were answered or have failed so far."""

    def describe(self) -> str:
        """Say what is being waited for."""
        ...

    def published(self, version: int, *, last: bool = False) -> None:
        """Workers may see this version now: begin its evaluation if one is due. `last`: in any case."""

    def look(self) -> None:
        """Go on with the evaluation that is under way, if there is one."""

    def say_missing(self, version: int) -> None:
        """Training has ended with this version: warn where it has no evaluation."""

    def sync(self) -> None:
        """Bring every result to the disk. `DiskFullError`: there is no space for one."""

    def close(self) -> None:
        """Drop the evaluation that is under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Companions:
    """How to make what goes on beside a training, once the training has what they need."""

    evaluations: Callable[[ServerQueue, WeightPublisher, int], Evaluations]  # with the step that the run resumes from
    version_keeper: Callable[[], VersionKeeper | None]  # None: versions are not kept
