"""What engines share that decode a batch of groups to its end before they begin the next."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Sequence
from itertools import groupby

from accelerate.utils.memory import should_reduce_batch_size

from async_grpo.engines import PreparedGroup, SampledGroup
from async_grpo.errors import GeneratorError, reason_of
from async_grpo.formatting import counted
from async_grpo.log import logger
from async_grpo.telemetry.activity import activity

Decoding = Generator[list[SampledGroup]]  # yields the groups that ended, after each token or look


class BatchEngine(ABC):
    """Neighbours that are given together and sampled alike are sampled together. A subclass says how, in `_decode`.

    They may differ in `max_tokens`: a shorter limit leaves a batch that a longer one keeps busy.

    Where memory runs out, a batch is divided, and no later one is as large. A group that fails alone for want of
    memory, or by an error of the device, waits for the others: if the next one fails alike, no group is to blame.
    """

    def __init__(self, most_groups: int) -> None:
        self.most_groups = most_groups
        self._waiting: deque[list[PreparedGroup]] = deque()
        self._batch: set[PreparedGroup] = set()  # that are being decoded
        self._decoding: Decoding | None = None
        self._fits = sys.maxsize  # how many groups fit into the memory, as far as it is known
        self._device_failed = 0  # groups in a row that failed alone, by no fault of their own

    @abstractmethod
    def _decode(self, groups: Sequence[PreparedGroup]) -> Decoding:
        """Sample the groups; each is yielded once."""

    def sample(self, new: Sequence[PreparedGroup]) -> list[SampledGroup]:
        for _, alike in groupby(new, key=lambda group: {**group.job.sampling, "max_tokens": None}):
            groups = list(alike)
            self._waiting += [groups[first : first + self._fits] for first in range(0, len(groups), self._fits)]
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
        if ended:
            self._device_failed = 0
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
        """Sample the groups of the batch in smaller ones, so that the error ends only the group that it belongs to.

        Raises:
            GeneratorError: the device failed two groups in a row that had it for themselves.
        """
        groups = sorted(self._batch, key=lambda group: group.job.seq)
        self._batch.clear()
        self._end()
        if len(groups) == 1:
            return self._failed_alone(groups[0], error)
        parts = [[group] for group in groups]
        if should_reduce_batch_size(error):
            self._fits = half = (len(groups) + 1) // 2
            completions = len(groups[0].prompt_ids)
            logger.warning(
                "out of memory with {} groups of {} completions together, so at most {} from now on: {}",
                *(len(groups), completions, counted(half, "group"), reason_of(error)),
            )
            parts = [groups[:half], groups[half:]]
        self._waiting.extendleft(reversed(parts))
        return []

    def _failed_alone(self, group: PreparedGroup, error: Exception) -> list[SampledGroup]:
        if is_of_the_device(error):
            self._device_failed += 1
            if self._device_failed > 1:
                raise GeneratorError(
                    f"The device failed for {self._device_failed} groups in a row that were sampled alone, so no group "
                    f"is to blame: {reason_of(error)} If memory is short, end what else uses the device (on a GPU, "
                    "nvidia-smi names it), or take fewer workers, a smaller max_completion_length or num_generations."
                ) from error
            if self._waiting:  # they tell whether it is this group or the device
                self._waiting.append([group])
                return []
        return [SampledGroup(prepared=group, error=error)]

    def _end(self) -> None:
        if self._decoding is not None:
            self._decoding.close()
        self._decoding = None


def is_of_the_device(error: Exception) -> bool:
    """Whether memory was short, or CUDA or one of its libraries failed."""
    return should_reduce_batch_size(error) or (isinstance(error, RuntimeError) and str(error).startswith("CUDA error"))
