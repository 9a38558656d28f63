"""A vLLM server as the generator: `use_vllm=True, vllm_mode="server"` in the user's `GRPOConfig`.

Requests go over HTTP and weights over NCCL, both through TRL's own client (`client`) and as TRL sends them.

One worker feeds the server: it is rank 0 of the group that the server receives its weights in. It reads the published
weights where they lie on its own device (in place, if it shares the trainer's), sends them under the names that a
checkpoint has, with a LoRA adapter merged into them one by one, and then generates.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from async_grpo.engines.policy import Policy, PolicyWeights
from async_grpo.engines.served.client import WEIGHTS_S, Client, ServerEngine
from async_grpo.engines.vllm_options import adapter_of
from async_grpo.errors import PeerDiedError, UnsupportedError
from async_grpo.setup.generator_choice import NAMED_SERVER
from async_grpo_ipc import RemoteWeights


class VLLMServer(ServerEngine):
    """Asks a vLLM server for completions, and sends it new weights.

    Raises:
        GeneratorError: the server cannot be reached, or rejects a request that is not a group's fault.
        UnsupportedError: it was not started as this needs it, or the model cannot be sent.
    """

    capabilities = NAMED_SERVER

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._model: nn.Module = trainer.model
        self._device: torch.device = trainer.accelerator.device
        args = trainer.args
        self._client = Client(
            base_url=args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}",
            group_port=args.vllm_group_port,
            connection_timeout=args.vllm_server_timeout,
        )
        self._client.require_distribution()
        try:
            self._wait_for(
                partial(self._client.init_communicator, device=trainer.accelerator.device),
                f"the vLLM server to open the way for weights (port {args.vllm_group_port})",
                args.vllm_server_timeout,
            )
        except NotImplementedError as error:  # a worker without a GPU
            raise UnsupportedError(
                f'vllm_mode="server": {error} Give the worker a GPU, or take --generator hf.'
            ) from error

    def follow(self, weights: RemoteWeights) -> ServedPolicy:
        return ServedPolicy(weights, PolicyWeights(weights, self._model, self._device), self)

    def load(self) -> None:
        """Send the model's parameters as they are now; nothing may be generated meanwhile."""
        described = [
            (name, str(parameter.dtype).removeprefix("torch."), list(parameter.shape))
            for name, parameter, _ in _parameters(self._model)
        ]
        self._wait_for(
            partial(self._client.update_named_params, described, _checkpoint(self._model)),
            "the vLLM server to take new weights",
            WEIGHTS_S,
        )
        self._drop_prefixes()


class ServedPolicy(Policy):
    """Keeps a server at the newest policy version, as `PolicyWeights` keeps a model."""

    def __init__(self, remote: RemoteWeights, policy: PolicyWeights, server: VLLMServer) -> None:
        self._weights = remote
        self._policy = policy
        self._server = server
        self._sent: tuple[str, int] | None = None  # generation and version that the server has

    def adopt(self, in_use: Collection[int] = ()) -> int | None:
        version = self._policy.adopt(in_use)
        if version is None:
            return None
        try:
            newest = (self._weights.generation, version)
            if newest != self._sent:
                self._sent = None
                self._server.load()
                if not self._weights.intact():
                    raise PeerDiedError("The parameter server died while its weights were sent to the vLLM server.")
                self._sent = newest
        finally:
            self._weights.release()
        return version


def _parameters(model: Any) -> Iterator[tuple[str, nn.Parameter, Any]]:
    """Every parameter of the model itself, its name in a checkpoint, and the LoRA layer that changes it, or None."""
    adapter = adapter_of(model)
    layers = {}
    if adapter is not None:
        from peft.tuners.lora import LoraLayer

        layers = {
            f"{name}.base_layer.weight": module
            for name, module in model.named_modules()
            if isinstance(module, LoraLayer) and adapter[0] in module.scaling
        }
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            yield name.removeprefix("base_model.model.").replace(".base_layer.", "."), parameter, layers.get(name)


def _checkpoint(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a checkpoint of the model would have, one at a time; an adapter is merged into them."""
    adapter = adapter_of(model)
    for name, parameter, layer in _parameters(model):
        tensor = parameter.detach()
        if layer is not None and adapter is not None:
            with torch.no_grad():
                tensor = (tensor + layer.get_delta_weight(adapter[0])).to(tensor.dtype)
        yield name, tensor
