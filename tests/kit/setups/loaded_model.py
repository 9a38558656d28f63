"""A setup file for tests: `random_model.py` with a tied head, from a folder. DeepSpeed's stage 3 loads it sharded."""

import os
from pathlib import Path
from typing import Any

import random_model
import torch.distributed as dist
from transformers import Qwen3ForCausalLM
from trl import GRPOTrainer

from async_grpo.training.sharding import zero_stage


class Loaded(GRPOTrainer):
    """Writes the model that it is given into a folder, and is built from the folder."""

    def __init__(self, *, model: Qwen3ForCausalLM, **given: Any) -> None:
        folder = Path(f"model-{os.environ.get('MASTER_PORT', os.getpid())}").absolute()
        model.config.tie_word_embeddings = True
        tied = Qwen3ForCausalLM(model.config)
        tied.model.load_state_dict(model.model.state_dict())
        tied.save_pretrained(folder)  # on rank 0 only
        if dist.is_initialized():
            dist.barrier()
        super().__init__(model=str(folder), **given)


def get_trainer() -> GRPOTrainer:
    random_model.GRPOTrainer = Loaded
    trainer = random_model.get_trainer()
    sharded_at_once = hasattr(next(trainer.model.parameters()), "ds_shape")
    assert sharded_at_once == (zero_stage(trainer) == 3)
    return trainer
