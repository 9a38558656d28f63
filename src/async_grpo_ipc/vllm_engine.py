"""A vLLM server takes new weights out of shared memory: a weight-transfer engine for vLLM, backend `async_grpo_ipc`.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "async_grpo_ipc"}'

vLLM finds `register` by its entry point. Each of its processes maps the published memory by itself, so a server with
tensor parallelism takes the parts that it needs, without NCCL: POSIX shared memory with vLLM's CPU build, CUDA IPC on
GPUs. Nothing is sent but the path of the handle file and the number of a version.

All that this package touches of vLLM is in this file, and `tests/with_vllm/test_vllm_transfer.py` names what moved.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from async_grpo_ipc.checkpoint import Adapter, checkpoint
from async_grpo_ipc.errors import MismatchError
from async_grpo_ipc.recording import RecordedCopies, record
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
    _copies: RecordedCopies | None = None  # of the first load, where copies are all that it does
    _in_place: bool | None = None  # whether the model may be loaded by copies; None: not looked at yet

    def init_transfer_engine(self, init_info: SharedMemoryInit) -> None:
        self.shutdown()
        self._adapter = Adapter.of_json(init_info.adapter) if init_info.adapter else None
        self._copies = self._in_place = None
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
                self._load(dict(view.items()))

    def finish_weight_update(self) -> None:
        """Nothing is left: see `start_weight_update`."""

    def shutdown(self) -> None:
        if self._remote is not None:
            self._remote.close()
            self._remote = None

    def _load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """By vLLM's own way to reload a model: it fuses, shards, packs and quantises as at the first load.

        Where loading is only copying, the first load is recorded and the others repeat its copies. An adapter is merged
        layer by layer, so that no second model is needed: it is always loaded vLLM's way.
        """
        if self._in_place is None:
            self._in_place = self._adapter is None and weights_stay_as_loaded(self.model)
        if not self._in_place:
            self._reload(checkpoint(tensors.items(), self._adapter))
        else:
            self._copy(dict(checkpoint(tensors.items())))
        if self.device.type == "cpu":
            _pack_embeddings_again(self.model)

    def _copy(self, weights: Mapping[str, torch.Tensor]) -> None:
        if self._copies is not None and self._copies.fits(weights):
            self._copies.repeat(weights)
            return
        self._copies = record(partial(self._load_in_place, weights), self.model, weights)
        self._in_place = self._copies is not None

    def _reload(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        wanted = self._wanted()  # before vLLM prepares the model: a tied output layer would count as one of its own
        initialize_layerwise_reload(self.model)
        loaded = self.model.load_weights(weights)
        finalize_layerwise_reload(self.model, self.model_config)
        _require_all(wanted, loaded)

    def _load_in_place(self, weights: Mapping[str, torch.Tensor]) -> None:
        _require_all(self._wanted(), self.model.load_weights(iter(weights.items())))

    def _wanted(self) -> set[str]:
        return {name for name, _ in self.model.named_parameters() if name.endswith((".weight", ".bias"))}


def _require_all(wanted: set[str], loaded: set[str] | None) -> None:
    if loaded is not None and (missing := sorted(wanted - set(loaded))):
        raise MismatchError(
            f"vLLM's model has {len(missing)} parameters that are not published, the first is {missing[0]}. "
            "Publish every parameter of the model that the server was started with."
        )


def weights_stay_as_loaded(model: torch.nn.Module) -> bool:
    """Whether nothing is made of the weights after loading, so that `load_weights` may write over them any time.

    Not so for quantised weights, experts and latent attention: those are loaded by vLLM's `reload_weights`.
    """
    plain = (type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    methods_are_plain = all(type(getattr(module, "quant_method", None)) in plain for module in model.modules())
    absorbs = any(isinstance(module, MLAAttention) for module in model.modules())
    return methods_are_plain and not absorbs and all(parameter.numel() for parameter in model.parameters())


def _pack_embeddings_again(model: torch.nn.Module) -> None:
    """A CPU keeps a packed copy of an output layer; where it is tied to the embedding, vLLM's reload leaves it old."""
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedEmbeddingMethod):
            method.process_weights_after_loading(layer)
