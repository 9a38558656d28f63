"""The gradient of each task by itself, and one gradient made of them.

h_i, the share of task i, is the gradient of its rows within the whole batch: the shares sum to TRL's gradient. PCGrad
takes from each h_i what it has against the others, in random order, and sums up (Yu et al., arXiv 2001.06782). The
other methods give weights whose sum is 1, or about 1, and are multiplied by the number of tasks. The weights of the h_i
are torchjd's, from the matrix of their dot products.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from async_grpo.errors import UsageError

Tensor = torch.Tensor
OF_ROWS = ("grpo", "sapo", "luspo", "dr_grpo")  # losses that are means over rows
OF_TOKENS = ("bnpo",)  # over the tokens of a micro-batch
OF_BATCHES = ("cispo", "dapo", "vespo")  # sums over rows, divided by the tokens of the whole batch
TASK = "task_index"  # the column of a batch
WEIGHTINGS = {  # of torchjd: without a state, and without the solver of another package
    "pcgrad": "PCGradWeighting",
    "mgda": "MGDAWeighting",
    "aligned_mtl": "AlignedMTLWeighting",
    "imtl_g": "IMTLGWeighting",
}


def require_shares(trainer: Any, method: str) -> None:
    """Refuse what the shares of tasks do not sum up with, or what has no gradients to see.

    Raises:
        UsageError: another setting excludes `method`.
    """
    if trainer.is_deepspeed_enabled:
        raise UsageError(f'mtl="{method}" needs the gradients of each task, which DeepSpeed keeps: take FSDP2 or DDP.')
    for name, is_used in not_sums(trainer).items():
        if is_used:
            raise UsageError(f'mtl="{method}" and {name}: the losses of tasks would not sum to TRL\'s. Leave one out.')


def not_sums(trainer: Any) -> dict[str, bool]:
    """What makes TRL's loss of a micro-batch more than a sum over its rows, and whether this trainer has it."""
    args = trainer.args
    return {
        "entropy_coef": getattr(args, "entropy_coef", 0.0) not in (0.0, None),
        "use_adaptive_entropy": bool(getattr(args, "use_adaptive_entropy", False)),
        "top_entropy_quantile": args.top_entropy_quantile < 1.0,
        "router_aux_loss_coef": bool(getattr(trainer, "aux_loss_enabled", False)),
        "use_liger_kernel": bool(getattr(trainer, "use_liger_kernel", False)),
    }


def dealt(batches: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of these micro-batches, with as many of each task in each of them as possible."""
    order = torch.argsort(torch.cat([batch[TASK] for batch in batches]), stable=True)
    whole = joined(batches)
    return [rows_of(whole, order[start :: len(batches)]) for start in range(len(batches))]


def joined(batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: _joined([batch[name] for batch in batches]) for name in batches[0]}


def _joined(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], Tensor):
        return torch.cat(list(parts)) if parts[0].dim() else parts[0]
    return [one for part in parts for one in part] if isinstance(parts[0], list) else parts[0]


def rows_of(batch: Mapping[str, Any], rows: Tensor) -> dict[str, Any]:

    def of(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim():
            return value[rows]
        return [value[row] for row in rows.tolist()] if isinstance(value, list) else value

    return {name: of(value) for name, value in batch.items()}


def shares(
    batch: Mapping[str, Any], tasks_of_run: int, loss_type: str, gather: Any
) -> Iterator[tuple[int, dict[str, Any], float]]:
    """Shares of each task in the batch: its number, its rows, and the factor that makes their loss its share.

    TRL's loss compares across processes, so all of them compute the same tasks, with as many rows of each. Where they
    have not as many, each task is computed on all rows, with the tokens of the others masked.

    Args:
        gather: of a tensor, that of each process, one after the other.
    """
    tasks: Tensor = batch[TASK]
    mask = batch["completion_mask"] * batch.get("tool_mask", 1)
    of_each = torch.bincount(tasks, minlength=tasks_of_run)
    everywhere = gather(of_each).view(-1, len(of_each))
    is_even = bool((everywhere == of_each).all())
    for task in torch.nonzero(everywhere.sum(dim=0)).flatten().tolist():
        own = tasks == task
        tokens = float(mask[own].sum() / mask.sum().clamp(min=1))
        if is_even:
            factor = {**dict.fromkeys(OF_ROWS, float(own.float().mean())), **dict.fromkeys(OF_TOKENS, tokens)}
            yield task, rows_of(batch, torch.nonzero(own).flatten()), factor.get(loss_type, 1.0)
        else:
            masked = {**batch, "completion_mask": batch["completion_mask"] * own[:, None]}
            yield task, masked, tokens if loss_type in OF_TOKENS else 1.0


class TaskGradients:
    """Adds up the gradient of each task over the micro-batches of a step, and makes one of them by a `WEIGHTINGS`."""

    def __init__(self, method: str, accelerator: Any) -> None:
        self._method, self._accelerator = method, accelerator
        self._sums: dict[int, list[Tensor | None]] = {}
        self._losses: dict[int, Tensor] = {}

    @contextmanager
    def of_task(self, task: int, model: Any) -> Iterator[None]:
        """What is added to the gradients in this block is the task's. They are none before and after it."""
        parameters = _trained(model)
        is_sharded = hasattr(model, "set_requires_gradient_sync")
        if is_sharded:  # FSDP2 has a gradient only once it is reduced
            model.set_requires_gradient_sync(True)
            yield
        else:
            with self._accelerator.no_sync(model):
                yield
        before = self._sums.setdefault(task, [None] * len(parameters))
        for index, parameter in enumerate(parameters):
            if parameter.grad is not None:
                earlier, now = before[index], parameter.grad
                before[index] = now if earlier is None else earlier.add_(now)
            parameter.grad = None

    def backward(self, task: int, loss: Tensor) -> None:
        """Compute the gradients of a task's share of the loss."""
        with torch.autocast(loss.device.type, enabled=False):
            self._accelerator.backward(loss)
        self._losses[task] = self._losses.get(task, 0.0) + loss.detach()

    def finish(self, model: Any, seed: int) -> tuple[dict[int, float], dict[str, float]]:
        """Set the gradients of the parameters; returns the share of each task in the loss, and what is measured."""
        parameters, tasks = _trained(model), sorted(self._sums)
        is_sharded = hasattr(model, "set_requires_gradient_sync")
        if not is_sharded and self._accelerator.num_processes > 1:
            self._reduce(parameters)
        dots = torch.zeros(len(tasks), len(tasks), dtype=torch.float64, device=parameters[0].device)
        for row, one in enumerate(tasks):
            for column, other in enumerate(tasks[: row + 1]):
                dots[row, column] = dots[column, row] = _dot(self._sums[one], self._sums[other])
        if is_sharded:
            dots = self._accelerator.reduce(dots.float(), reduction="sum").double()
        weights = task_weights(self._method, dots.cpu(), seed)
        for index, parameter in enumerate(parameters):
            parts = [(weight, self._sums[task][index]) for weight, task in zip(weights.tolist(), tasks, strict=True)]
            known = [(weight, part) for weight, part in parts if part is not None]
            parameter.grad = (
                sum((weight * part for weight, part in known[1:]), known[0][0] * known[0][1]) if known else None
            )
        losses = {task: float(self._accelerator.reduce(loss, reduction="mean")) for task, loss in self._losses.items()}
        self._sums, self._losses = {}, {}
        return losses, _measured(dots.cpu())

    def _reduce(self, parameters: Sequence[Any]) -> None:
        """The mean over processes, of each task, as DDP would make it."""
        for task in sorted(self._sums):
            for index, parameter in enumerate(parameters):
                own = self._sums[task][index]
                own = torch.zeros_like(parameter) if own is None else own
                self._sums[task][index] = self._accelerator.reduce(own, reduction="mean")


def task_weights(method: str, dots: Tensor, seed: int) -> Tensor:
    """The weight of each share, by the matrix of their dot products; tasks without a gradient are left out.

    Args:
        seed: of the random order, the same in all processes.
    """
    from torchjd import aggregation

    there = torch.nonzero(dots.diagonal() > 0).flatten()
    weights = torch.zeros(len(dots), dtype=dots.dtype, device=dots.device)
    if len(there):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            weights[there] = getattr(aggregation, WEIGHTINGS[method])()(dots[there][:, there])
    return weights if method == "pcgrad" else len(there) * weights


def _trained(model: Any) -> list[Any]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _dot(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> Tensor:
    pairs = [(_local(a), _local(b)) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    return (
        torch.stack([torch.dot(a, b).double() for a, b in pairs]).sum()
        if pairs
        else torch.zeros((), dtype=torch.float64, device="cpu")
    )


def _local(gradient: Tensor) -> Tensor:
    """The part that this process has, as one row."""
    whole: Any = gradient
    return (whole.to_local() if hasattr(whole, "to_local") else whole).flatten().float()


def _measured(dots: Tensor) -> dict[str, float]:
    """The share of pairs of tasks whose gradients conflict, and the smallest cosine."""
    norms = dots.diagonal().sqrt()
    pairs = torch.triu_indices(len(dots), len(dots), offset=1)
    cosines = (dots / (norms[:, None] * norms))[pairs[0], pairs[1]]
    known = cosines[cosines.isfinite()]
    if not len(known):
        return {}
    return {"mtl/conflicts": float((known < 0).double().mean()), "mtl/cosine_min": float(known.min())}
