"""Scores of a reward model do not depend on the batch."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from async_grpo.errors import UsageError
from async_grpo_experiments.reward_models import score

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def reward_model(labels: int = 1) -> Qwen3ForSequenceClassification:
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=8, num_key_value_heads=2, head_dim=16, pad_token_id=0, num_labels=labels, **SHAPE)
    return Qwen3ForSequenceClassification(config).eval()


def test_batches_of_2_and_32_agree() -> None:
    """Also for texts that use every token, and where padding and end are one."""
    model = reward_model()
    lengths = torch.randint(1, 60, (70,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [{"prompt_ids": [*range(8)], "completion_ids": [7, 0] * length} for length in lengths]
    small, large = score(rows, model, 2), score(rows, model, 32)
    assert small == pytest.approx(large, abs=1e-5) and len({round(value, 4) for value in small}) > 30
    with torch.no_grad():
        alone = model.score(model.base_model(torch.tensor([[*range(8), *[7, 0] * lengths[5]]])).last_hidden_state)
    assert small[5] == pytest.approx(float(alone[0, -1, 0]), abs=1e-5)


def test_a_model_of_several_labels_is_no_reward_model() -> None:
    with pytest.raises(UsageError, match="has one label, and Qwen3ForSequenceClassification has 2"):
        score([], reward_model(2))
