"""Which GPUs train and which generate. In verl all do both by turns; here a process has its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from async_grpo.errors import UsageError
from async_grpo.formatting import counted
from async_grpo.settings import CPU
from async_grpo.verl_keys.keys import ROLLOUT, Keys

_TRAIN = "async.trainer_gpus_per_node"
FSDP2 = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
num_machines: 1
num_processes: {ranks}
machine_rank: 0
gpu_ids: {gpus}
mixed_precision: "no"
main_training_function: main
same_network: true
use_cpu: false
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
        """The share of each.

        Args:
            visible: counts the GPUs of this machine.

        Raises:
            UsageError: there are not as many, or none would be left.
        """
        if keys["trainer.nnodes"] > 1 and keys[f"{ROLLOUT}.tensor_model_parallel_size"] > 1:
            raise UsageError(
                f"{ROLLOUT}.tensor_model_parallel_size={keys[f'{ROLLOUT}.tensor_model_parallel_size']} is of a vLLM "
                "server, which only a run on one machine has: take trainer.nnodes=1, or leave it out."
            )
        device, asked = keys["trainer.device"], keys["trainer.n_gpus_per_node"]
        there = 0 if device == CPU else visible()
        if not there:
            if device != CPU and (device or asked):
                wanted = f"trainer.n_gpus_per_node={asked}" if asked else f"trainer.device={device}"
                raise UsageError(
                    f"{wanted}, and this machine has no GPU. trainer.device=cpu tries a small model without one."
                )
            return cls(0, 0, 1, "the CPU trains and generates")
        gpus = asked or there
        if gpus > there:
            raise UsageError(f"trainer.n_gpus_per_node={gpus}, and this machine has {there}. Take {there}.")
        return cls._shared(keys, gpus)

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

    def of_other_nodes(self, nodes: int) -> list[str]:
        """Options of `train` for a run over several machines: on the others each GPU has a worker."""
        if nodes == 1:
            return []
        each = ["--workers-per-node", str(self.trainers + self.generators)] if self.trainers else []
        return ["--ray", "auto", "--nodes", str(nodes), *each]

    def accelerate(self) -> str | None:
        """A configuration of accelerate that shards the trainer; None: it is one process."""
        if self.ranks == 1:
            return None
        return FSDP2.format(ranks=self.ranks, gpus=",".join(map(str, range(self.ranks))))

    def flags(self, accelerate: str) -> list[str]:
        """Options of `train`, `accelerate` being the file of the configuration."""
        if not self.trainers:
            return ["--master-device-id", CPU]
        if not self.generators:
            return ["--master-device-id", "0", "--worker-device-ids", "0"]
        others = [str(gpu) for gpu in range(self.trainers, self.trainers + self.generators)]
        flags = ["--worker-device-ids", others[0] if self.of_a_server > 1 else ",".join(others)]
        if self.of_a_server > 1:
            flags += ["--server-devices", ",".join(others[: self.of_a_server])]
        if self.ranks == 1:
            return ["--master-device-id", "0", *flags]
        # With --weights ipc the first GPU would have the published versions of the whole model beside its shard.
        return [*flags, "--accelerate-config", accelerate, "--weights", "host"]
