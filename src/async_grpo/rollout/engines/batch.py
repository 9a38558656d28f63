"""What engines share that decode a batch of groups to its end before they begin the next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Sequence
from itertools import groupby

from async_grpo.errors import GeneratorError
from async_grpo.rollout.engines import PreparedGroup, SampledGroup
from async_grpo.telemetry.activity import activity

Decoding = Generator[list[SampledGroup]]  # yields the groups that ended, after each token or look


class BatchEngine(ABC):
    """Neighbours that are given together and sampled alike are sampled together. A subclass says how, in `_decode`.

    They may differ in `max_tokens`: a shorter limit leaves a batch that a longer one keeps busy.
    """

    joins = False

    def __init__(self, most_groups: int) -> None:
        self.most_groups = most_groups
        self._waiting: deque[list[PreparedGroup]] = deque()
        self._batch: set[PreparedGroup] = set()  # that are being decoded
        self._decoding: Decoding | None = None

    @abstractmethod
    def _decode(self, groups: Sequence[PreparedGroup]) -> Decoding:
        """Sample the groups; each is yielded once."""

    def sample(self, new: Sequence[PreparedGroup]) -> list[SampledGroup]:
        for _, alike in groupby(new, key=lambda group: {**group.job.sampling, "max_tokens": None}):
            self._waiting.append(list(alike))
        if not self._batch:
            if not self._waiting:
                return []
            groups = self._waiting.popleft()
            self._batch, self._decoding = set(groups), self._decode(groups)
        assert self._decoding is not None
        activity.progress()
        try:
            ended = next(self._decoding)
        except GeneratorError:
            raise
        except Exception as error:  # noqa: BLE001  # a prompt or a logits processor: it belongs to one of the groups
            return self._failed(error)
        self._batch -= {sampled.prepared for sampled in ended}
        if not self._batch:
            self._end()
        return ended

    def close(self) -> None:
        self._waiting.clear()
        self._batch.clear()
        self._end()

    def end(self) -> None:
        self.close()

    def _failed(self, error: Exception) -> list[SampledGroup]:
        """Sample each group of the batch alone, so that the error ends only the group that it belongs to."""
        groups = sorted(self._batch, key=lambda group: group.job.seq)
        self._batch.clear()
        self._end()
        if len(groups) == 1:
            return [SampledGroup(prepared=groups[0], error=error)]
        self._waiting.extendleft([group] for group in reversed(groups))
        return []

    def _end(self) -> None:
        if self._decoding is not None:
            self._decoding.close()
        self._decoding = None
