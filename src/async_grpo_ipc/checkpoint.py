"""Published tensors as a checkpoint would have them: its names, nothing twice, a LoRA adapter merged."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

_PREFIX = "base_model.model."  # what PEFT puts before the names of the model that it wraps
_BASE = ".base_layer"


@dataclass(frozen=True, slots=True)
class Adapter:
    """What a LoRA adapter's tensors alone do not say. It can be sent as JSON."""

    name: str
    layers: Mapping[str, tuple[float, bool]]  # name of a layer -> its scaling, and whether its product is transposed

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> Self:
        layers = {name: (float(scaling), bool(turned)) for name, (scaling, turned) in value["layers"].items()}
        return cls(str(value["name"]), layers)

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "layers": {name: list(layer) for name, layer in self.layers.items()}}

    def merged(self, layer: str, base: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """The weight of a layer with the adapter's product added, computed in 32 bits, in the dtype of the base."""
        scaling, turned = self.layers[layer]
        down, up = (self._factor(layer, kind, tensors).to(base.device, torch.float32) for kind in "AB")
        product = up @ down
        return (base.to(torch.float32) + scaling * (product.T if turned else product)).to(base.dtype)

    def _factor(self, layer: str, kind: str, tensors: Mapping[str, Tensor]) -> Tensor:
        linear = f"{layer}.lora_{kind}.{self.name}.weight"
        return tensors[linear if linear in tensors else f"{layer}.lora_embedding_{kind}.{self.name}"]


def checkpoint(tensors: Iterable[tuple[str, Tensor]], adapter: Adapter | None = None) -> Iterator[tuple[str, Tensor]]:
    """The model's own tensors, under the names that its checkpoint has; of tied ones the first.

    Args:
        tensors: as they are published: `WeightsView.items()`.
        adapter: merged into the layers that it has.
    """
    published = dict(tensors)
    seen: set[tuple[int, torch.Size]] = set()
    for name, tensor in published.items():
        memory = (tensor.data_ptr(), tensor.shape)
        if ".lora_" in name or (memory in seen and tensor.numel()):
            continue
        seen.add(memory)
        layer, own, rest = name.partition(f"{_BASE}.")
        if own and rest == "weight" and adapter is not None and layer in adapter.layers:
            tensor = adapter.merged(layer, tensor, published)
        yield name.removeprefix(_PREFIX).replace(f"{_BASE}.", "."), tensor
