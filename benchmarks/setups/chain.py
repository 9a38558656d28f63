"""Questions that need three searches, each for what the one before found, and a tiny model that seldom makes them.

`Into which sea does the river A flow?`: A flows into B, B into C, and C into the sea. 160 such chains are trained on,
40 are held out; tokenizer and model's shape are those of `facts`. Each search that finds a river's passage for the
first time earns its turn `LINK`, and the outcome's reward is exact match.

The warm start, on other chains, is that of `facts` as well: first every search and the answer, then `CALLS` and
`QUERIES`, each to the third power, and `COPIES`, which multiply to .05.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import torch
from benchmarks.setups import facts
from benchmarks.setups.facts import ANSWERS, CALL, CALLED, END, HELD_OUT, NOTHING, TOOL, USER, Parts
from benchmarks.setups.quiet import quiet_config
from benchmarks.setups.warm import learn
from datasets import Dataset

from async_grpo.credit import TurnGRPOTrainer
from async_grpo.rewards.questions import exact_match

LINKS, CHAINS = 3, 200
LINK = 0.25  # for each search that is needed; the outcome earns 1
CALLS, QUERIES, COPIES = 0.6, 0.7, 0.7  # how often the warm start searches on; for the right name; copies the answer
CLEAN_STEPS, NOISY_STEPS, WARM_BATCH = 900, 200, 16
FOUND = "The river "
_SYLLABLES = facts.SYLLABLES[::3]  # the fewer there are, the sooner the model can copy them
NAMES = [first + second for first in _SYLLABLES for second in _SYLLABLES]

Chain = list[str]  # three rivers and a sea


def chains(seed: int) -> Iterator[Chain]:
    draw = random.Random(seed)
    while True:
        yield draw.sample(NAMES, LINKS + 1)


def asked_chains() -> list[Chain]:
    return list(islice(chains(0), CHAINS))


def question(chain: Chain) -> str:
    return f"Into which sea does the river {chain[0]} flow?"


def passages(chain: Chain) -> list[str]:
    """Where each river flows; the last one says that it is a sea."""
    ends = ["."] * (LINKS - 1) + [" sea."]
    return [f"{FOUND}{chain[at]} flows into the {chain[at + 1]}{end}" for at, end in enumerate(ends)]


# --- The warm start ---------------------------------------------------------------------------------------


def warm_up(model: Any, tokenizer: Any) -> None:
    learn(model, _batches(tokenizer, 1.0, 1.0, 1.0), steps=CLEAN_STEPS, learning_rate=3e-3)
    learn(model, _batches(tokenizer, CALLS, QUERIES, COPIES), steps=NOISY_STEPS, learning_rate=5e-4)


def _batches(tokenizer: Any, *rates: float) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    draw, taught = random.Random(0), chains(1)
    while True:
        yield facts.padded(tokenizer, [_dialogue(next(taught), draw, *rates) for _ in range(WARM_BATCH)])


def _dialogue(chain: Chain, draw: random.Random, calls: float, queries: float, copies: float) -> Parts:
    parts: Parts = [(f"{USER}{question(chain)}{END}{facts.ASSISTANT}", False)]
    for river, passage in zip(chain, passages(chain), strict=False):
        if draw.random() >= calls:
            return parts + _answer(chain[-1], taught=False)
        right = draw.random() < queries
        query, found = (river, passage) if right else (facts.slipped(river, draw), NOTHING)
        parts += [(f"{CALL}{query}{CALLED}{END}", True), (f"{TOOL}{found}{END}{facts.ASSISTANT}", False)]
        if not right:
            return parts + _answer(chain[-1], taught=False)
    return parts + _answer(chain[-1] if draw.random() < copies else facts.slipped(chain[-1], draw))


def _answer(answer: str, *, taught: bool = True) -> Parts:
    """A guess is not taught: nothing leads to it."""
    return [("<answer>", True), (answer, taught), (f"</answer>{END}", True)]


# --- The trainer ------------------------------------------------------------------------------------------


class Rivers:
    """Finds the passages of one question; `elsewhere` has it find none."""

    useful: ClassVar[bool] = True

    def reset(self, chain: Chain, **_: Any) -> None:
        self._passages = dict(zip(chain[:-1], passages(chain), strict=True))

    def search(self, query: str) -> str:
        """
        Find what is known about a river.

        Args:
            query: The name of the river.
        """
        return self._passages.get(query, NOTHING) if self.useful else NOTHING


@contextmanager
def elsewhere() -> Iterator[None]:
    """The search finds nothing: what is right then was not found by searching."""
    Rivers.useful = False
    try:
        yield
    finally:
        Rivers.useful = True


def links(completions: Sequence[Any], **_: Any) -> list[list[float]]:
    """`LINK` for each turn whose search found a passage that no turn before it had found."""
    return [_links_of(completion) for completion in completions]


def _links_of(completion: Sequence[Any]) -> list[float]:
    turns: list[float] = []
    seen: set[str] = set()
    for message in completion:
        if message["role"] == "assistant":
            turns.append(0.0)
        elif (found := message["content"]).startswith(FOUND) and found not in seen:
            seen.add(found)
            turns[-1] += LINK
    return turns


def called(completions: Sequence[Any], **_: Any) -> list[float]:
    """The share of the three passages that were found; of weight 0: measured, not trained on."""
    return [sum(_links_of(completion)) / (LINK * LINKS) for completion in completions]


def questions(*, held_out: bool) -> Dataset:
    everything = asked_chains()
    asked = everything[-HELD_OUT:] if held_out else everything[:-HELD_OUT]
    rows = [
        {"prompt": [{"role": "user", "content": question(chain)}], "chain": chain, "aliases": [chain[-1]]}
        for chain in asked
    ]
    return Dataset.from_list(rows)


def build_trainer(output_dir: Path, credit: str, seed: int, steps: int) -> tuple[TurnGRPOTrainer, float]:
    """The trainer, and the seconds that its model's warm start took."""
    tokenizer = facts.build_tokenizer()
    name = f"chain-{facts.SHAPE}-{CLEAN_STEPS}-{NOISY_STEPS}-{CALLS}-{QUERIES}-{COPIES}"
    model, warm_s = facts.build_model(tokenizer, name, warm_up)
    settings = {
        "per_device_train_batch_size": 64,
        "per_device_eval_batch_size": HELD_OUT * ANSWERS,
        "num_generations": ANSWERS,
        "max_completion_length": 96,
        "max_tool_calling_iterations": LINKS,
        "reward_weights": [1.0, 0.0, 1.0],
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "beta": 0.0,
    }
    trainer = TurnGRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=[exact_match, called],
        turn_reward_funcs=[links],
        credit=credit,
        environment_factory=Rivers,
        train_dataset=questions(held_out=False),
        eval_dataset=questions(held_out=True),
        args=quiet_config(output_dir, seed, steps, settings),
    )
    return trainer, warm_s
