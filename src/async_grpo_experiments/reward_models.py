"""Scores of a reward model for what was sampled, afterwards: in batches, sorted by length.

A reward model is a `…ForSequenceClassification` of transformers with one label. Its head is applied at the last token
of each text, which is found by the text's length: no padding token is needed, and the end token may be one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from async_grpo.errors import UsageError
from async_grpo_experiments.loop_progress import told

Reward: TypeAlias = Callable[..., list[float]]


def load_reward_model(name: str) -> Any:
    """A reward model from a folder or from the hub, to score with in float32."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(name, dtype=torch.float32).eval()
    return model.to("cuda") if torch.cuda.is_available() else model


def check_tokens(name: str, reference: str) -> None:
    """`UsageError` where a reward model reads other tokens than the reference writes, or has several labels."""
    from transformers import AutoConfig, AutoTokenizer

    if (labels := AutoConfig.from_pretrained(name).num_labels) != 1:
        raise UsageError(f"A reward model has one label, and {name} has {labels}.")
    ours, theirs = (AutoTokenizer.from_pretrained(one).get_vocab() for one in (reference, name))
    if ours != theirs:
        token = min(token for token in {*ours, *theirs} if ours.get(token) != theirs.get(token))
        raise UsageError(
            f"{name} scores the tokens of {reference} as they were sampled, and {token!r} is not the same token to "
            "both: take a reward model of the same tokenizer."
        )


def reward_of_tokens(scored: Callable[[Sequence[Sequence[int]]], list[float]], tokenizer: Any) -> Reward:
    """A reward function for `GRPOTrainer`: what `scored` says of the token ids of prompt and completion.

    Completions are scored as they were sampled; the prompt is tokenised as the trainer does it.
    """

    def model_score(prompts: Sequence[Any], completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        return scored([[*prompt_ids(tokenizer, one), *ids] for one, ids in zip(prompts, completion_ids, strict=True)])

    return model_score


def reward_by(name: str, tokenizer: Any) -> Reward:
    """A reward function for `GRPOTrainer`: the score of a reward model from a folder or from the hub."""
    return reward_of_tokens(partial(scores_of_texts, load_reward_model(name)), tokenizer)


def prompt_ids(tokenizer: Any, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    return list(
        tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]
    )


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
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    scores = [0.0] * len(texts)
    for first in told(range(0, len(order), batch_size), "batches are scored"):
        indices = order[first : first + batch_size]
        for index, value in zip(indices, _scores(model, [texts[index] for index in indices]), strict=True):
            scores[index] = value
    return scores


def _scores(model: Any, texts: Sequence[Sequence[int]]) -> list[float]:
    lengths_B = torch.tensor([len(text) for text in texts], dtype=torch.long, device=model.device)
    longest = int(lengths_B.max())
    ids_BT = lengths_B.new_tensor([[*text, *[0] * (longest - len(text))] for text in texts])
    mask_BT = (torch.arange(longest, device=model.device) < lengths_B[:, None]).long()
    hidden_BTH = model.base_model(ids_BT, attention_mask=mask_BT).last_hidden_state
    last_BH = hidden_BTH[torch.arange(len(texts), device=model.device), lengths_B - 1]
    return model.score(last_BH)[:, 0].float().tolist()
