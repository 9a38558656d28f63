"""Weights that no rank has whole: a class for each way of sharding them, and the checkpoints that each can resume.

DeepSpeed's stages 1 and 2 shard gradients and optimizer state only: every rank has the whole model, as under DDP.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from async_grpo.errors import UnsupportedError
from async_grpo.formatting import counted
from async_grpo.setup.fingerprints import whole_shape
from async_grpo_ipc import Blueprint

BUCKET_BYTES = 64 * 2**20  # that a gather takes beyond what it fills
_COPIES = 2  # of a bucket: gloo gathers into memory of its own
DEEPSPEED, FSDP = "DeepSpeed", "FSDP"
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # activation checkpointing and torch.compile rename


class Sharding(ABC):
    """How a model's parameters lie on the ranks."""

    def blueprint(self, model: nn.Module) -> Blueprint:
        """What the model has. Call it before training: a trainer shards, moves and casts the model then."""
        return Blueprint.of_model(model)

    def gather(
        self, model: nn.Module, names: Collection[str], device: torch.device, into: Mapping[str, Tensor] | None = None
    ) -> None:
        """Gather the named parameters; every rank calls it with the same names.

        Besides its shards, rank 0 holds `BUCKET_BYTES` at a time, or a row of each rank; of DeepSpeed each rank
        holds one whole parameter.

        Args:
            names: as before the model was sharded.
            device: where the ranks communicate; shards that are kept on the CPU go there for it.
            into: where rank 0 copies each whole parameter to; None on the other ranks.
        """
        self._prepare(model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if (original := _original_name(name)) in names:
                    self._copy(parameter, device, None if into is None else into[original])

    @abstractmethod
    def _prepare(self, model: nn.Module) -> None: ...

    @abstractmethod
    def _copy(self, parameter: Tensor, device: torch.device, into: Tensor | None) -> None:
        """Copy the whole parameter. All ranks call this for the same one."""


class Fsdp2(Sharding):
    """`fully_shard` of torch: the parameters are `DTensor`s."""

    def _prepare(self, model: nn.Module) -> None:
        """A forward pass without a backward pass leaves some modules whole, in the precision of the computation."""
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _copy(self, parameter: Tensor, device: torch.device, into: Tensor | None) -> None:
        """A bucket of some rows of each shard at a time, to rank 0 alone."""
        placements = parameter.placements if isinstance(parameter, DTensor) else ()
        sharded = [dim for dim, placement in enumerate(placements) if placement.is_shard()]
        if not isinstance(parameter, DTensor) or len(sharded) != 1 or not placements[sharded[0]].is_shard(0):
            whole = parameter.to(device)
            if isinstance(whole, DTensor):  # also divided otherwise, as by tensor parallelism: whole on each rank
                whole = whole.full_tensor()
            if into is not None:
                into.copy_(whole)
            return
        mine, group = parameter.to_local(), parameter.device_mesh.get_group(sharded[0])
        ranks, rows, of_row = dist.get_world_size(group), parameter.shape[0], parameter.shape[1:]
        each = -(-rows // ranks)  # of a rank; the last ones have fewer
        count = max(1, min(each, BUCKET_BYTES // (_COPIES * ranks * of_row.numel() * mine.element_size())))
        gathers = dist.get_rank(group) == 0
        bucket = mine.new_empty(ranks if gathers else 0, count, *of_row, device=device)
        for begin in range(0, each, count):
            size = min(count, each - begin)
            part = mine[begin : begin + size].to(device)
            if len(part) < size:
                part = torch.cat([part, part.new_empty(size - len(part), *of_row)])
            parts = [of_rank[:size] for of_rank in bucket]
            dist.gather(part, parts if gathers else None, group=group, group_dst=0)
            for start, found in zip(range(begin, rows, each), parts, strict=False):
                if into is not None:
                    end = min(start + size, rows)
                    into[start:end].copy_(found[: end - start])


class Zero3(Sharding):
    """Stage 3 of DeepSpeed's ZeRO: the parameters are empty, and their shards lie beside them.

    `from_pretrained` shards them already, so a setup file may give a trainer that never had them whole.
    """

    def blueprint(self, model: nn.Module) -> Blueprint:
        def whole(taken: Mapping[str, Tensor]) -> dict[str, Tensor]:
            shapes = {name: whole_shape(model.get_parameter(name)) for name in taken}
            return {name: torch.empty(shapes[name], dtype=taken[name].dtype, device="meta") for name in taken}

        found = Blueprint.of_model(model)
        return replace(found, changing=whole(found.changing), static=whole(found.static))

    def _prepare(self, model: nn.Module) -> None: ...

    def _copy(self, parameter: Tensor, device: torch.device, into: Tensor | None) -> None:
        from deepspeed.runtime.zero.partition_parameters import GatheredParameters, ZeroParamStatus

        # Small ones are whole at all times, and stay so: DeepSpeed gathers them after each optimizer step.
        is_whole = getattr(parameter, "ds_status", ZeroParamStatus.AVAILABLE) is ZeroParamStatus.AVAILABLE
        with GatheredParameters([parameter], enabled=not is_whole):
            if into is not None:
                into.copy_(parameter)


def sharding_of(trainer: Any) -> Sharding | None:
    """How training shards this trainer's model over the ranks; None where each has the whole."""
    if trainer.is_fsdp_enabled:
        return Fsdp2()
    return Zero3() if zero_stage(trainer) == 3 else None


def zero_stage(trainer: Any) -> int | None:
    """DeepSpeed's stage of this trainer, None without DeepSpeed."""
    return int(trainer.accelerator.state.deepspeed_plugin.zero_stage) if trainer.is_deepspeed_enabled else None


def read_without_pickle() -> None:
    """DeepSpeed reads its checkpoints with torch's unrestricted unpickler; from now on with the restricted one."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
    from deepspeed.runtime.fp16 import loss_scaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    scalers = [loss_scaler.LossScaler, loss_scaler.DynamicLossScaler]
    torch.serialization.add_safe_globals([ZeroStageEnum, fragment_address, *scalers])

    def load(self: Any, path: str, map_location: Any = None) -> Any:
        return torch.load(path, map_location=map_location, weights_only=True)

    TorchCheckpointEngine.load = load


def refuse_unknown_sharding(trainer: Any) -> None:
    """Raise `UnsupportedError`, with the way out, for a sharding whose weights cannot be published."""
    if trainer.args.deepspeed:
        raise UnsupportedError(
            "`deepspeed` of the GRPOConfig cannot be used: workers build the same trainer in one process, without "
            "DeepSpeed. Remove it there, and name its file as `deepspeed_config_file` in an accelerate configuration: "
            "--accelerate-config examples/accelerate/zero3.yaml is one."
        )
    if trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2:
        raise fsdp_of_version_1()


def fsdp_of_version_1() -> UnsupportedError:
    return UnsupportedError(
        "FSDP of version 1 cannot run distributed: its weights have no names of their own to publish. Set "
        "`fsdp_version: 2` in the accelerate configuration or in `fsdp_config`."
    )


def refuse_publish_dtype(dtype: str | None, *, sharded: bool) -> None:
    """Raise `UnsupportedError` for `--publish-dtype` with weights that no rank has whole."""
    if dtype is not None and sharded:
        raise UnsupportedError(
            "--publish-dtype is not possible with a trainer that is sharded over several GPUs: its weights are "
            "published as they are gathered. Leave it out, or load the model in bf16."
        )


@dataclass(frozen=True, slots=True)
class CheckpointLayout:
    """How the files of a checkpoint are divided among ranks."""

    kind: str  # DEEPSPEED, FSDP or "": one set of files
    ranks: int | None = None  # that it fits; None: any number

    def __str__(self) -> str:
        over = f" over {counted(self.ranks, 'rank')}" if self.ranks else ""
        return f"with {self.kind}{over}" if self.kind else "without FSDP or DeepSpeed"


def layout_of(trainer: Any) -> CheckpointLayout:
    if trainer.is_deepspeed_enabled:
        return CheckpointLayout(DEEPSPEED, int(trainer.args.world_size))
    return CheckpointLayout(FSDP if trainer.is_fsdp_enabled else "")


def check_layout(checkpoint: Path, needed: CheckpointLayout) -> None:
    """Raise `UnsupportedError` unless a trainer that needs `needed` can continue from `checkpoint`.

    FSDP2 reshards a checkpoint for another number of ranks. DeepSpeed does not.
    """
    found = _layout_of_files(checkpoint)
    if found == needed:
        return
    ranks = f" of num_processes: {found.ranks}" if found.ranks else ""
    raise UnsupportedError(
        f"{checkpoint} was written by a trainer {found}, and this one trains {needed}, which cannot read its optimizer "
        f"state. Resume with the accelerate configuration{ranks} that the run was begun with (without one: "
        "--accelerate-config none)."
    )


def _layout_of_files(checkpoint: Path) -> CheckpointLayout:
    if shards := len(list(checkpoint.glob("global_step*/*_optim_states.pt"))):
        return CheckpointLayout(DEEPSPEED, shards)
    return CheckpointLayout(FSDP if any(checkpoint.glob("pytorch_model_fsdp*")) else "")


def _original_name(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
