"""A vLLM server that the worker starts, and feeds through memory: `--generator vllm-server`.

The server maps what the parameter server publishes, in each of its processes, so weights pass neither the worker nor
NCCL, and tensor parallelism needs nothing else. The worker holds a lease on the version that the server has. If the
server dies, it is started again, takes that same version, and is asked again: its groups keep the version that they
were begun with, and none is lost. The next batch gets the newest version.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from async_grpo.engines import SampledGroup
from async_grpo.engines.policy import WEIGHTS_WAIT_S, Policy, free_memory
from async_grpo.engines.served.client import WEIGHTS_S, Client, ServerEngine
from async_grpo.engines.vllm_options import adapter_of, describe_model, engine_options
from async_grpo.errors import GeneratorError, PeerDiedError, UnsupportedError
from async_grpo.log import logger
from async_grpo.serving.vllm_server import END_S, READY_S, ServerPlan, VLLMServerProcess, flags
from async_grpo.setup.generator_choice import STARTED_SERVER
from async_grpo.telemetry.activity import ADOPTING, activity
from async_grpo_ipc import ExporterDiedError, RemoteWeights
from async_grpo_ipc.checkpoint import Adapter

T = TypeVar("T")


class StartedServer(ServerEngine):
    """Starts a server at once; it is waited for, and asked, once there are weights.

    Args:
        folder: where the model is described for the server; what is in it is deleted, at the start and at the end.
        log: the server's output is appended to it.
        handle: the handle file that the server maps.
        number: of the worker: the server listens on the port of the setup file plus this number less one, or the next.
        devices: the GPUs of the server as CUDA_VISIBLE_DEVICES names them; None: the worker's own.
        ready_s: seconds after its start in which the server has to answer.

    Raises:
        UnsupportedError: the model or the setup file does not suit a server that we start.
    """

    capabilities = STARTED_SERVER

    def __init__(
        self,
        trainer: Any,
        *,
        folder: Path,
        log: Path,
        handle: Path,
        number: int,
        seed: int,
        devices: str | None,
        ready_s: float = READY_S,
    ) -> None:
        super().__init__(trainer)
        self._folder, self._handle = folder, handle
        self._adapter = _adapter(trainer.model)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700, parents=True)
        describe_model(trainer, folder, with_text=True)
        self._server = VLLMServerProcess(_plan(trainer, folder, log, number, seed, devices, ready_s))
        trainer.model.to("meta")  # the server has the weights, and takes what is free on the GPU
        free_memory()
        self._server.start()
        logger.info("starting a vLLM server at {}; its output is in {}", self._server.base_url, log)
        self._wanted: tuple[str, int] | None = None  # generation and version
        self._has: tuple[int, str, int] | None = None  # start of the server, generation and version

    def follow(self, weights: RemoteWeights) -> FedPolicy:
        self._connect()
        self._client.require_distribution()
        return FedPolicy(weights, self)

    def take(self, generation: str, version: int) -> None:
        """Have the server take a version, on which the caller holds a lease while groups are sampled with it.

        Raises:
            GeneratorError: the server refused it, or cannot be kept alive.
        """
        self._wanted = (generation, version)
        while self._has != (self._server.starts, generation, version):
            self._has = None
            try:
                self._load(generation, version)
            except GeneratorError as error:
                if self._server.answers():  # it is there, with weights that are neither the old nor the new ones
                    self._server.end(grace_s=0.0)
                    raise
                self._revive(error)
            else:
                self._has = (self._server.starts, generation, version)

    def end(self) -> None:
        """End the server. It is the end of the engine."""
        self._server.end(END_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _answer(self, ask: Callable[[], T], what: str) -> Generator[list[SampledGroup], None, T]:
        """As often as the server dies meanwhile, it is started again and asked again."""
        while True:
            try:
                answer = yield from super()._answer(ask, what)
            except GeneratorError as error:
                if self._server.answers():
                    raise
                self._revive(error)
                assert self._wanted is not None
                self.take(*self._wanted)
            else:
                self._server.answered()
                return answer

    def _connect(self) -> None:
        self._server.wait_ready()
        self._client = Client(base_url=self._server.base_url, connection_timeout=READY_S)
        body = {"handle": str(self._handle), "adapter": self._adapter.as_json() if self._adapter else None}
        self._post("init_weight_transfer_engine", init_info=body)

    def _revive(self, error: GeneratorError) -> None:
        """Start a server again that has died."""
        self._server.revive(error)
        self._connect()

    def _load(self, generation: str, version: int) -> None:
        self._post("start_weight_update")
        update = partial(self._post, "update_weights", update_info={"version": version, "generation": generation})
        self._wait_for(update, f"the vLLM server to take version {version}", WEIGHTS_S)
        self._post("finish_weight_update", weight_version=str(version))
        self._drop_prefixes()

    def _post(self, request: str, **body: Any) -> None:
        self._client._post(f"{self._client.base_url}/{request}", json=body)


class FedPolicy(Policy):
    """Keeps the server at the newest version, and holds a lease on what it has while groups are sampled."""

    def __init__(self, remote: RemoteWeights, server: StartedServer) -> None:
        self._weights, self._server = remote, server

    def adopt(self, in_use: Collection[int] = ()) -> int | None:
        if in_use:
            return None
        activity.doing(ADOPTING)
        try:
            version = self._weights.refresh(WEIGHTS_WAIT_S)
            self._server.take(self._weights.generation, version)
        except ExporterDiedError as error:
            raise PeerDiedError(str(error)) from error
        except GeneratorError as error:
            if not self._weights.exporter_alive():
                raise PeerDiedError("The parameter server died while the vLLM server took its weights.") from error
            raise
        return version


def _plan(
    trainer: Any, folder: Path, log: Path, number: int, seed: int, devices: str | None, ready_s: float
) -> ServerPlan:
    args = trainer.args
    if args.vllm_server_base_url is not None:
        raise UnsupportedError(
            f"--generator vllm-server starts a server, and the setup file names one, {args.vllm_server_base_url}. "
            "Remove vllm_server_base_url, or take --generator vllm, which uses that one."
        )
    many = args.vllm_tensor_parallel_size
    on_gpu = trainer.accelerator.device.type == "cuda"
    env = dict(os.environ) if devices is None else {**os.environ, "CUDA_VISIBLE_DEVICES": devices}
    visible = len(env.get("CUDA_VISIBLE_DEVICES", "").split(","))
    if on_gpu and many > visible:
        raise UnsupportedError(
            f"vllm_tensor_parallel_size={many}, but the server would see {visible} GPU. Name its GPUs: "
            f"--server-devices {','.join(map(str, range(1, many + 1)))}."
        )
    return ServerPlan(
        model=str(folder),
        port=args.vllm_server_port + number - 1,
        log=log,
        tensor_parallel_size=many,
        arguments=_arguments(trainer, seed, on_gpu=on_gpu),
        env=env,
        ready_s=ready_s,
    )


def _arguments(trainer: Any, seed: int, *, on_gpu: bool) -> Sequence[str]:
    options = engine_options(trainer, seed=seed, deterministic=False, merged=True)
    return flags({"load_format": "dummy", "enforce_eager": not on_gpu, **options})


def _adapter(model: Any) -> Adapter | None:
    """How the server is to merge the adapter into the base.

    Raises:
        UnsupportedError: a layer that is neither linear nor an embedding has an adapter.
    """
    adapter = adapter_of(model)
    if adapter is None:
        return None
    from peft.tuners.lora import Embedding, Linear, LoraLayer

    layers = {}
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer) and adapter[0] in layer.scaling:
            if not isinstance(layer, Embedding | Linear):
                raise UnsupportedError(
                    f"--generator vllm-server merges adapters of linear layers and embeddings only, and {name} is a "
                    f"{type(layer).__name__}. Take --generator hf."
                )
            turned = isinstance(layer, Embedding) or bool(layer.fan_in_fan_out)
            layers[name] = (float(layer.scaling[adapter[0]]), turned)
    return Adapter(adapter[0], layers)
