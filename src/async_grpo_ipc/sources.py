"""What an exporter publishes: a model's parameters and buffers, tied ones once, with the places that refer to
them; and which of them change, which are frozen, which are tied.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import is_
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from async_grpo_ipc.copies import allow_merging_over_padding
from async_grpo_ipc.errors import MismatchError
from async_grpo_ipc.layout import plan_layout, views

Write = Callable[[Mapping[str, Tensor]], None]


@dataclass(slots=True)
class Place:
    """Where a module holds a parameter or buffer."""

    holder: dict[str, Any]
    key: str
    tensor: Tensor


@dataclass(slots=True)
class ModelTensor:
    """One parameter or buffer: all its names, and the place in a module of each."""

    is_parameter: bool
    names: list[str] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def tensor(self) -> Tensor:
        return self.places[0].tensor

    def tie(self, other: "ModelTensor") -> None:
        """Add the other's places to this one's."""
        self.names.extend(other.names)
        self.places.extend(other.places)

    def objects(self) -> list[Tensor]:
        """The distinct tensor objects: one, except for names that are tied by memory alone."""
        return list({id(place.tensor): place.tensor for place in self.places}.values())

    def point_to(self, memory: Tensor) -> None:
        """Let this parameter or buffer live in `memory`. Objects stay the same unless the kind of device
        forbids it (meta).
        """
        if (self.tensor.device.type == "meta") == (memory.device.type == "meta"):
            for place in self.places:
                place.tensor.data = memory
            return
        new = nn.Parameter(memory, requires_grad=self.tensor.requires_grad) if self.is_parameter else memory
        for place in self.places:
            place.holder[place.key] = place.tensor = new


class Places:
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
        places = [(p.holder, p.key, p.tensor) for entry in self._entries for p in entry.places]
        self._held = [*self._modules, *places]
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
        entry.places.append(Place(holder, key, tensor))
    return list(found.values())


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """What a model has, without its values: taken before a trainer shards, moves or casts it."""

    changing: Mapping[str, Tensor]  # on the meta device
    static: Mapping[str, Tensor]
    tied: Mapping[str, str]  # second name -> name stored under

    @classmethod
    def of_model(cls, model: nn.Module) -> Self:
        """The parameters that train, and those that do not."""
        entries = model_tensors(model, buffers=False)
        return cls(
            changing={entry.name: _shape_of(entry.tensor) for entry in entries if entry.tensor.requires_grad},
            static={entry.name: _shape_of(entry.tensor) for entry in entries if not entry.tensor.requires_grad},
            tied={name: entry.name for entry in entries for name in entry.names[1:]},
        )


def _shape_of(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


@dataclass(slots=True, kw_only=True)
class Sources:
    """The trainer's tensors, by the name each is stored under."""

    changing: Mapping[str, Tensor]  # copied with every version
    static: Mapping[str, Tensor] = field(default_factory=dict)  # copied once
    tied: Mapping[str, str] = field(default_factory=dict)  # second name -> name stored under
    dtype: torch.dtype | None = None
    complete: bool = False  # whether every parameter of a model is in here
    buffers: bool = False
    places: Places = field(default_factory=lambda: Places(None, ()))  # to notice a model that was rebuilt
    frozen: Sequence[ModelTensor] = ()  # the parameters of `static`
    write: Write | None = None  # fills the given tensors, where no process holds them whole
    written_on: torch.device | None = None  # the device of what `write` fills

    @classmethod
    def of_model(
        cls,
        model: nn.Module,
        entries: Sequence[ModelTensor],
        *,
        dtype: torch.dtype | None,
        buffers: bool,
        frozen: Literal["static", "changing", "skip"],
    ) -> Self:
        changing = [
            entry for entry in entries if frozen == "changing" or entry.tensor.requires_grad or not entry.is_parameter
        ]
        static = [entry for entry in entries if entry not in changing] if frozen == "static" else []
        if not changing and frozen != "changing":
            raise ValueError(
                "No parameter to publish has requires_grad, so no version would ever differ. Pass "
                "frozen='changing' to publish frozen parameters with every version."
            )
        published = [*changing, *static]
        sources = cls(
            changing={entry.name: entry.tensor for entry in changing},
            static={entry.name: entry.tensor for entry in static},
            tied={name: entry.name for entry in published for name in entry.names[1:]},
            dtype=dtype,
            complete=sum(entry.is_parameter for entry in published) == len(model_tensors(model, buffers=False)),
            buffers=buffers,
            places=Places(model, published),
            frozen=static,
        )
        sources._validate()
        return sources

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor], *, dtype: torch.dtype | None) -> Self:
        stored: dict[str, Tensor] = {}
        tied: dict[str, str] = {}
        primaries: dict[object, str] = {}
        for name, tensor in tensors.items():
            primary = primaries.setdefault(identity(tensor), name)
            if primary == name:
                stored[name] = tensor
            else:
                tied[name] = primary
        sources = cls(changing=stored, tied=tied, dtype=dtype)
        sources._validate()
        return sources

    @classmethod
    def of_blueprint(cls, blueprint: Blueprint, write: Write, device: torch.device) -> Self:
        if not blueprint.changing:
            raise ValueError("No parameter of the blueprint trains, so no version would ever differ.")
        return cls(
            changing=blueprint.changing,
            static=blueprint.static,
            tied=blueprint.tied,
            complete=True,
            write=write,
            written_on=device,
        )

    @property
    def device(self) -> torch.device:
        if self.written_on is not None:
            return self.written_on
        return next(iter(self._all().values())).device

    def check(self) -> None:
        """Raise where publishing would silently miss a change of the model."""
        replaced = self.places.first_replaced()
        if replaced is not None:
            raise MismatchError(
                f"{replaced} of the exported model was replaced by another object, so its new "
                "values would not be published. Make the exporter after everything that rebuilds the model."
            )
        thawed = next((name for name, tensor in self.static.items() if tensor.requires_grad), None)
        if thawed is not None:
            raise MismatchError(
                f"Parameter {thawed} was frozen when the exporter was made, and is trained now. Make a new exporter."
            )

    def _all(self) -> dict[str, Tensor]:
        return {**self.changing, **self.static}

    def _validate(self) -> None:
        if not self._all():
            raise ValueError("There is no tensor to publish.")
        for name, tensor in self._all().items():
            if tensor.layout is not torch.strided or tensor.is_quantized:
                raise ValueError(
                    f"Tensor {name} is not a plain dense tensor (layout {tensor.layout}): it cannot be mapped."
                )
            if tensor.device.type not in ("cpu", "cuda"):
                raise ValueError(f"Tensor {name} is on {tensor.device}: only CPU and CUDA tensors can be published.")
            if tensor.device != self.device:
                raise ValueError(
                    f"Tensor {name} is on {tensor.device}, others on {self.device}: an exporter publishes "
                    "one device's memory. Make one exporter a device, or put the model on one."
                )
