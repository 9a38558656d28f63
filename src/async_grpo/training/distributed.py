"""A trainer that spans several processes. Rank 0 is the parameter server, and tells the other ranks what to do next.

    rank 0                                    ranks 1 …
    ------                                    ---------
    finds the checkpoint        -- START -->  train from it
    publishes a version         -- GATHER ->  give their shards of the named weights
    has a batch of groups       -- GROUPS ->  take those that they have rows of, each from rank 0 alone
    after a step, a checkpoint  -- GO ----->  continue, or stop after a last checkpoint
    is asked to stop            -- STOP --->  end, with the checkpoint that rank 0 writes now
    refuses to train            -- STOP --->  end
    waits for long              -- WAIT --->  wait on

Only rank 0 touches the run directory, so nothing here changes what the queue, the workers and the files guarantee.
The messages use a gloo group of their own, on the CPU. The training uses the trainer's own group.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch
import torch.distributed as dist

from async_grpo.errors import PeerDiedError, UnsupportedError
from async_grpo.queue.codec import decode_group, encode_group
from async_grpo.records import RolloutGroup
from async_grpo.settings import TrainingSettings
from async_grpo.setup.process import StopRequest, is_alive
from async_grpo.setup.rank_share import own_groups
from async_grpo.setup.sampling import check_sampling
from async_grpo.training import checkpoints, trl_trainer
from async_grpo.training.checkpoints import BatchInUse, CheckpointFolder
from async_grpo.training.corrections.checks import check
from async_grpo.training.corrections.fresh_batch import Bound
from async_grpo.training.corrections.rule import rule_of
from async_grpo.training.corrections.trl_loss import has_own_loss
from async_grpo.training.machines import SILENT_S, Heartbeat, lost_process
from async_grpo.training.rollout_source import StopTraining
from async_grpo.training.sharding import sharding_of
from async_grpo.training.trl_trainer import TrainingEvents

if TYPE_CHECKING:
    from trl import GRPOTrainer


LEADER = 0
DYING_S = 2.0
DYING_POLL_S = 0.02
SHARED_S = 10.0  # a file on NFS is seen elsewhere a few seconds later
MESSAGE_TIMEOUT_S = 7200.0  # TRL's own evaluation, which every rank does at its pace, may take as long
WAIT_EVERY_S = 600.0  # while rank 0 waits: for groups, for the end of an evaluation, for space on the disk


class Message(IntEnum):
    """What rank 0 sends."""

    START = 0
    GATHER = 1
    GROUPS = 2
    GO = 3
    STOP = 4
    WAIT = 5


class Ranks:
    """The messages between the ranks. Every rank makes one, after its trainer has set `torch.distributed` up.

    Every method raises `PeerDiedError` when a rank has died. Where one of another machine has, the heartbeat ends the
    process, and says which.
    """

    def __init__(self, heartbeat: Heartbeat | None = None) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=MESSAGE_TIMEOUT_S))
        self.rank = dist.get_rank()
        self._heartbeat = heartbeat
        self._here: dict[int, psutil.Process] = {}
        self._here, self._leaders_pid = self._meet()
        if heartbeat is not None:
            heartbeat.siblings = self._here

    def send(self, message: Message, payload: bytes = b"") -> None:
        """Rank 0: send a message to all; returns when all have received it."""
        self._broadcast(torch.tensor([message, len(payload)], dtype=torch.int64, device="cpu"))
        if payload:
            self._broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8))

    def receive(self) -> tuple[Message, bytes]:
        """Other ranks: the next message of rank 0."""
        message, size = self._broadcast(torch.zeros(2, dtype=torch.int64, device="cpu")).tolist()
        payload = self._broadcast(torch.empty(size, dtype=torch.uint8, device="cpu")) if size else None
        return Message(message), b"" if payload is None else payload.numpy().tobytes()

    def give(self, rank: int, data: bytes) -> None:
        """Rank 0: send bytes to one other rank; returns when they are on their way."""
        size = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
        for tensor in (size, torch.frombuffer(bytearray(data), dtype=torch.uint8)):
            self._guarded(partial(dist.send, tensor, rank, group=self._group))

    def take(self) -> bytes:
        """Other ranks: the next bytes that rank 0 gives to this one."""
        size = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._guarded(partial(dist.recv, size, LEADER, group=self._group))
        data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        self._guarded(partial(dist.recv, data, LEADER, group=self._group))
        return data.numpy().tobytes()

    def refused(self) -> None:
        """Rank 0: there will be no training, and this rank says why. The others end in silence."""
        if self._heartbeat is not None:
            self._heartbeat.mine.left = True  # whoever ends now
        with suppress(PeerDiedError):  # one that has found the same reason
            self.send(Message.STOP)

    def wait_for_all(self) -> None:
        """Return when every rank has called this."""
        self._guarded(lambda: dist.barrier(group=self._group))

    def check_alive(self) -> None:
        """Raise `PeerDiedError` when a rank has died; costs microseconds, so every wait can ask."""
        dead = [(rank, process.pid) for rank, process in self._here.items() if not is_alive(process)]
        if not dead:
            return
        if self._heartbeat is not None:
            raise PeerDiedError(lost_process(self._heartbeat.lost(*dead[0])))
        rank, pid = (", ".join(map(str, numbers)) for numbers in zip(*dead, strict=True))
        what = f"Rank {rank} of the trainer (pid {pid}) has died, so training cannot continue. Its last output is"
        if len(dead) > 1:  # a rank that has lost its neighbour ends as well
            what = f"Ranks {rank} of the trainer (pids {pid}) have died, so training cannot continue. Their output is"
        raise PeerDiedError(f"{what} in the log above. Start again with --resume.")

    def blame(self, error: RuntimeError) -> None:
        """As `check_alive`, after an error: a dying process takes a moment to end, one elsewhere to be missed."""
        is_lost = any(word in str(error).lower() for word in ("gloo", "nccl", "connection"))
        is_watched = self._heartbeat is not None and not self._heartbeat.mine.left
        patience_s = SILENT_S + 2 * DYING_S if is_lost and is_watched else DYING_S
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            self.check_alive()
            time.sleep(DYING_POLL_S)

    def prove_shared(self, folder: Path) -> list[int]:
        """Return the ranks that see nothing of what the others write into `folder`. Every rank calls this.

        They are known on all; none is asked where the trainer is on one machine.
        """
        blind = torch.zeros(dist.get_world_size(), dtype=torch.int64, device="cpu")
        if self._heartbeat is not None:
            proofs = [folder / f".seen-by-rank-{rank}-{self._leaders_pid}" for rank in range(len(blind))]
            with suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                proofs[self.rank].touch()
            self.wait_for_all()
            deadline = time.monotonic() + SHARED_S
            while not all(proof.exists() for proof in proofs) and time.monotonic() < deadline:
                time.sleep(DYING_POLL_S)
            blind[self.rank] = not all(proof.exists() for proof in proofs)
            self._guarded(lambda: dist.all_reduce(blind, group=self._group))
            proofs[self.rank].unlink(missing_ok=True)
        return [int(rank) for rank in blind.nonzero()]

    def says(self, doing: str, step: int | None = None) -> None:
        """Note for `status` what this rank does."""
        if self._heartbeat is not None:
            mine = self._heartbeat.mine
            mine.doing, mine.step = doing, mine.step if step is None else step

    def leave(self) -> None:
        """End in good order: after this, no rank misses this one."""
        if self._heartbeat is not None:
            self._heartbeat.leave()

    def _meet(self) -> tuple[dict[int, psutil.Process], int]:
        """The processes of the ranks on this machine, by rank, and the process id of rank 0."""
        pids = torch.zeros(dist.get_world_size(), dtype=torch.int64, device="cpu")
        pids[self.rank] = os.getpid()
        self._guarded(lambda: dist.all_reduce(pids, group=self._group))
        each = int(os.environ.get("LOCAL_WORLD_SIZE", len(pids)))
        here = [rank for rank in range(len(pids)) if rank // each == self.rank // each]
        return {rank: psutil.Process(int(pids[rank])) for rank in here}, int(pids[LEADER])

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        self._guarded(lambda: dist.broadcast(tensor, src=LEADER, group=self._group))
        return tensor

    def _guarded(self, communicate: Callable[[], object]) -> None:
        try:
            communicate()
        except RuntimeError as error:
            self.blame(error)
            whose = "another rank" if self.rank == LEADER else "rank 0, the parameter server,"
            raise PeerDiedError(
                f"Rank {self.rank} of the trainer can no longer reach {whose}: {error}. Start again with --resume."
            ) from error


class Leader:
    """Rank 0's side. Without other ranks every method does nothing, or only rank 0's own part.

    Raises:
        PeerDiedError: from every method, when a rank has died.
    """

    def __init__(self, trainer: GRPOTrainer, ranks: Ranks | None, stop: StopRequest) -> None:
        self._trainer = trainer
        self._ranks = ranks
        self._stop = stop
        self._told_at = time.monotonic()  # when the other ranks last heard of this one

    @property
    def alone(self) -> bool:
        return self._ranks is None

    def should_stop(self) -> bool:
        """Whether the run was asked to end. Ask in every wait: it also keeps the other ranks waiting."""
        if self._ranks is not None:
            self._ranks.check_alive()
            if time.monotonic() - self._told_at > WAIT_EVERY_S:
                self._send(Message.WAIT)
        return self._stop.requested

    def start(self, checkpoint: Path | None, folder: CheckpointFolder) -> None:
        """Let the other ranks train from `checkpoint`, and write theirs where this rank does."""
        paths = [checkpoint, folder.path, folder.staging]
        self._send(Message.START, json.dumps([path and str(path) for path in paths]).encode())
        if self._ranks is not None and (blind := self._ranks.prove_shared(folder.path)):
            raise UnsupportedError(
                f"Ranks {', '.join(map(str, blind))} do not see what the others write into {folder.path}. Ranks of "
                "several machines write a checkpoint together, and each reads it: let output_dir of the GRPOConfig be "
                "a folder that all machines share."
            )

    def gather(self, into: Mapping[str, torch.Tensor]) -> None:
        """Fill `into` with parameters that are sharded over the ranks."""
        self._send(Message.GATHER, json.dumps(list(into)).encode())
        give_shards(self._trainer, into.keys(), into)

    def hand_out(self, groups: Sequence[RolloutGroup]) -> None:
        """Send each other rank the groups of a generation batch that it has rows of: the bytes of their files."""
        if self._ranks is None:
            return
        self._send(Message.GROUPS)
        for rank in range(1, self._trainer.args.world_size):
            for group in groups[own_groups(self._trainer, rank)]:
                self._ranks.give(rank, encode_group(group))

    def go(self, *, stop: bool = False) -> None:
        """All ranks continue; `stop`: only as far as a last checkpoint."""
        self._send(Message.GO, b"stop" if stop else b"")

    def stop(self) -> None:
        """All ranks end here, with a checkpoint."""
        self._send(Message.STOP)

    def wait_for_all(self) -> None:
        if self._ranks is not None:
            self._ranks.wait_for_all()

    def blame(self, error: RuntimeError) -> None:
        """Raise `PeerDiedError` where an error of the training comes from the death of a rank."""
        if self._ranks is not None:
            self._ranks.blame(error)

    def _send(self, message: Message, payload: bytes = b"") -> None:
        if self._ranks is not None:
            self._ranks.send(message, payload)
            self._told_at = time.monotonic()


class Follower(TrainingEvents):
    """Any other rank: trains on its share of the groups that rank 0 sends. Uses no queue, run directory or worker."""

    def __init__(self, trainer: GRPOTrainer, ranks: Ranks, settings: TrainingSettings) -> None:
        trl_trainer.refuse_unsupported(trainer)
        rule = rule_of(settings)
        check(rule, trainer, own_loss=has_own_loss(trainer))
        check_sampling(trainer, settings.correction, engine=None)
        self._trainer = trainer
        self._ranks = ranks
        self._staging: Path | None = None  # where checkpoints are written
        self._batch: BatchInUse | None = None  # that the checkpoint was written in the middle of
        trl_trainer.make_async(trainer, self, correction=rule, fresh=Bound(), settings=settings)

    def train(self) -> None:
        """Train as long as rank 0 does."""
        paths = [path and Path(path) for path in json.loads(self._until(Message.START))]
        checkpoint, output_dir, self._staging = paths
        if checkpoint is not None and checkpoints.batch_file(checkpoint).exists():
            self._batch = checkpoints.load_batch(checkpoint, self._trainer.accelerator.device, self._ranks.rank)
        self._trainer.args.output_dir = str(output_dir)
        if self._ranks.prove_shared(output_dir):
            raise StopTraining  # rank 0 says why
        try:
            trl_trainer.fit(self._trainer, resume_from=checkpoint)
        except RuntimeError as error:  # torch.distributed's own, where a rank died in the middle of a step
            self._ranks.blame(error)
            raise

    def training_begins(self) -> None:
        if self._batch is not None:
            trl_trainer.go_on_with(self._trainer, self._batch)
        self._until(Message.GO)

    def take_groups(self, version: int) -> list[RolloutGroup]:
        self._until(Message.GROUPS)
        self._ranks.says("trains", step=version)
        own = own_groups(self._trainer, self._ranks.rank)
        return [decode_group(self._ranks.take()) for _ in range(own.start, own.stop)]

    def step_done(self) -> bool:
        return self._until(Message.GO) != b"stop"

    def before_checkpoint(self) -> Path | None:
        self._until(Message.GO)
        return self._staging

    def checkpoint_written(self, checkpoint: Path) -> None:
        batch = self._trainer.batch_after_step
        if batch is not None:
            checkpoints.save_batch(checkpoint, batch, self._ranks.rank)
        self._ranks.wait_for_all()  # rank 0 completes the checkpoint
        self._ranks.wait_for_all()  # and has given it its name

    def _until(self, awaited: Message) -> bytes:
        while True:
            self._ranks.says("waits for rank 0")
            message, payload = self._ranks.receive()
            self._ranks.says("trains")
            if message is awaited:
                return payload
            if message is Message.STOP:
                raise StopTraining
            if message is Message.WAIT:
                continue
            assert message is Message.GATHER, f"rank 0 sent {message.name}, expected {awaited.name}"
            give_shards(self._trainer, set(json.loads(payload)))


def give_shards(trainer: GRPOTrainer, names: Collection[str], into: Mapping[str, torch.Tensor] | None = None) -> None:
    """Give this rank's shards of the named parameters to all; rank 0 copies the whole ones into `into`."""
    sharding = sharding_of(trainer)
    assert sharding is not None, "rank 0 gathers sharded weights only"
    sharding.gather(trainer.model, names, trainer.accelerator.device, into)
