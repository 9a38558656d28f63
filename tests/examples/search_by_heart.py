"""The search recipe with a tiny model that searches, once its weights (LEARNT) are there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from in_process import build_model
from learnt_by_heart import load_learnt

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "triviaqa_search"))
import my_trainer
import tiny

tiny.build_model = lambda tokenizer: build_model(
    tokenizer, hidden_size=64, head_dim=32, intermediate_size=192, max_position_embeddings=8192
)


def get_trainer() -> Any:
    trainer: Any = my_trainer.get_trainer()
    trainer.max_completion_length = 400  # of all turns; each has the recipe's limit
    return load_learnt(trainer)
