"""What an exporter publishes: which tensors change with every version, which are frozen, and which are tied."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

import torch
from torch import Tensor, nn

from async_grpo_ipc.errors import MismatchError
from async_grpo_ipc.model import HeldObjects, ModelTensor, identity, model_tensors

Write = Callable[[Mapping[str, Tensor]], None]


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
    held: HeldObjects = field(default_factory=lambda: HeldObjects(None, ()))  # to notice a model that was rebuilt
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
            held=HeldObjects(model, published),
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
        replaced = self.held.first_replaced()
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
