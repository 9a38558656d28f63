"""The prompts of a run, in exactly the order in which TRL's own trainer would draw them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import TYPE_CHECKING, Any

from async_grpo.errors import UnsupportedError, UsageError
from async_grpo.images import encoded
from async_grpo.log import logger
from async_grpo.setup.image_files import images_as_files
from async_grpo.setup.overrides import own_dataloader
from async_grpo.setup.replaced import users_class
from async_grpo.training import trl_trainer
from async_grpo.training.one_dataloader import OneDataLoader
from async_grpo.training.schedule import groups_per_round

if TYPE_CHECKING:
    from trl import GRPOTrainer

MOST_PROBLEMS = 100_000  # of one evaluation dataset: a stream may have no end


def prompt_rows(
    trainer: GRPOTrainer, start: int = 0, *, chosen: Iterator[int] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield one dataset row per prompt group from position `start` on, epoch after epoch, without end.

    The order is that of the trainer's own sampler (its shuffling, its seed), whose repetitions for the G completions
    of a group and for several iterations are taken out; or `chosen` has the place of each row in the dataset.
    """
    if own_dataloader(trainer):
        yield from map(encoded, islice(_loaded_rows(trainer), start, None))
    dataset = trl_trainer.used_columns(trainer, trainer.train_dataset)
    if not hasattr(dataset, "__len__"):
        yield from map(encoded, islice(_streamed_rows(trainer, dataset), start, None))
    dataset, as_files = images_as_files(dataset)
    for index in chosen or islice(row_indices(trainer), start, None):
        yield as_files(dataset[index])


def evaluation_rows(trainer: GRPOTrainer) -> list[tuple[dict[str, Any], str]]:
    """Return the rows of the trainer's `eval_dataset`, in their order, each with its task.

    The task of a row is the name of its dataset, where there is a dictionary of them, else its column `task`.

    Raises:
        UsageError: there is such a dataset, and it has no rows.
    """
    given = trainer.eval_dataset
    if given is None:
        return []
    named = given.items() if isinstance(given, dict) else [("", given)]
    found = [
        (row, str(name or row.get("task") or ""))
        for name, dataset in named
        for row in _at_most(MOST_PROBLEMS, _rows_as_files(trl_trainer.used_columns(trainer, dataset, "evaluation")))
    ]
    if not found:
        raise UsageError("The eval_dataset has no rows. Give it some, leave it out, or set --eval-every 0.")
    return found


def training_rows(trainer: GRPOTrainer) -> list[dict[str, Any]]:
    """Return the rows of the trainer's training data, each once, in their order.

    Raises:
        UsageError: there are none, or the dataset is a stream.
    """
    dataset = trl_trainer.used_columns(trainer, trainer.train_dataset)
    if not hasattr(dataset, "__len__"):
        raise UsageError("The training data is a stream, which has no places for rows. Load it without streaming.")
    if not len(dataset):
        raise UsageError("The training data has no rows. Give the trainer a train_dataset to sample for.")
    return list(_rows_as_files(dataset))


def _rows_as_files(dataset: Any) -> Iterator[dict[str, Any]]:
    dataset, as_files = images_as_files(dataset)
    return map(as_files, dataset)


def _at_most(count: int, rows: Iterator[Any]) -> Iterator[Any]:
    yield from islice(rows, count)
    if next(rows, None) is not None:
        logger.warning("the eval_dataset has more than {} rows: evaluations use the first {} only", count, count)


def _loaded_rows(trainer: GRPOTrainer) -> Iterator[dict[str, Any]]:
    """From the dataloader that the user's class makes: of its batches, TRL generates for one in `repeats`."""
    is_training = isinstance(trainer, OneDataLoader)
    loader = trainer.take_loader_of_prompts() if is_training else trainer.get_train_dataloader()
    group_size = trainer.num_generations
    repeats = trainer.num_iterations * trainer.args.steps_per_generation
    batches = 0
    while True:
        before = batches
        for rows in loader:
            if batches % repeats == 0:
                yield from (_row_of(trainer, rows[at : at + group_size]) for at in range(0, len(rows), group_size))
            batches += 1
        if batches == before:
            raise _too_few(trainer, 0)


def _row_of(trainer: GRPOTrainer, group: Sequence[Any]) -> Any:
    if len(group) < trainer.num_generations or any(row != group[0] for row in group):
        raise _groups_unknown(trainer, "training dataloader", own_dataloader(trainer) or "get_train_dataloader")
    return group[0]


def _groups_unknown(trainer: GRPOTrainer, source: str, method: str) -> UnsupportedError:
    return UnsupportedError(
        f"{users_class(trainer)}'s {source} does not repeat each row num_generations={trainer.num_generations} times "
        f"in a row, as TRL's RepeatSampler does, so prompt groups cannot be recognised. Change {method} so that rows "
        "come as that sampler has them (trl.trainer.utils shows it), or train in one process (without --distributed)."
    )


def row_indices(trainer: GRPOTrainer) -> Iterator[int]:
    """Undo `RepeatSampler`, without end: a block of B groups comes `num_iterations * steps_per_generation` times."""
    group_size = trainer.num_generations
    batch = trainer.args.generation_batch_size
    size = batch * trainer.num_iterations * trainer.args.steps_per_generation
    sampler = trl_trainer.train_sampler(trainer)
    while True:
        indices, found = iter(sampler), False
        while len(block := list(islice(indices, size))) == size:
            found = True
            for start in range(0, batch, group_size):
                if len(set(block[start : start + group_size])) != 1:
                    raise _groups_unknown(trainer, "train sampler", "_get_train_sampler")
                yield block[start]
        if not found:
            raise _too_few(trainer, len(trainer.train_dataset))


def _streamed_rows(trainer: GRPOTrainer, dataset: Any) -> Iterator[dict[str, Any]]:
    if trainer.shuffle_dataset:
        dataset = dataset.shuffle(seed=trainer.args.seed)
    size = groups_per_round(trainer)
    for epoch in count():
        dataset.set_epoch(epoch)
        rows = iter(dataset)
        found = False
        while len(batch := list(islice(rows, size))) == size:  # TRL also drops the remainder of an epoch
            found = True
            yield from batch
        if not found:
            raise _too_few(trainer, len(batch))


def _too_few(trainer: GRPOTrainer, rows: int) -> UnsupportedError:
    return UnsupportedError(
        f"The training data has {rows} rows, fewer than one generation batch "
        f"({groups_per_round(trainer)} prompts). Add rows, or lower per_device_train_batch_size, "
        "steps_per_generation or gradient_accumulation_steps."
    )
