"""Plain TRL with a vLLM server that the run starts: `async-grpo train SETUP --device 0 --generator vllm-server`.

TRL connects to its server while a `GRPOTrainer` is built, and has the model then. So the server is started there, in
TRL's own `VLLMGeneration`. TRL sends all weights before the first completions, so the server needs no more than the
model's configuration. A server that dies is started again, gets the weights that TRL has now, and is asked again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import requests
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from async_grpo.errors import GeneratorError, PeerDiedError, UnsupportedError, UsageError
from async_grpo.log import logger
from async_grpo.rollout.engines.served.client import WEIGHTS_S, Client, ServerCall
from async_grpo.rollout.engines.vllm_options import describe_model
from async_grpo.rundir.folders import make_folder
from async_grpo.rundir.paths import RunDir
from async_grpo.serving.vllm_server import END_S, NCCL, READY_S, ServerPlan, VLLMServerProcess, flags, free_port
from async_grpo.setup.generator_choice import refuse_own_server
from async_grpo.setup.replaced import instead

HOOKS = ("_init_vllm", "sync_weights", "generate")  # of VLLMGeneration
_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
_FAILED = (GeneratorError, requests.RequestException)  # requests of which nothing came back
T = TypeVar("T")


@contextmanager
def own_server(run_dir: Path, devices: str | None, ready_s: float = READY_S) -> Iterator[OwnServer]:
    """Let the trainer that is built inside this block have a server of its own, which ends with the block.

    Args:
        run_dir: the server's output goes there.
        devices: the server's GPUs, as CUDA_VISIBLE_DEVICES names them; None on a machine without one.
        ready_s: seconds after its start in which the server has to answer.
    """
    server = OwnServer(run_dir, devices, ready_s)
    try:
        with instead(grpo_trainer, VLLMGeneration=partial(ServedGeneration, server)):
            yield server
    finally:
        server.end()


class OwnServer:
    """The server of a run, from the moment that TRL asks for one."""

    def __init__(self, run_dir: Path, devices: str | None, ready_s: float = READY_S) -> None:
        self._run_dir, self._devices, self._ready_s = run_dir, devices, ready_s
        self._log = RunDir(run_dir).vllm_server_log
        self._described = TemporaryDirectory(prefix="async-grpo-vllm-")  # what it reads of the model
        self._process: VLLMServerProcess | None = None

    @property
    def process(self) -> VLLMServerProcess:
        assert self._process is not None, "it has not been started"
        return self._process

    def start(self, generation: VLLMGeneration) -> None:
        """Start the server that TRL is about to connect to.

        Raises:
            UsageError: the setup file asks for another way to generate, or the server lacks GPUs.
        """
        refuse_own_server(use_vllm=True, mode=generation.mode, base_url=generation.server_base_url)
        make_folder(self._run_dir)
        describe_model(generation, Path(self._described.name), with_text=True)
        self._process = VLLMServerProcess(self._plan(generation))
        self._process.start()
        logger.info("starting a vLLM server at {}; its output is in {}", self._process.base_url, self._log)

    def require_started(self) -> None:
        """Raise `UsageError` where the trainer was built without asking for a server."""
        if self._process is None:
            refuse_own_server(use_vllm=False)

    def end(self) -> None:
        """End the server, if one was started."""
        if self._process is not None:
            self._process.end(END_S)
        self._described.cleanup()

    def _plan(self, generation: VLLMGeneration) -> ServerPlan:
        many = generation.tensor_parallel_size
        on_gpu = generation.accelerator.device.type == "cuda"
        if on_gpu and len((self._devices or "").split(",")) < many:
            raise UsageError(
                f"vllm_tensor_parallel_size={many}, but the server would have the GPUs {self._devices}. Name as many: "
                "--server-devices."
            )
        options = {
            "dtype": _DTYPES.get(generation.accelerator.mixed_precision, str(generation.model.dtype)).split(".")[-1],
            "gpu_memory_utilization": generation.gpu_memory_utilization,
            "max_model_len": generation.max_model_length,
            "max_num_seqs": generation.max_num_seqs,
            "model_impl": generation.model_impl,
            "trust_remote_code": generation.trust_remote_code,
            "load_format": "dummy",  # the weights come from the trainer
            "enforce_eager": not on_gpu,
        }
        return ServerPlan(
            model=self._described.name,
            port=generation.server_port,
            log=self._log,
            tensor_parallel_size=many,
            weights=NCCL,
            ready_s=self._ready_s,
            arguments=flags(options),
            env={**os.environ, "CUDA_VISIBLE_DEVICES": self._devices or ""},
        )


class ServedGeneration(VLLMGeneration):
    """TRL's own, but for where its server comes from, and for what happens when it dies."""

    def __init__(self, server: OwnServer, **given: Any) -> None:
        self._server = server
        super().__init__(**given)

    def _init_vllm(self) -> None:
        """The end of TRL's constructor."""
        self._server.start(self)
        self._connect()

    def sync_weights(self) -> None:
        self._asked_until_answered(self._send)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self._asked_until_answered(partial(super().generate, *args, **kwargs))

    def _asked_until_answered(self, ask: Callable[[], T]) -> T:
        while True:
            try:
                answer = ask()
            except _FAILED as error:
                if self._server.process.answers():  # it is there, and refuses
                    raise
                self._revive(error)
            else:
                self._server.process.answered()
                return answer

    def _revive(self, error: Exception) -> None:
        while True:
            self._server.process.revive(error)
            try:
                self._connect()
                self._send()
                return
            except _FAILED as again:
                if self._server.process.answers():
                    raise
                error = again

    def _connect(self) -> None:
        process = self._server.process
        process.wait_ready()
        port = free_port("", self.group_port)  # an earlier connection may hold it still
        self.vllm_client = Client(base_url=process.base_url, group_port=port, connection_timeout=READY_S)
        try:
            self._wait_for(
                partial(self.vllm_client.init_communicator, device=self.accelerator.device),
                f"the vLLM server to open the way for weights (port {port})",
            )
        except NotImplementedError as error:  # without a GPU
            raise UnsupportedError(
                f"TRL cannot send weights to a vLLM server here: {error} Train on a GPU, or generate without a server: "
                "--set use_vllm=false."
            ) from error

    def _send(self) -> None:
        self._wait_for(super().sync_weights, "the vLLM server to take new weights")

    def _wait_for(self, call: Callable[[], object], what: str) -> None:
        """`PeerDiedError`: the server died, or is stuck, in the middle of NCCL, which waits for it for ever."""
        running = ServerCall(self.vllm_client, call, what, WEIGHTS_S)
        try:
            while not running.done():
                pass
        except GeneratorError as error:
            raise PeerDiedError(
                f"{error} The trainer waits for it in NCCL, which has no way back. The same command continues the run "
                "from its newest checkpoint."
            ) from error
        running.result()
