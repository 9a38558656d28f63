"""Batches of several tasks, put before a trainer class: `class Trainer(MultiTask, GRPOTrainer)`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, islice
from typing import Any

import torch
from accelerate.utils import gather_object
from torch.utils.data import Sampler

from async_grpo.credit.rarely_timed import RarelyTimed
from async_grpo.errors import UsageError
from async_grpo.records import distinct
from async_grpo.tasks.gradients import TASK, WEIGHTINGS, TaskGradients, dealt, require_shares, shares
from async_grpo.tasks.scores import Score

METHODS = ("equal", "proportional", *WEIGHTINGS)
REFUSED = {
    **dict.fromkeys(("gradvac", "famo"), "keeps a state between steps, which no checkpoint has"),
    **dict.fromkeys(("upgrad", "dualproj", "cagrad", "nash_mtl"), "needs a solver of another package"),
}


class MultiTask(RarelyTimed):
    """Put before `GRPOTrainer`, or a class of it: batches that hold each task of the dataset's column `task`.

    Args:
        mtl: `equal`: each generation batch has as many groups of each task, a remainder in turn. `proportional`: the
            order is TRL's own. `pcgrad`, `mgda`, `aligned_mtl`, `imtl_g`: batches as with `equal`, and one gradient
            made of those of the tasks (`gradients`).
        num_tasks_expected: refuse another number of tasks.
        ensure_all_tasks_per_step: with workers, a batch waits for its share of each task as long as groups of it are
            under way. False: it takes the oldest groups of any task.

    Raises:
        UsageError: the tasks are not those that were expected, a batch cannot hold them all, or a source has no
            reward.
    """

    task_quotas: dict[str, int] | None = None  # groups of each task that a batch waits for; None: of any
    gradients_besides = 0  # of the whole model that are held at a time, beside TRL's
    tasks_in_words: str  # what of each task a batch has
    reward_func_names: list[str]  # of TRL
    _buffered_inputs: Any  # of TRL
    _gradients: TaskGradients | None = None  # of each task; None: TRL's, of all of them

    def __init__(
        self,
        *args: Any,
        mtl: str = "equal",
        num_tasks_expected: int | None = None,
        ensure_all_tasks_per_step: bool = True,
        **kwargs: Any,
    ) -> None:
        if mtl not in METHODS:
            why = f", which {REFUSED[mtl]}" if mtl in REFUSED else ""
            raise UsageError(f"mtl must be one of {', '.join(METHODS)}, got {mtl!r}{why}.")
        super().__init__(*args, **kwargs)
        self.mtl = mtl
        self.reward_func_names = distinct(self.reward_func_names)  # TRL keeps what each gave by its name
        if self.args.remove_unused_columns:
            raise UsageError("MultiTask needs the column task of each row: leave remove_unused_columns at False.")
        self.task_names = _names_of(self.train_dataset)
        if num_tasks_expected is not None and len(self.task_names) != num_tasks_expected:
            raise UsageError(
                f"{num_tasks_expected} tasks were expected, and there are {len(self.task_names)}: "
                f"{', '.join(self.task_names)}"
            )
        groups = self.args.generation_batch_size // self.num_generations
        self.tasks_in_words = "batches in TRL's order"
        if mtl != "proportional":
            _refuse_small_batch(groups, len(self.task_names))
            self.tasks_in_words = f"a batch of {groups} groups has {_divided(groups, len(self.task_names))}"
            if ensure_all_tasks_per_step:
                self.task_quotas = dict.fromkeys(self.task_names, groups // len(self.task_names))
        if mtl in WEIGHTINGS:
            require_shares(self, mtl)
            self._gradients = TaskGradients(mtl, self.accelerator)
            self.gradients_besides = len(self.task_names)
            self.tasks_in_words += f"; gradients: {mtl}"
        for function in self.reward_funcs:
            if isinstance(function, Score):
                function.require_rows(self.train_dataset, self.eval_dataset)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        if self.mtl == "proportional":
            return super()._get_train_sampler(dataset)
        return TaskSampler(
            self.train_dataset["task"][:],
            group_size=self.num_generations,
            groups=self.args.generation_batch_size // self.num_generations,
            repeats=self.num_iterations * self.args.steps_per_generation,
            shuffle=self.shuffle_dataset,
            seed=self.args.seed,
        )

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if self.model.training:
            self._report_tasks(inputs, output["completion_mask"])
            if self._gradients is not None:
                numbers = [self.task_names.index(row["task"]) for row in inputs]
                output[TASK] = output["completion_mask"].new_tensor(numbers)
        return output

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """As TRL does. With gradients of tasks, each micro-batch has its share of each task."""
        passes = self.args.steps_per_generation * self.num_iterations
        is_new = self._step % passes == 0 or self._buffered_inputs is None
        inputs = super()._prepare_inputs(generation_batch)
        if self._gradients is None or not self.model.training or self.args.steps_per_generation == 1:
            return inputs
        if is_new:
            self._buffered_inputs = dealt(self._buffered_inputs)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """With gradients of tasks, they are there afterwards, and the loss that is returned has none."""
        if self._gradients is None or TASK not in inputs:
            return super().compute_loss(model, inputs, *args, **kwargs)
        total = torch.zeros((), dtype=torch.float32, device=inputs[TASK].device)
        for task, own, factor in shares(inputs, len(self.task_names), self.loss_type, self.accelerator.gather):
            with self._gradients.of_task(task, model):
                loss = factor * super().compute_loss(model, own, *args, **kwargs)
                self._gradients.backward(task, loss)
            total += loss.detach()
        return total.requires_grad_()

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(model, *args, **kwargs)
        if self._gradients is not None and self.accelerator.sync_gradients:
            losses, measured = self._gradients.finish(model, seed=self.args.seed * 1_000_003 + self.state.global_step)
            named = {f"actor/{self.task_names[task]}_loss": share for task, share in losses.items()}
            for name, value in {**named, **measured}.items():
                self._metrics["train"][name].append(value)
        return loss

    def _report_tasks(self, rows: Sequence[Mapping[str, Any]], mask: torch.Tensor) -> None:
        """Log the mean reward of each task and source, and the mean length of each task, over all processes."""
        lengths = mask.sum(dim=1).tolist()
        own = [(row["task"], row.get("data_source"), length) for row, length in zip(rows, lengths, strict=True)]
        everything = gather_object(own)
        figures: dict[str, list[float]] = {}
        for (task, source, length), reward in zip(everything, self._rewards_of_batch(len(everything)), strict=True):
            figures.setdefault(f"{task}/response_length/mean", []).append(float(length))
            if math.isnan(reward):
                continue
            for name in (task, f"{task}/{source}") if source else (task,):
                figures.setdefault(f"{name}/reward", []).append(reward)
        for name, values in figures.items():
            self._metrics["train"][name].append(sum(values) / len(values))

    def _rewards_of_batch(self, size: int) -> list[float]:
        """The weighted sum of the rewards of each completion that TRL has scored last; NaN where it has none."""
        each = [list(values)[-size:] for values in self._logs["rewards"].values()]
        rewards = torch.tensor(each, dtype=torch.float64, device="cpu").T * self.reward_weights.double().cpu()
        total = rewards.nansum(dim=1)
        total[rewards.isnan().all(dim=1)] = torch.nan
        return list(total.tolist())


def _names_of(dataset: Any) -> list[str]:
    """The tasks of a dataset, in the order of their first rows."""
    if "task" not in (getattr(dataset, "column_names", None) or ()) or not hasattr(dataset, "unique"):
        raise UsageError(
            "MultiTask needs a train_dataset with a column task, whose rows can be had by their number: "
            "async_grpo.tasks.load makes one."
        )
    names = dataset.unique("task")
    if not all(isinstance(name, str) and name for name in names):
        raise UsageError(f"Each row of the train_dataset must name its task, and one has {names[-1]!r}.")
    return list(names)


def _divided(groups: int, tasks: int) -> str:
    """`8 + 8`, or `5 + 5 + 5 and 1 in turn`."""
    each, rest = divmod(groups, tasks)
    return " + ".join([str(each)] * tasks) + (f" and {rest} in turn" if rest else "")


def _refuse_small_batch(groups: int, tasks: int) -> None:
    if groups < tasks:
        raise UsageError(
            f"A batch of {groups} groups cannot hold {tasks} tasks. Raise per_device_train_batch_size, "
            'steps_per_generation or gradient_accumulation_steps, or take mtl="proportional".'
        )


class TaskSampler(Sampler[int]):
    """Yields row numbers as TRL's `RepeatSampler` repeats them, with as many groups of each task in every batch.

    Where the groups of a batch are no multiple of the tasks, the remainder goes to the tasks in turn. An epoch is as
    many batches as the rows fill. A task that is used up starts again, reshuffled, and goes on in the next epoch.

    Args:
        tasks: of each row, its task.
        group_size: times that a row comes in a row, `num_generations`.
        groups: of a generation batch.
        repeats: times that a batch comes in a row.
    """

    def __init__(
        self, tasks: Sequence[str], *, group_size: int, groups: int, repeats: int, shuffle: bool, seed: int
    ) -> None:
        rows: dict[str, list[int]] = {}
        for row, task in enumerate(tasks):
            rows.setdefault(task, []).append(row)
        self._group_size, self._groups, self._repeats, self._shuffle = group_size, groups, repeats, shuffle
        self._batches = len(tasks) // groups
        self._generator = torch.Generator()
        self._generator.manual_seed(seed)
        self._next = cycle([self._rows_of_task(own) for own in rows.values()])

    def __len__(self) -> int:
        return self._batches * self._groups * self._group_size * self._repeats

    def __iter__(self) -> Iterator[int]:
        for _ in range(self._batches):
            batch = [next(rows) for rows in islice(self._next, self._groups)]
            for _ in range(self._repeats):
                for row in batch:
                    yield from [row] * self._group_size

    def _rows_of_task(self, rows: Sequence[int]) -> Iterator[int]:
        """The rows of one task, again and again."""
        while True:
            order: Sequence[int] = range(len(rows))
            if self._shuffle:
                order = torch.randperm(len(rows), generator=self._generator, device="cpu").tolist()
            yield from (rows[index] for index in order)
