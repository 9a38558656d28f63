"""A model's parameters and buffers: where its modules hold them, tied ones once, and how they are pointed to other
memory; and a `Binding`, which matches them to a handle, name by name: what aliasing and pulling move.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from async_grpo_ipc.copies import CopyPlan, allow_merging_over_padding
from async_grpo_ipc.errors import MismatchError
from async_grpo_ipc.handle import WeightsHandle
from async_grpo_ipc.layout import TensorSpec, plan_layout, views
from async_grpo_ipc.memory import AttachedMemory


@dataclass(slots=True)
class ModuleAttribute:
    """The dictionary of a module that holds a parameter or buffer, and its key there."""

    holder: dict[str, Any]
    key: str
    tensor: Tensor


@dataclass(slots=True)
class ModelTensor:
    """One parameter or buffer: all its names, and the attribute of a module for each."""

    is_parameter: bool
    names: list[str] = field(default_factory=list)
    attributes: list[ModuleAttribute] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def tensor(self) -> Tensor:
        return self.attributes[0].tensor

    def tie(self, other: "ModelTensor") -> None:
        """Add the other's attributes to this one's."""
        self.names.extend(other.names)
        self.attributes.extend(other.attributes)

    def objects(self) -> list[Tensor]:
        """The distinct tensor objects: one, except for names that are tied by memory alone."""
        return list({id(attribute.tensor): attribute.tensor for attribute in self.attributes}.values())

    def point_to(self, memory: Tensor) -> None:
        """Let this parameter or buffer live in `memory`. Objects stay the same unless the kind of device
        forbids it (meta).
        """
        if (self.tensor.device.type == "meta") == (memory.device.type == "meta"):
            for attribute in self.attributes:
                attribute.tensor.data = memory
            return
        new = nn.Parameter(memory, requires_grad=self.tensor.requires_grad) if self.is_parameter else memory
        for attribute in self.attributes:
            attribute.holder[attribute.key] = attribute.tensor = new


class HeldObjects:
    """Tells, with every publish and pull, whether a model still has the modules and tensors it had."""

    def __init__(self, model: nn.Module | None, entries: Sequence[ModelTensor]) -> None:
        modules = [] if model is None else [module._modules for module in model.modules()]
        self._modules = [
            (children, key, child) for children in modules for key, child in children.items() if _has_tensors(child)
        ]
        self._entries = entries
        self.remember()

    def remember(self) -> None:
        """Take what the modules hold now, after `point_to`, as what was found."""
        attributes = [(a.holder, a.key, a.tensor) for entry in self._entries for a in entry.attributes]
        self._held = [*self._modules, *attributes]
        self._holders = list({id(holder): holder for holder, _, _ in self._held}.values())
        self._contents = list(self._all_contents())

    def first_replaced(self) -> str | None:
        """The last part of the name of what is another object now, None where all are the same."""
        # Mostly nothing at all has changed, which is quickly seen: this is done with every publish and pull.
        now = list(self._all_contents())
        if len(now) == len(self._contents) and all(map(is_, now, self._contents)):
            return None
        return next((key for holder, key, found in self._held if holder.get(key) is not found), None)

    def _all_contents(self) -> Iterator[object]:
        return chain.from_iterable(map(dict.values, self._holders))


def _has_tensors(module: nn.Module | None) -> bool:
    """Swapping a module without tensors (a dropout, an activation) does not matter."""
    if module is None:
        return False
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None


def model_tensors(model: nn.Module, *, buffers: bool) -> list[ModelTensor]:
    """Parameters, and buffers if asked for, in the model's order. Tied ones (one object, or one memory) appear once."""
    found: dict[Any, ModelTensor] = {}
    for name, holder, key, tensor, is_parameter in _walk(model, buffers):
        entry = found.setdefault(identity(tensor), ModelTensor(is_parameter))
        entry.names.append(name)
        entry.attributes.append(ModuleAttribute(holder, key, tensor))
    return list(found.values())


def replace_memory(model: nn.Module, device: torch.device | str) -> None:
    """Give the parameters memory on `device`, in which anything may stand; on "meta" they have none. Ties stay."""
    for entry in model_tensors(model, buffers=False):
        entry.point_to(torch.empty_like(entry.tensor.detach(), device=device))


def flatten_parameters(model: nn.Module) -> None:
    """Move the parameters into one buffer a dtype, laid out as the slots are: publish and pull become one
    copy a bucket.

    The parameters stay the same objects, so an optimizer keeps them. Needs the model's size once more while
    it runs. It pays for small tensors on a CPU; call it again after anything that moved the parameters.
    """
    entries = model_tensors(model, buffers=False)
    for trainable in (True, False):
        group = {entry.name: entry for entry in entries if entry.tensor.requires_grad is trainable}
        by_name = {name: entry.tensor for name, entry in group.items()}
        for device in {tensor.device for tensor in by_name.values()}:
            _flatten({name: entry for name, entry in group.items() if entry.tensor.device == device}, device)


def _flatten(group: dict[str, ModelTensor], device: torch.device) -> None:
    layout = plan_layout({name: entry.tensor for name, entry in group.items()})
    block = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
    allow_merging_over_padding(block)
    for name, memory in views(block, layout.tensors).items():
        memory.copy_(group[name].tensor.detach())
        group[name].point_to(memory)


def _walk(model: nn.Module, buffers: bool) -> Iterator[tuple[str, dict[str, Any], str, Tensor, bool]]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        for holder, is_parameter in ((module._parameters, True), (module._buffers, False)):
            for key, tensor in holder.items():
                if tensor is not None and (is_parameter or buffers):
                    yield (f"{prefix}.{key}" if prefix else key), holder, key, tensor, is_parameter


def identity(tensor: Tensor) -> Any:
    """Equal for tensors that are tied: one object, or the same elements of one memory."""
    if tensor.numel() == 0 or tensor.device.type == "meta" or tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


class Binding:
    """The tensors of one model and their views of one generation's memory."""

    def __init__(self, model: nn.Module, handle: WeightsHandle, memory: AttachedMemory, where: str) -> None:
        matched = match(model, handle, where)
        static = {spec.name for spec in handle.static.tensors}
        self._generation = handle.generation
        self._where = where
        self._memory = memory
        self._static = [(entry, spec) for entry, spec in matched if spec.name in static]
        self._changing = [(entry, spec) for entry, spec in matched if spec.name not in static]
        self._held_objects = HeldObjects(model, [entry for entry, _ in matched])
        self._plans: dict[int, CopyPlan] = {}
        self._static_is_here = False
        self._moves: list[list[tuple[Tensor, Tensor]]] = []  # for each slot: parameter, its view there

    def fits(self, handle: WeightsHandle) -> bool:
        """Whether this is the handle that was matched, and the model still holds the parameters that it held then."""
        return self._generation == handle.generation and self._held_objects.first_replaced() is None

    # Aliasing

    def alias_slot(self, slot: int) -> None:
        """Point the model at a slot whose lease the caller holds, and at the static block: no byte is copied."""
        if self._moves:  # it is aliased already: as fast as can be, one assignment a tensor
            for tensor, view in self._moves[slot]:
                tensor.data = view
            return
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
        self._held_objects.remember()
        views_by_slot = [self._views(block, self._changing) for block in self._memory.blocks[1:]]
        self._moves = [list(self._with_objects(slot_views)) for slot_views in views_by_slot]

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
        self._held_objects.remember()

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


def match(model: nn.Module, handle: WeightsHandle, where: str) -> list[tuple[ModelTensor, TensorSpec]]:
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


def _require_incomplete(entry: ModelTensor, handle: WeightsHandle, where: str) -> None:
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
