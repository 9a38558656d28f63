"""Plain TRL with a vLLM server that the run starts: `async-grpo train SETUP --device 0 --generator vllm-server`.

TRL connects to its server while a `GRPOTrainer` is built, and has the model then. So the server is started there, in
TRL's own `VLLMGeneration`. TRL sends all weights before the first completions, so the server needs no more than the
model's configuration. If the server dies, the run ends with the server's last words.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from async_grpo.engines.served.client import WEIGHTS_S, Client, ServerCall
from async_grpo.engines.vllm_options import describe_model
from async_grpo.errors import UnsupportedError, UsageError
from async_grpo.log import logger
from async_grpo.rundir.folders import make_folder
from async_grpo.rundir.paths import RunDir
from async_grpo.serving.vllm_server import END_S, NCCL, READY_S, ServerPlan, VLLMServerProcess, flags, free_port
from async_grpo.setup.generator_choice import refuse_own_server
from async_grpo.setup.replaced import instead

HOOKS = ("_init_vllm", "sync_weights")  # of VLLMGeneration
_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


@contextmanager
def own_server(run_dir: Path, devices: str | None, ready_s: float = READY_S) -> Iterator[None]:
    """Let the trainer that is built inside this block have a server of its own, which ends with the block.

    Args:
        run_dir: the server's output goes there.
        devices: the server's GPUs, as CUDA_VISIBLE_DEVICES names them; None on a machine without one.
        ready_s: seconds after its start in which the server has to answer.

    Raises:
        UsageError: the setup file asks for another way to generate, or the server lacks GPUs.
        GeneratorError: the server cannot be started, or died.
    """
    with ExitStack() as ends:
        served = partial(ServedGeneration, ends, RunDir(run_dir).vllm_server_log, devices, ready_s)
        with instead(grpo_trainer, VLLMGeneration=served):
            yield


class ClientOfOwn(Client):
    """Asks the server of this run: nobody can start it but the run itself."""

    def __init__(self, process: VLLMServerProcess, log: Path, group_port: int) -> None:
        self._process, self._log = process, log
        super().__init__(base_url=process.base_url, group_port=group_port, connection_timeout=READY_S)

    @property
    def how_to_start(self) -> str:
        return (
            f"The server last wrote, to {self._log}:\n{self._process.last_words()}\n"
            "The same command continues the run from its newest checkpoint."
        )

    def reset_prefix_cache(self) -> None:
        """As in TRL, whose request has no deadline with some versions of vLLM."""
        self.drops_prefixes()


class ServedGeneration(VLLMGeneration):
    """TRL's own, but for where its server comes from, and that no wait for it is without end."""

    def __init__(self, ends: ExitStack, log: Path, devices: str | None, ready_s: float, **given: Any) -> None:
        self._ends, self._log, self._devices, self._ready_s = ends, log, devices, ready_s
        super().__init__(**given)

    def _init_vllm(self) -> None:
        """The end of TRL's constructor."""
        refuse_own_server(use_vllm=True, mode=self.mode, base_url=self.server_base_url)
        make_folder(self._log.parent)
        described = self._ends.enter_context(TemporaryDirectory(prefix="async-grpo-vllm-"))
        describe_model(self, Path(described), with_text=True)
        process = VLLMServerProcess(self._plan(described))
        self._ends.callback(process.end, END_S)
        process.start()
        logger.info("starting a vLLM server at {}; its output is in {}", process.base_url, self._log)
        process.wait_ready()
        port = free_port("", self.group_port)  # of several runs, each has one of its own
        self.vllm_client = ClientOfOwn(process, self._log, port)
        connect = partial(self.vllm_client.init_communicator, device=self.accelerator.device)
        try:
            self._wait_for(connect, f"the vLLM server to open the way for weights (port {port})")
        except NotImplementedError as error:  # without a GPU
            raise UnsupportedError(
                f"TRL cannot send weights to a vLLM server here: {error} Train on a GPU, or generate without a server: "
                "--set use_vllm=false."
            ) from error

    def sync_weights(self) -> None:
        self._wait_for(super().sync_weights, "the vLLM server to take new weights")

    def _wait_for(self, call: Callable[[], object], what: str) -> None:
        """Wait for a call that is in NCCL, which would wait for ever for a server that is dead or stuck."""
        running = ServerCall(self.vllm_client, call, what, WEIGHTS_S)
        while not running.done():
            pass
        running.result()

    def _plan(self, described: str) -> ServerPlan:
        many = self.tensor_parallel_size
        on_gpu = self.accelerator.device.type == "cuda"
        if on_gpu and len((self._devices or "").split(",")) < many:
            raise UsageError(
                f"vllm_tensor_parallel_size={many}, but the server would have the GPUs {self._devices}. Name as many: "
                "--server-devices."
            )
        options = {
            "dtype": _DTYPES.get(self.accelerator.mixed_precision, str(self.model.dtype)).split(".")[-1],
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "max_model_len": self.max_model_length,
            "max_num_seqs": self.max_num_seqs,
            "model_impl": self.model_impl,
            "trust_remote_code": self.trust_remote_code,
            "load_format": "dummy",  # the weights come from the trainer
            "enforce_eager": not on_gpu,
        }
        return ServerPlan(
            model=described,
            port=self.server_port,
            log=self._log,
            tensor_parallel_size=many,
            weights=NCCL,
            ready_s=self._ready_s,
            arguments=flags(options),
            env={**os.environ, "CUDA_VISIBLE_DEVICES": self._devices or ""},
        )
