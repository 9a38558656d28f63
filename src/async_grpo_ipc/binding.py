"""A model matched to a handle, name by name: what aliasing and pulling move."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from async_grpo_ipc.copies import CopyPlan
from async_grpo_ipc.errors import MismatchError
from async_grpo_ipc.handle import Handle
from async_grpo_ipc.layout import TensorSpec, views
from async_grpo_ipc.memory import AttachedMemory
from async_grpo_ipc.sources import ModelTensor, Places, model_tensors


class Binding:
    """The tensors of one model and their places in one generation's memory."""

    def __init__(self, model: nn.Module, handle: Handle, memory: AttachedMemory, where: str) -> None:
        matched = match(model, handle, where)
        static = {spec.name for spec in handle.static.tensors}
        self.generation = handle.generation
        self._where = where
        self._memory = memory
        self._static = [(entry, spec) for entry, spec in matched if spec.name in static]
        self._changing = [(entry, spec) for entry, spec in matched if spec.name not in static]
        self._places = Places(model, [entry for entry, _ in matched])
        self._plans: dict[int, CopyPlan] = {}
        self._static_is_here = False
        self._moves: list[list[tuple[Tensor, Tensor]]] = []  # for each slot: parameter, its view there

    def is_current(self) -> bool:
        """Whether the model still holds the parameters that were matched."""
        return self._places.first_replaced() is None

    # Aliasing

    def alias_slot(self, slot: int) -> None:
        """Point the model at the static block and at a slot whose lease the caller holds: no byte is copied."""
        device = self._memory.alias_device
        for entry, _ in (*self._static, *self._changing):
            if entry.tensor.device.type != "meta" and entry.tensor.device != device:
                raise MismatchError(
                    f"Tensor {entry.name} is on {entry.tensor.device}, the weights of {self._where} are "
                    f"{f'on {device}' if device else 'on another GPU'}: a model can only alias memory of "
                    "its own device. Use pull(model), which copies."
                )
        self._alias(self._static, self._memory.blocks[0])
        self._alias(self._changing, self._memory.blocks[1 + slot])
        self._places.remember()
        self._static_is_here = True
        views_by_slot = [self._views(block, self._changing) for block in self._memory.blocks[1:]]
        self._moves = [list(self._with_objects(slot_views)) for slot_views in views_by_slot]

    def move_to_slot(self, slot: int) -> None:
        """The same for a model that is aliased already, as fast as can be: one assignment a tensor."""
        for tensor, view in self._moves[slot]:
            tensor.data = view

    def _alias(self, pairs: Sequence[tuple[ModelTensor, TensorSpec]], block: Tensor) -> None:
        for (entry, _), view in zip(pairs, self._views(block, pairs), strict=True):
            entry.point_to(view)

    def _with_objects(self, slot_views: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        for (entry, _), view in zip(self._changing, slot_views, strict=True):
            for tensor in entry.objects():
                yield tensor, view

    def move_out(self, *, keep_weights: bool) -> None:
        """Let no parameter refer to shared memory any more: into private copies, or to the meta device (shape
        without memory).
        """
        for entry, _ in (*self._static, *self._changing):
            old = entry.tensor.detach()
            entry.point_to(old.clone() if keep_weights else torch.empty_like(old, device="meta"))
        self._places.remember()

    # Pulling

    def pull_from_slot(self, slot: int) -> None:
        """Copy a slot whose lease the caller holds, and with the first call the static block, into the
        model's own memory.
        """
        if not self._static_is_here:
            self._plan(self._memory.blocks[0], self._static).run()
            self._static_is_here = True
        if slot not in self._plans or not self._plans[slot].is_fresh():
            self._plans[slot] = self._plan(self._memory.blocks[1 + slot], self._changing)
        self._plans[slot].run()

    def _plan(self, block: Tensor, pairs: Sequence[tuple[ModelTensor, TensorSpec]]) -> CopyPlan:
        destinations = [entry.tensor for entry, _ in pairs]
        on_meta = next((entry.name for entry, _ in pairs if entry.tensor.device.type == "meta"), None)
        if on_meta is not None:
            raise MismatchError(
                f"Tensor {on_meta} is on the meta device and has no memory to copy into. Use alias(model), "
                "or give the model memory with model.to_empty(device=...)."
            )
        views_there = self._views(block, pairs)
        return CopyPlan(destinations, views_there, movable=destinations, staging=self._memory.staging)

    @staticmethod
    def _views(block: Tensor, pairs: Sequence[tuple[ModelTensor, TensorSpec]]) -> list[Tensor]:
        by_name = views(block, [spec for _, spec in pairs])
        return [by_name[spec.name] for _, spec in pairs]


def match(model: nn.Module, handle: Handle, where: str) -> list[tuple[ModelTensor, TensorSpec]]:
    """Pair the model's tensors with the published ones. Raises `MismatchError` that says what to do, before
    anything is touched.
    """
    published = handle.specs_by_name()
    pairs = []
    seen: dict[str, ModelTensor] = {}
    for entry in model_tensors(model, buffers=handle.buffers):
        specs = {published[name].name: published[name] for name in entry.names if name in published}
        if len(specs) > 1:
            raise MismatchError(
                f"Tensors {' and '.join(specs)} are tied in this model and published separately at {where}. "
                "Build the model as the trainer does (tie_word_embeddings, for example)."
            )
        if not specs:
            _require_incomplete(entry, handle, where)
            continue
        (spec,) = specs.values()
        _require_same(entry, spec, where)
        twin = seen.get(spec.name)
        if twin is not None and twin.tensor.device.type == entry.tensor.device.type == "meta":
            twin.tie(entry)  # `model.to("meta")` unties
        else:
            pairs.append((entry, spec))
            seen[spec.name] = entry
    unknown = [name for name in published if published[name].name not in seen]
    if unknown:
        raise MismatchError(
            f"{len(unknown)} tensors published at {where} are not in this model, the first is {unknown[0]}. "
            "Build the model as the trainer does (same class, adapters and wrappers), or publish fewer "
            "tensors with include=."
        )
    return pairs


def _require_incomplete(entry: ModelTensor, handle: Handle, where: str) -> None:
    if handle.complete:
        raise MismatchError(
            f"Tensor {entry.name} of this model is not published at {where}, which has all of the "
            "trainer's. Build the model as the trainer does (same class, adapters and wrappers)."
        )


def _require_same(entry: ModelTensor, spec: TensorSpec, where: str) -> None:
    if tuple(entry.tensor.shape) != spec.shape:
        raise MismatchError(
            f"Tensor {entry.name} has shape {tuple(entry.tensor.shape)} in this model and {spec.shape} at "
            f"{where}. Build the model from the same configuration as the trainer's."
        )
    if entry.tensor.dtype != spec.dtype:
        raise MismatchError(
            f"Tensor {entry.name} is {entry.tensor.dtype} in this model and {spec.dtype} at {where}. Load "
            f"the model with dtype={spec.dtype}, or publish with dtype={entry.tensor.dtype}."
        )
