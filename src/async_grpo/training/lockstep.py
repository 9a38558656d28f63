"""The points at which all ranks of a trainer go together: what rank 0 says there, and what the others do.

`ranks.py` has the words. With one process there is nobody to tell, and nothing is sent.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from async_grpo.job_file import decode_group, encode_group
from async_grpo.records import RolloutGroup
from async_grpo.settings import TrainingSettings
from async_grpo.training import batch_file, correction, trl_hooks
from async_grpo.training.batch_file import BatchInUse
from async_grpo.training.ranks import Ranks, Word
from async_grpo.training.rollout_source import StopTraining
from async_grpo.training.sharded_weights import gather

if TYPE_CHECKING:
    from trl import GRPOTrainer

_LENGTH = struct.Struct("<Q")


class Leader:
    """Rank 0's side. Without other ranks every method does nothing, or only rank 0's own part.

    Raises:
        PeerDiedError: from every method, when a rank is gone.
    """

    def __init__(self, trainer: GRPOTrainer, ranks: Ranks | None) -> None:
        self._trainer = trainer
        self._ranks = ranks

    @property
    def alone(self) -> bool:
        return self._ranks is None

    def start(self, checkpoint: str | None) -> None:
        self._tell(Word.START, (checkpoint or "").encode())

    def gather(self, into: Mapping[str, torch.Tensor]) -> None:
        """Fill `into` with parameters that are sharded over the ranks."""
        self._tell(Word.GATHER, json.dumps(list(into)).encode())
        gather(self._trainer.model, into.keys(), self._trainer.accelerator.device, into)

    def hand_out(self, groups: Sequence[RolloutGroup]) -> None:
        if self._ranks is not None:
            self._tell(Word.BATCH, pack(groups))

    def go(self, *, stop: bool = False) -> None:
        """All go on; `stop`: only as far as a last checkpoint."""
        self._tell(Word.GO, b"stop" if stop else b"")

    def stop(self) -> None:
        """All end here, with a checkpoint."""
        self._tell(Word.STOP)

    def wait_for_all(self) -> None:
        if self._ranks is not None:
            self._ranks.wait_for_all()

    def check_alive(self) -> None:
        if self._ranks is not None:
            self._ranks.check_alive()

    def blame(self) -> None:
        """Raise `PeerDiedError` where an error of the training comes from the death of a rank."""
        if self._ranks is not None:
            self._ranks.blame()

    def _tell(self, word: Word, payload: bytes = b"") -> None:
        if self._ranks is not None:
            self._ranks.tell(word, payload)


class Follower:
    """Any other rank: trains on its share of what rank 0 hands out, and knows nothing of queue, files and workers."""

    def __init__(self, trainer: GRPOTrainer, ranks: Ranks, settings: TrainingSettings) -> None:
        trl_hooks.refuse_unsupported(trainer)
        correction.check(settings.correction, trainer)
        self._trainer = trainer
        self._ranks = ranks
        self._batch: BatchInUse | None = None  # that the checkpoint was written in the middle of
        trl_hooks.make_async(
            trainer,
            take_groups=lambda version: unpack(self._until(Word.BATCH)),
            correct=correction.Correction(
                settings.correction,
                trainer.args.loss_type,
                log_pi_old=lambda batch: trl_hooks.log_pi_old(trainer, batch),
                append=lambda metric, value: trl_hooks.append_metric(trainer, metric, value),
            ),
            before_checkpoint=self._wait_for_leader,
            after_checkpoint=self._complete_checkpoint,
        )
        trl_hooks.use_callbacks(trainer, _FollowerEvents(self), tensorboard=None)

    def train(self) -> None:
        """Train as long as rank 0 does."""
        checkpoint = self._until(Word.START).decode() or None
        if checkpoint is not None and batch_file.path_in(Path(checkpoint)).exists():
            batch_file.check_ranks(Path(checkpoint), self._trainer.args.world_size)
            self._batch = batch_file.load(Path(checkpoint), self._trainer.accelerator.device, self._ranks.rank)
        try:
            self._trainer.train(resume_from_checkpoint=checkpoint)
        except StopTraining:
            trl_hooks.save_and_end(self._trainer)

    def training_begins(self) -> None:
        if self._batch is not None:
            trl_hooks.go_on_with(self._trainer, self._batch)
        self._wait_for_leader()

    def may_go_on(self) -> bool:
        """Wait for rank 0 to go on; False: to a last checkpoint only."""
        return self._until(Word.GO) != b"stop"

    def _complete_checkpoint(self, step: int) -> None:
        batch = trl_hooks.batch_in_use(self._trainer)
        if batch is not None:
            checkpoint = Path(self._trainer.args.output_dir) / f"checkpoint-{step}"
            batch_file.save(checkpoint, batch, self._ranks.rank)
        self._ranks.wait_for_all()

    def _wait_for_leader(self) -> None:
        self._until(Word.GO)

    def _until(self, awaited: Word) -> bytes:
        while True:
            word, payload = self._ranks.listen()
            if word is awaited:
                return payload
            if word is Word.STOP:
                raise StopTraining
            assert word is Word.GATHER, f"rank 0 said {word.name} where {awaited.name} was due"
            names: Collection[str] = set(json.loads(payload))
            gather(self._trainer.model, names, self._trainer.accelerator.device)


class _FollowerEvents(TrainerCallback):
    def __init__(self, follower: Follower) -> None:
        self._follower = follower

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._follower.training_begins()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not self._follower.may_go_on():
            end_with_a_checkpoint(control)


def end_with_a_checkpoint(control: TrainerControl) -> None:
    """Let transformers' training loop end after this step."""
    control.should_training_stop = True
    control.should_save = True


def pack(groups: Sequence[RolloutGroup]) -> bytes:
    """The bytes of their job files, each after its length."""
    files = [encode_group(group) for group in groups]
    return b"".join(part for file in files for part in (_LENGTH.pack(len(file)), file))


def unpack(data: bytes) -> list[RolloutGroup]:
    groups = []
    start = 0
    while start < len(data):
        (size,) = _LENGTH.unpack_from(data, start)
        start += _LENGTH.size
        groups.append(decode_group(data[start : start + size]))
        start += size
    return groups
