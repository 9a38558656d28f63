"""A setup file for tests: `random_model.py`, sharded by FSDP2 on the CPU where several processes train it.

accelerate shards on GPUs only: on a CPU it takes its FSDP settings for DDP, so they are put in place here. All else is
as with GPUs: accelerate's and transformers' own code shards the model, trains it and writes its checkpoints.
"""

import os

import random_model
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from trl import GRPOConfig, GRPOTrainer


def sharding_config(config_class=GRPOConfig, **settings) -> GRPOConfig:
    args = config_class(**settings)
    assert args.device.type == "cpu"  # this sets torch.distributed up
    state = Accelerator(cpu=True).state
    state.fsdp_plugin = FullyShardedDataParallelPlugin()
    state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    return args


def get_trainer() -> GRPOTrainer:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        random_model.GRPOConfig = sharding_config
    trainer = random_model.get_trainer()
    assert trainer.is_fsdp_enabled == ("WORLD_SIZE" in os.environ)
    return trainer
