"""A trainer that spans several processes: rank 0 is the parameter server, and tells the others what to do next.

    rank 0                                    ranks 1 …
    ------                                    ---------
    finds the checkpoint        -- START -->  train from it
    publishes a version         -- GATHER ->  give their shards of the named weights
    has a batch of rollouts     -- BATCH -->  train on their share of it
    after a step, a checkpoint  -- GO ----->  go on, or stop after a last checkpoint
    is asked to stop            -- STOP --->  end, with the checkpoint that rank 0 writes now

Only rank 0 touches the run directory, so nothing here changes what the queue, the workers and the files guarantee.
The words travel over a gloo group of their own, on the CPU; what is trained uses the trainer's own group.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import IntEnum

import psutil  # type: ignore[import-untyped]
import torch
import torch.distributed as dist

from async_grpo.errors import PeerDiedError

LEADER = 0
DYING_S = 2.0
DYING_POLL_S = 0.02
WORD_TIMEOUT_S = 7200.0  # rank 0 may wait half an hour for a batch, evaluate, or wait for room on the disk


class Word(IntEnum):
    """What rank 0 says."""

    START = 0
    GATHER = 1
    BATCH = 2
    GO = 3
    STOP = 4


class Ranks:
    """The words between the ranks. Every rank makes one, after its trainer has set `torch.distributed` up.

    Every method raises `PeerDiedError` when a rank is gone.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=WORD_TIMEOUT_S))
        self.rank = dist.get_rank()
        self._processes = self._meet()

    def tell(self, word: Word, payload: bytes = b"") -> None:
        """Rank 0: say it to all; returns once all have listened."""
        self._broadcast(torch.tensor([word, len(payload)]))
        if payload:
            self._broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8))

    def listen(self) -> tuple[Word, bytes]:
        """The others: what rank 0 says next."""
        word, size = self._broadcast(torch.zeros(2, dtype=torch.int64)).tolist()
        payload = self._broadcast(torch.empty(size, dtype=torch.uint8)) if size else None
        return Word(word), b"" if payload is None else payload.numpy().tobytes()

    def wait_for_all(self) -> None:
        """Return when every rank has come here."""
        self._guarded(lambda: dist.barrier(group=self._group))

    def check_alive(self) -> None:
        """Raise `PeerDiedError` when a rank is gone; costs microseconds, so every wait can ask."""
        for rank, process in enumerate(self._processes):
            if _is_gone(process):
                raise PeerDiedError(
                    f"Rank {rank} of the trainer (pid {process.pid}) is gone, so training cannot go on. Its last words "
                    "are in the log above. Start again with --resume."
                )

    def blame(self) -> None:
        """As `check_alive`, after communication has failed: the one that died may take a moment to be gone."""
        deadline = time.monotonic() + DYING_S
        while time.monotonic() < deadline:
            self.check_alive()
            time.sleep(DYING_POLL_S)

    def _meet(self) -> Sequence[psutil.Process]:
        pids = torch.zeros(dist.get_world_size(), dtype=torch.int64)
        pids[self.rank] = os.getpid()
        dist.all_reduce(pids, group=self._group)
        return [psutil.Process(pid) for pid in pids.tolist()]

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        self._guarded(lambda: dist.broadcast(tensor, src=LEADER, group=self._group))
        return tensor

    def _guarded(self, communicate: Callable[[], object]) -> None:
        try:
            communicate()
        except RuntimeError as error:
            self.blame()
            whose = "another rank" if self.rank == LEADER else "rank 0, the parameter server,"
            raise PeerDiedError(
                f"Rank {self.rank} of the trainer cannot reach {whose} any more: {error}. Start again with --resume."
            ) from error


def _is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it went between the two questions
        return True
