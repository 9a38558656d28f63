"""Repeats a model's own loading of weights as plain copies.

vLLM's `load_weights` looks up every name, and splits and fuses tensors, in Python, for each version again. The first
load is recorded: which part of which tensor was copied where. Later versions replay the same copies in one call.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from async_grpo_ipc.copies import by_dtypes


@dataclass(frozen=True, slots=True)
class _Copy:
    name: str  # of the tensor that is read
    offset: int  # in it, in elements
    size: torch.Size
    stride: tuple[int, ...]
    into: Tensor  # a part of the model

    def read_from(self, tensor: Tensor) -> Tensor:
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


class RecordedCopies:
    """Which part of which tensor belongs into which part of a model."""

    def __init__(self, copies: list[_Copy], tensors: Mapping[str, Tensor]) -> None:
        self._copies = copies
        self._shapes = _shapes(tensors)

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether these are other values of the tensors that were loaded."""
        return _shapes(tensors) == self._shapes

    def repeat(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy these values where those of the same names went."""
        for destinations, sources in by_dtypes(
            (copy.into, copy.read_from(tensors[copy.name])) for copy in self._copies
        ):
            torch._foreach_copy_(destinations, sources)


def record(load: Callable[[], Any], model: nn.Module, tensors: Mapping[str, Tensor]) -> RecordedCopies | None:
    """Call `load`, which loads `tensors` into `model`, and return how to do that again.

    None where copies alone would not do: a tensor was copied in part, or changed, or some parameter got nothing.
    """
    with _Recorder(tensors) as recorder:
        load()
    recorded = RecordedCopies(recorder.copies, tensors)
    return recorded if _tells_all(recorder.copies, model, tensors) else None


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Notes each copy that reads one of the tensors."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._tensors = tensors
        self.copies: list[_Copy] = []

    def __torch_dispatch__(
        self, func: Any, types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            into, source = args[:2]
            name = next((name for name, tensor in self._tensors.items() if _is_part_of(source, tensor)), None)
            if name is not None:
                offset = (source.data_ptr() - self._tensors[name].data_ptr()) // source.element_size()
                self.copies.append(_Copy(name, offset, source.size(), source.stride(), into.detach()))
        return func(*args, **(kwargs or {}))


def _is_part_of(part: Tensor, whole: Tensor) -> bool:
    start, end = whole.data_ptr(), whole.data_ptr() + whole.numel() * whole.element_size()
    return part.dtype == whole.dtype and start <= part.data_ptr() < end


def _tells_all(copies: list[_Copy], model: nn.Module, tensors: Mapping[str, Tensor]) -> bool:
    read: Counter[str] = Counter()
    for copy in copies:
        read[copy.name] += copy.into.numel()
        if not torch.equal(copy.into, copy.read_from(tensors[copy.name]).to(copy.into)):
            return False
    written = {copy.into.untyped_storage().data_ptr() for copy in copies}
    whole = all(read[name] == tensor.numel() for name, tensor in tensors.items())
    return whole and all(parameter.untyped_storage().data_ptr() in written for parameter in model.parameters())


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}
