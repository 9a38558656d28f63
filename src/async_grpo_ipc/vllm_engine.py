"""A vLLM server takes new weights out of shared memory: a weight-transfer engine for vLLM, backend `async_grpo_ipc`.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "async_grpo_ipc"}'

vLLM finds `register` by its entry point. Each of its processes maps the published memory by itself, so a server with
tensor parallelism takes the parts that it needs, without NCCL: POSIX shared memory with vLLM's CPU build, CUDA IPC on
GPUs. Nothing is sent but the path of the handle file and the number of a version.

All that this package touches of vLLM is in this file, and `tests/with_vllm/test_vllm_transfer.py` names what moved.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from async_grpo_ipc.checkpoint import Adapter, checkpoint
from async_grpo_ipc.errors import MismatchError
from async_grpo_ipc.remote import RemoteWeights, open_remote_memory

BACKEND = "async_grpo_ipc"


def register() -> None:
    """Make the backend known to vLLM, which calls this in each of its processes, perhaps more than once."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryEngine)


@dataclass
class SharedMemoryInit(WeightTransferInitInfo):
    """Body of `/init_weight_transfer_engine`."""

    handle: str  # path of the handle file
    adapter: dict[str, Any] | None = None  # `Adapter.as_json()`, to be merged into the weights that are taken


@dataclass
class SharedMemoryUpdate(WeightTransferUpdateInfo):
    """Body of `/update_weights`. Whoever asks holds a lease on `version` until the answer has come."""

    version: int
    generation: str = ""  # of the exporter; empty: whichever is there
    timeout_s: float = 60.0


class SharedMemoryEngine(WeightTransferEngine[SharedMemoryInit, SharedMemoryUpdate]):
    """One process's side of it: maps the memory once, and loads a version when it is told to."""

    init_info_cls = SharedMemoryInit
    update_info_cls = SharedMemoryUpdate
    supports_draft_weight_update = False
    _remote: RemoteWeights | None = None
    _adapter: Adapter | None = None

    def init_transfer_engine(self, init_info: SharedMemoryInit) -> None:
        self.shutdown()
        self._adapter = Adapter.of_json(init_info.adapter) if init_info.adapter else None
        self._remote = open_remote_memory(init_info.handle, device=self.device if self.device.type == "cuda" else None)

    def start_weight_update(self) -> None:
        """Nothing yet: a version is taken whole, within the lease, in `receive_weights`."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class does it, whose wait for an accelerator a CPU does not have; the lease waits itself."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: SharedMemoryUpdate) -> None:
        if self._remote is None:
            raise RuntimeError("No handle file was named: POST /init_weight_transfer_engine comes first.")
        version = update_info.version
        with self._remote.lease(update_info.timeout_s, version=version) as view:
            if update_info.generation not in ("", view.generation):
                raise MismatchError(
                    f"Version {version} was to come from exporter {update_info.generation}, and {view.generation} is "
                    "there now. Ask again with the new one."
                )
            with torch.no_grad():
                self._load(view.items())

    def finish_weight_update(self) -> None:
        """Nothing is left: see `start_weight_update`."""

    def shutdown(self) -> None:
        if self._remote is not None:
            self._remote.close()
            self._remote = None

    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """By vLLM's own way to reload a model: it fuses, shards, packs and quantises as at the first load."""
        wanted = {name for name, _ in self.model.named_parameters() if name.endswith((".weight", ".bias"))}
        initialize_layerwise_reload(self.model)
        loaded = self.model.load_weights(checkpoint(tensors, self._adapter))
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _pack_embeddings_again(self.model)
        if loaded is not None and (missing := sorted(wanted - set(loaded))):
            raise MismatchError(
                f"vLLM's model has {len(missing)} parameters that are not published, the first is {missing[0]}. "
                "Publish every parameter of the model that the server was started with."
            )


def _pack_embeddings_again(model: torch.nn.Module) -> None:
    """A CPU keeps a packed copy of an output layer; where it is tied to the embedding, vLLM's reload leaves it old."""
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedEmbeddingMethod):
            method.process_weights_after_loading(layer)
