"""What a checkpoint holds besides transformers' files, and how a resumed run reads it.

    checkpoint-N/
        model.safetensors, optimizer.pt, …   transformers
        rollout_batch.safetensors            the generation batch that the checkpoint is in the middle of, if any
        rollout_state.json                   which groups are consumed; written last, so it makes a checkpoint complete

TRL trains several optimizer steps on one generation batch when `num_iterations > 1` or `steps_per_generation >
gradient_accumulation_steps`. A checkpoint between them carries the batch as TRL holds it (masked, advantages and
corrections computed, shuffled), so that the resumed run takes the remaining steps on exactly the same tensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from async_grpo.archive import checkpoint_folders, output_dir
from async_grpo.archive.checkpoint_folders import Checkpoint
from async_grpo.archive.rollout_state import RolloutState
from async_grpo.errors import BadFileError, DiskFullError, RunDirError, UnsupportedError
from async_grpo.formatting import counted
from async_grpo.log import logger
from async_grpo.queue import ServerQueue
from async_grpo.rundir.paths import RunDir, RunState
from async_grpo.rundir.reading import open_plain, parse_object, read_object
from async_grpo.rundir.shape import shaped
from async_grpo.settings import ArchiveLimit
from async_grpo.setup import fingerprints
from async_grpo.setup.algorithm import trained_besides
from async_grpo.setup.trl_compat import is_adapter
from async_grpo.training.hyperparameters import configuration
from async_grpo.training.resumed_settings import check_settings
from async_grpo.training.sharding import CheckpointLayout, check_layout, layout_of

if TYPE_CHECKING:
    from transformers import TrainerState
    from trl import GRPOTrainer


@dataclass(frozen=True, slots=True)
class BatchInUse:
    """A generation batch, cut into the inputs of its `steps_per_generation` forward passes."""

    passes_done: int  # forward passes on it so far, at least one
    inputs: Sequence[dict[str, Any]]  # tensors, or values that JSON can hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The checkpoint that a run continues from."""

    path: Path
    state: RolloutState
    batch: BatchInUse | None  # that the checkpoint is in the middle of


def resume(trainer: GRPOTrainer, run: RunDir, state: RunState) -> Resumed | None:
    """Read the newest complete checkpoint of the run, None if it has none yet. Its last process left `state`.

    Raises:
        RunDirError: the run has trained, and its checkpoints are not where they were or not as they were.
        UnsupportedError: the checkpoint is one of other ranks.
    """
    found = output_dir.find_checkpoint(trainer.args.output_dir, state, run.root)
    _say_if_other_data(trainer, state)
    if found is None:
        logger.info("resuming from the start: the run has no complete checkpoint yet")
        return None
    checkpoint, used = found
    check_checkpoint(trainer, state, found, layout_of(trainer), run)
    logger.info("resuming from {}", checkpoint)
    batch = load_batch(checkpoint, trainer.accelerator.device) if used.passes_done else None
    return Resumed(path=checkpoint, state=used, batch=batch)


def check_checkpoint(
    trainer: GRPOTrainer, state: RunState, found: Checkpoint, layout: CheckpointLayout, run: RunDir
) -> None:
    """Raise `RunDirError` or `UnsupportedError` where this trainer, with this layout, cannot continue from `found`."""
    refuse_another_model(trainer, state, found.path)
    check_layout(found.path, layout)
    if found.state.passes_done:
        check_ranks(found.path, trainer.args.world_size)
    if before := _configuration_before(run):
        check_settings(trainer, before, configuration(trainer), found.path, in_batch=found.state.passes_done > 0)


def _configuration_before(run: RunDir) -> dict[str, Any]:
    """The `GRPOConfig` of the last process that trained; empty where it is not known."""
    try:
        found = read_object(run.hyperparameters).get("trainer")
    except (OSError, BadFileError):
        return {}
    return found if isinstance(found, dict) else {}


def refuse_another_model(trainer: GRPOTrainer, state: RunState, checkpoint: Path) -> None:
    """Raise `RunDirError` where the weights and the optimizer state of a checkpoint do not fit this trainer's model."""
    if (model := fingerprints.of_model(trainer.model)) != state.model and state.model:
        raise RunDirError(
            f"{checkpoint} is of another model than the setup file builds now: {state.model}, not {model}. Set the "
            "model, and its peft_config, as they were; or begin another run with --run-dir OTHER."
        )


def _say_if_other_data(trainer: GRPOTrainer, state: RunState) -> None:
    if (data := fingerprints.of_data(trainer)) and state.data and data != state.data:
        logger.warning(
            "the training data are not what they were, or not in the same order: {}, before {}. The run continues at "
            "the same place of the new order, so prompts may be used twice or left out",
            data,
            state.data,
        )


def find_best(state: TrainerState, resumed_from: Path | None) -> None:
    """Let the state of a resumed trainer name the best checkpoint so far, where it is now.

    It names a relative path, which only the folder has that the run was begun in, or one that was moved since.
    """
    if resumed_from is None or not state.best_global_step:
        return
    if (best := checkpoint_folders.of_step(resumed_from, state.best_global_step)) is not None:
        state.best_model_checkpoint = str(best)


class CheckpointFolder:
    """The `output_dir` of a run, which writes its checkpoints there and deletes no others.

    Raises:
        RunDirError: another run that is not over has its checkpoints there.
    """

    def __init__(self, trainer: GRPOTrainer, run: RunDir, state: RunState) -> None:
        self.path = output_dir.absolute(trainer.args.output_dir, state, run.root)
        self.staging = checkpoint_folders.staging(self.path, state.run_id)
        self._trainer, self._run, self._run_id = trainer, run, state.run_id
        self.record = run.where_it_is() if output_dir.was_moved(state, run.root) else {}  # for `run.json`
        self.record |= {"model": fingerprints.of_model(trainer.model), "data": fingerprints.of_data(trainer)}
        self._limit = trainer.args.save_total_limit
        output_dir.refuse_another_runs(self.path, state.run_id, run.root)
        if others := output_dir.what_stays(self.path, state.run_id):
            logger.warning("{}", others)
        if self.path != Path(trainer.args.output_dir).absolute():  # the run was first started in another folder
            trainer.args.output_dir = str(self.path)
        output_dir.claim(self.path, state.run_id, run.root)

    def put(self, written: Path, used: RolloutState, batch: BatchInUse | None) -> None:
        """Complete the checkpoint that transformers has written into `staging`, and give it its name."""
        if batch is not None:
            save_batch(written, batch)
        checkpoint_folders.save(written, replace(used, run_dir=str(self._run.root.resolve())))
        checkpoint_folders.put_in_place(written, self.path, self._run_id)
        with suppress(DiskFullError):  # for people, and for a resume whose setup file names another folder
            self._run.update_state(of=self._run_id, step=used.step, output_dir=str(self.path))

    def rotate(self) -> None:
        """Delete the run's oldest checkpoints beyond `save_total_limit`."""
        checkpoint_folders.rotate(self.path, self._run_id, self._limit, self._trainer.state.best_model_checkpoint)

    def keep_only_the_best(self) -> None:
        """At the end, with `save_total_limit=1`, as transformers does: of the run's, only the best checkpoint stays."""
        best = self._trainer.state.best_model_checkpoint
        if self._limit == 1 and best is not None:
            checkpoint_folders.keep_only(self.path, self._run_id, best)


def bytes_needed(trainer: GRPOTrainer) -> int:
    """About how large a checkpoint is: the weights that it saves, and two moments of each that trains; also a critic's.

    DeepSpeed writes the weights that train again, beside their moments.
    """
    parameters = list(trainer.model.parameters())
    trained = sum(fingerprints.count(p) * p.element_size() for p in parameters if p.requires_grad)
    whole = sum(fingerprints.count(p) * p.element_size() for p in parameters)
    copies = 3 if trainer.is_deepspeed_enabled else 2
    besides = 3 * 4 * trained_besides(trainer)
    return (trained if is_adapter(trainer.model) else whole) + copies * trained + besides + 1_000_000


class UsedGroups:
    """The archive of used groups, `done/`, trimmed to `--keep-done`.

    Groups that the last checkpoint does not count as used are never deleted: a resumed run needs them.
    """

    def __init__(
        self, queue: ServerQueue, done: Path, keep: ArchiveLimit, resumed_from: RolloutState | None = None
    ) -> None:
        self._queue = queue
        self._done = done
        self._keep = keep
        self._in_checkpoint: Container[int] = resumed_from or ()

    def checkpointed(self, state: RolloutState) -> None:
        """`state` is that of the last checkpoint: trim the archive."""
        self._in_checkpoint = state
        if removed := self._trim(self._keep):
            logger.debug("removed {} of the oldest groups from done/", removed)

    def make_space(self, folder: Path | None = None) -> None:
        """The disk is full: delete every group that may go, unless `folder`, which needs room, is on another disk."""
        elsewhere = folder is not None and folder.stat().st_dev != self._done.stat().st_dev
        if removed := 0 if elsewhere else self._trim(ArchiveLimit(0)):
            logger.warning("The disk is full: removed {} of the oldest used groups from done/", removed)

    def _trim(self, limit: ArchiveLimit) -> int:
        return self._queue.trim_done(limit.groups(self._done), self._in_checkpoint)


def batch_file(checkpoint: Path, rank: int = 0) -> Path:
    return checkpoint / ("rollout_batch.safetensors" if rank == 0 else f"rollout_batch.rank{rank}.safetensors")


def check_ranks(checkpoint: Path, ranks: int) -> None:
    """Raise `UnsupportedError` unless the batch in `checkpoint` has a share for each of `ranks` ranks."""
    shares = len(list(checkpoint.glob("rollout_batch*.safetensors")))
    if ranks == shares:
        return
    raise UnsupportedError(
        f"{checkpoint} was written in the middle of a generation batch by a trainer of {counted(shares, 'rank')}, and "
        f"this one has {ranks}. Each rank must continue with its own share of that batch. Resume with {shares} "
        f"(num_processes of the accelerate configuration; 1: --accelerate-config none), or move {checkpoint} away to "
        "resume from an older checkpoint."
    )


def save_batch(checkpoint: Path, batch: BatchInUse, rank: int = 0) -> None:
    """Add the batch to a checkpoint. `UnsupportedError` names an input that cannot be saved."""
    tensors: dict[str, torch.Tensor] = {}
    others: list[dict[str, Any]] = []
    for index, inputs in enumerate(batch.inputs):
        kept = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        tensors |= {f"{index}.{name}": value.detach().cpu().clone() for name, value in kept.items()}
        others.append({name: value for name, value in inputs.items() if name not in kept})
    try:
        described = json.dumps({"passes_done": batch.passes_done, "others": others})
    except TypeError as error:
        raise UnsupportedError(
            f"A checkpoint between the steps of one generation batch cannot hold this batch: {error}. Set save_steps "
            "so that checkpoints fall between batches."
        ) from error
    save_file(tensors, batch_file(checkpoint, rank), metadata={"batch": described})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Described:
    """What such a file says beside its tensors."""

    passes_done: int
    others: list[dict[str, Any]]


def load_batch(checkpoint: Path, device: torch.device, rank: int = 0) -> BatchInUse:
    """The batch that `save_batch` wrote; `RunDirError` if it cannot be read."""
    path = batch_file(checkpoint, rank)
    try:
        os.close(open_plain(path))  # a pipe would be waited for
        with safe_open(path, "pt") as file:
            described = shaped(_Described, parse_object(file.metadata()["batch"]))
            inputs = described.others
            for key in file.keys():  # noqa: SIM118 - not a dict
                index, _, name = key.partition(".")
                inputs[int(index)][name] = file.get_tensor(key).to(device)
            return BatchInUse(described.passes_done, inputs)
    except (OSError, BadFileError, SafetensorError, ValueError, TypeError, LookupError) as error:
        raise RunDirError(
            f"{path} cannot be read ({error}). Move {checkpoint} away to resume from an older checkpoint."
        ) from error
