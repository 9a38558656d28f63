"""Paths in star graphs G(d, l): d branches of l nodes from one start (arXiv 2403.06963). One ends in the goal.

A text has the edges in random order, start and goal, then the path: `3 7 | 3 1 | 7 5 | 1 9 / 3 5 = 3 7 5`. A reference
that was trained on walks along a random branch is right with probability 1/d, whichever way it is asked. So π* is
known: with p = π(the right path | x), one forward pass, its success is p·e^{1/η} / (1 − p + p·e^{1/η}).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from async_grpo.errors import UsageError
from async_grpo_experiments.worlds.tiny import words_tokenizer


@dataclass(frozen=True)
class StarGraph:
    """One problem. Paths have all nodes from the start on, both ends included."""

    edges: tuple[tuple[int, int], ...]
    paths: tuple[tuple[int, ...], ...]
    right: int = 0  # index of the path to the goal

    @property
    def path(self) -> tuple[int, ...]:
        return self.paths[self.right]

    @property
    def prompt(self) -> str:
        """The text up to the path."""
        edges = " | ".join(f"{a} {b}" for a, b in self.edges)
        return f"{edges} / {self.path[0]} {self.path[-1]} ="

    @property
    def answer(self) -> str:
        """The text that is rewarded."""
        return text_of(self.path)


def text_of(path: Sequence[int]) -> str:
    return " ".join(map(str, path))


def star_graphs(branches: int, length: int, count: int, *, nodes: int = 12, seed: int = 0) -> Iterator[StarGraph]:
    """Random graphs G(branches, length), whose nodes have names below `nodes`. `UsageError`: those are too few."""
    needed = 1 + branches * (length - 1)
    if needed > nodes:
        raise UsageError(
            f"{branches} branches of {length} nodes need {needed} names, and there are {nodes}: set branches or length "
            "lower."
        )
    rng = np.random.default_rng(seed)
    for _ in range(count):
        names = rng.permutation(nodes)[:needed].tolist()
        paths = [(names[0], *names[1 + b * (length - 1) : 1 + (b + 1) * (length - 1)]) for b in range(branches)]
        edges = [edge for path in paths for edge in itertools.pairwise(path)]
        order = rng.permutation(len(edges)).tolist()
        yield StarGraph(tuple(edges[index] for index in order), tuple(paths), int(rng.integers(branches)))


def star_tokenizer(nodes: int = 12) -> Any:
    return words_tokenizer([*map(str, range(nodes)), "|", "/", "="])


def star_reward(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """1 for exactly the right path."""
    return [float(found.split() == right.split()) for found, right in zip(completions, answer, strict=True)]


def _path_of(completion: str) -> str:
    return " ".join(completion.split())


star_reward.final_answer = _path_of  # type: ignore[attr-defined]


def star_rows(graphs: Sequence[StarGraph]) -> list[dict[str, str]]:
    """Rows of a dataset for `GRPOTrainer`, with the reward `star_reward`."""
    return [{"prompt": graph.prompt, "answer": graph.answer} for graph in graphs]


def walks(graphs: Sequence[StarGraph], branches: Sequence[int], tokenizer: Any) -> tuple[torch.Tensor, int]:
    """Token ids of each graph and one of its paths, with the end token, [B, T]; and how many are of the graph."""
    texts = [f"{one.prompt} {text_of(one.paths[branch])}" for one, branch in zip(graphs, branches, strict=True)]
    ids = [[*row, tokenizer.eos_token_id] for row in tokenizer(texts)["input_ids"]]
    return torch.tensor(ids, dtype=torch.long, device="cpu"), len(tokenizer(graphs[0].prompt)["input_ids"])


def train_reference(
    model: Any,
    tokenizer: Any,
    branches: int,
    length: int,
    *,
    steps: int,
    nodes: int = 12,
    batch: int = 128,
    lr: float = 4e-3,
    seed: int = 0,
) -> None:
    """Train a model on walks along a random branch; no graph comes again.

    It first learns which nodes are near and which are leaves, and only then to follow an edge: a large rate that stays
    so brings that about in some 600 steps.
    """
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(6 * (step + 1) / steps, 1.0, 4 * (steps - step) / steps)
    )
    model.train()
    for step in range(steps):
        graphs = list(star_graphs(branches, length, batch, nodes=nodes, seed=1_000_000 * (seed + 1) + step))
        ids_BT, start = walks(graphs, rng.integers(branches, size=batch).tolist(), tokenizer)
        logits_BTV = model(ids_BT).logits[:, start - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, start:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()


@torch.no_grad()
def chances(model: Any, tokenizer: Any, graphs: Sequence[StarGraph], batch: int = 512) -> NDArray[np.float64]:
    """π(the right path | x) of each graph."""
    found = []
    for first in range(0, len(graphs), batch):
        part = graphs[first : first + batch]
        ids_BT, start = walks(part, [graph.right for graph in part], tokenizer)
        logps_BTV = model(ids_BT).logits[:, start - 1 : -1].double().log_softmax(-1)
        found.append(logps_BTV.gather(2, ids_BT[:, start:, None])[..., 0].sum(1).exp())
    return torch.cat(found).numpy()


def optimum(chances_N: NDArray[np.float64], eta: float) -> tuple[float, float]:
    """The success of π*, and KL(π*‖π) in nats, as means over graphs whose right path has these chances."""
    tilted_N = chances_N * np.exp(1 / eta)
    success_N = tilted_N / (1 - chances_N + tilted_N)
    divergence_N = success_N / eta - np.log(1 - chances_N + tilted_N)
    return float(success_N.mean()), float(divergence_N.mean())
