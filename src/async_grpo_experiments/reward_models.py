"""Scores of a reward model for what was sampled, afterwards: in batches, sorted by length.

A reward model is a `…ForSequenceClassification` of transformers with one label. Its head is applied at the last token
of each text, which is found by the text's length: no padding token is needed, and the end token may be one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from async_grpo.errors import UsageError


def score(rows: Iterable[Mapping[str, Any]], model: Any, batch_size: int = 32) -> list[float]:
    """The score of each row of `async-grpo generate`: of the tokens of its prompt and its completion.

    Args:
        model: in evaluation mode, of the tokenizer that the rows are of.

    Raises:
        UsageError: the model has more than one label.
    """
    return scores_of_texts(model, [[*row["prompt_ids"], *row["completion_ids"]] for row in rows], batch_size)


@torch.no_grad()
def scores_of_texts(model: Any, texts: Sequence[Sequence[int]], batch_size: int = 32) -> list[float]:
    """The score of each text of token ids, in batches of similar length. Raises `UsageError` as `score`."""
    if model.num_labels != 1:
        raise UsageError(f"A reward model has one label, and {type(model).__name__} has {model.num_labels}.")
    order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
    scores = [0.0] * len(texts)
    for first in range(0, len(order), batch_size):
        places = order[first : first + batch_size]
        for place, value in zip(places, _scores(model, [texts[place] for place in places]), strict=True):
            scores[place] = value
    return scores


def _scores(model: Any, texts: Sequence[Sequence[int]]) -> list[float]:
    lengths_B = torch.tensor([len(text) for text in texts])
    longest = int(lengths_B.max())
    ids_BT = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts], device=model.device)
    mask_BT = (torch.arange(longest) < lengths_B[:, None]).long().to(model.device)
    hidden_BTH = model.base_model(ids_BT, attention_mask=mask_BT).last_hidden_state
    last_BH = hidden_BTH[torch.arange(len(texts)), lengths_B - 1]
    scores: list[float] = model.score(last_BH)[:, 0].float().tolist()
    return scores
