"""Sharded weights: what a parameter counts as that no rank has whole, and which checkpoints fit which ranks."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from async_grpo.errors import UnsupportedError
from async_grpo.setup import fingerprints
from async_grpo.setup.process import leave_at_once
from async_grpo.training import sharding
from async_grpo.training.checkpoints import bytes_needed
from async_grpo.training.groups_for_trl import refuser_of
from async_grpo.training.sharding import DEEPSPEED, FSDP, CheckpointLayout, Fsdp2, Zero3, check_layout
from async_grpo.training.weight_publisher import slots_for
from kit.groups import make_group, make_job


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)


def emptied(model: nn.Module) -> nn.Module:
    """As ZeRO-3 leaves a model on each rank: parameters without numbers, that know their shape."""
    for parameter in model.parameters():
        vars(parameter)["ds_shape"] = parameter.shape
        parameter.data = torch.empty(0)
    return model


def test_a_model_that_zero3_sharded_counts_as_the_whole_one() -> None:
    whole, sharded = Tied(), emptied(Tied())
    assert fingerprints.of_model(sharded) == fingerprints.of_model(whole)
    assert slots_for(sharded, max_staleness=40, sharing=40) == slots_for(whole, max_staleness=40, sharing=40)
    taken = [bytes_needed(SimpleNamespace(model=it, is_deepspeed_enabled=it is sharded)) for it in (whole, sharded)]
    assert taken[1] - taken[0] == 4 * 50 * 8, "the weights that train, once more"
    model = SimpleNamespace(get_input_embeddings=lambda: sharded.embedding)
    trainer: Any = SimpleNamespace(model=model, reward_func_names=["right"], state=SimpleNamespace(global_step=0))
    refuser_of(trainer)(make_group(make_job(0)))  # raises where it has a token that the model has not


def test_the_published_layout_is_that_of_the_whole_model() -> None:
    blueprint = Zero3().blueprint(emptied(Tied()))
    shapes = {name: tuple(tensor.shape) for name, tensor in {**blueprint.changing, **blueprint.static}.items()}
    assert shapes == {"embedding.weight": (50, 8), "frozen.weight": (8, 8), "frozen.bias": (8,)}
    assert list(blueprint.changing) == ["embedding.weight"]
    assert blueprint.tied == {"head.weight": "embedding.weight"}


def gathers(rank: int, folder: Path) -> None:
    """One of two ranks. A bucket has 2 rows of 3 numbers of each; the last rank has fewer rows, or none."""
    sharding._COPIES, sharding.BUCKET_BYTES = 1, 2 * 2 * 3 * 4
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 13), nn.Linear(13, 1))
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    into = {name: torch.full_like(tensor, torch.nan) for name, tensor in whole.items()} if rank == 0 else None
    Fsdp2().gather(model, whole.keys(), torch.device("cpu"), into)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in (into or {}).items())
    leave_at_once(0)  # as ranks do: a thread of gloo may abort an ordinary exit


def test_shards_of_unequal_sizes_are_gathered_bucket_by_bucket(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(gathers, args=(tmp_path,), nprocs=2)  # raises what one has raised


FILES = {
    "two": ["global_step4/zero_pp_rank_0_mp_rank_00_optim_states.pt", "global_step4/bf16_1_optim_states.pt"],
    "fsdp": ["pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata"],
    "plain": ["model.safetensors", "optimizer.pt"],
}
TWO, FOUR = CheckpointLayout(DEEPSPEED, 2), CheckpointLayout(DEEPSPEED, 4)


@pytest.mark.parametrize(
    ("written", "needed", "sentence"),
    [
        ("two", TWO, None),
        ("two", FOUR, "DeepSpeed over 2 ranks.*with DeepSpeed over 4 ranks.*num_processes: 2"),
        ("two", CheckpointLayout(""), "DeepSpeed over 2 ranks.*this one trains without FSDP or DeepSpeed"),
        ("two", CheckpointLayout(FSDP), "DeepSpeed over 2 ranks.*trains with FSDP"),
        ("fsdp", CheckpointLayout(FSDP), None),
        ("fsdp", CheckpointLayout(""), "with FSDP, and this one trains without"),
        ("plain", CheckpointLayout(""), None),
        ("plain", TWO, "without FSDP or DeepSpeed.*trains with DeepSpeed over 2 ranks.*--accelerate-config none"),
        ("plain", CheckpointLayout(FSDP), "without FSDP or DeepSpeed, and this one trains with FSDP"),
    ],
)
def test_a_checkpoint_of_another_kind_is_refused(written: str, needed: Any, sentence: Any, tmp_path: Path) -> None:
    for path in map(tmp_path.joinpath, FILES[written]):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    with pytest.raises(UnsupportedError, match=sentence) if sentence else nullcontext():
        check_layout(tmp_path, needed)
