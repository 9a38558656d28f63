"""Which GPUs train and which generate. In verl all do both by turns; here a process has its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_grpo.errors import UsageError
from async_grpo.formatting import counted
from async_grpo.settings import CPU
from async_grpo.verl_keys.keys import ROLLOUT, Keys

_TRAIN = "async.trainer_gpus_per_node"
FSDP2 = """\
distributed_type: FSDP
num_processes: {ranks}
gpu_ids: {gpus}
mixed_precision: "no"
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: true
  fsdp_cpu_ram_efficient_loading: false
  fsdp_offload_params: false
  fsdp_state_dict_type: SHARDED_STATE_DICT
"""


@dataclass(frozen=True, slots=True)
class Devices:
    """GPUs 0 to `trainers` - 1 train, the others generate; with one GPU it does both."""

    trainers: int  # 0: all is on the CPU
    generators: int
    of_a_server: int  # GPUs of a vLLM server; 1: an engine in each worker
    sentence: str

    @classmethod
    def of(cls, keys: Keys, visible: Callable[[], int]) -> Devices:
        """The share of each, of the GPUs that `visible` counts. `UsageError`: they are too few."""
        device, asked = keys["trainer.device"], keys["trainer.n_gpus_per_node"]
        there = 0 if device == CPU else visible()
        gpus = 0 if device == CPU else asked or max(there, int(device is not None))
        if gpus > there:
            wanted = f"trainer.n_gpus_per_node={asked}" if asked else f"trainer.device={device}"
            raise UsageError(f"{wanted}, and this machine has {there or 'no GPU'}. trainer.device=cpu needs none.")
        return cls._shared(keys, gpus) if gpus else cls(0, 0, 1, "the CPU trains and generates")

    @classmethod
    def _shared(cls, keys: Keys, gpus: int) -> Devices:
        served = keys[f"{ROLLOUT}.tensor_model_parallel_size"]
        if gpus == 1 and served == 1 and keys[_TRAIN] in (None, 1):
            return cls(1, 0, 1, "GPU 0 trains and generates")
        trainers = keys[_TRAIN] or (gpus - served if served > 1 else gpus // 2)
        generators = gpus - trainers
        if trainers < 1 or generators < served:
            raise UsageError(
                f"{counted(gpus, 'GPU')} cannot be {trainers} that train ({_TRAIN}) and {served} that generate "
                f"({ROLLOUT}.tensor_model_parallel_size): the sum must be at most trainer.n_gpus_per_node."
            )
        idle = f", {generators - served} are idle" if 1 < served < generators else ""
        how = f"a vLLM server on {served}" if served > 1 else f"{generators} generate"
        return cls(trainers, generators, served, f"of {gpus} GPUs {trainers} train ({_TRAIN}), {how}{idle}")

    @property
    def ranks(self) -> int:
        return max(1, self.trainers)

    def options(self, nodes: int, accelerate: Path) -> dict[str, Any]:
        """Options of `train` by name, `accelerate` being the file of the configuration."""
        # On other machines each GPU has a worker.
        others = {"ray": "auto", "nodes": nodes, "workers_per_node": self.trainers + self.generators or None}
        options = others if nodes > 1 else {}
        if not self.trainers:
            return {"master_device_id": CPU, **options}
        generating = [*range(self.trainers, self.trainers + self.generators)] or [0]
        if self.of_a_server > 1:
            options["server_devices"] = generating[: self.of_a_server]
            generating = generating[:1]
        options["worker_device_ids"] = generating
        if self.ranks == 1:
            return {"master_device_id": 0, **options}
        # With --weights ipc the first GPU would have the published versions of the whole model beside its shard.
        return {**options, "accelerate_config": accelerate, "weights": "host"}
