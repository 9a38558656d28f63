"""What guidance and preference algorithms lack of worlds whose optimum is known, and what guided decoding costs.

    python benchmarks/guidance.py [--quick] [--only PART …] [--json FILE] [--docs]

Parts: `formulas` (each offset with exact values), `ascents` (heads that were trained), `kl` (how often the interval of
avg_kl holds the enumerated value), `star` (G(3,3): Q#, PITA and DPO from one reference), `deep` (G(2,5), as far as it
comes), `sums` (the demo's: QSharp-HF against the reference), `grpo_hf` (the same sums, as its steps grow), `weak_proxy`
and `rewarded` (that with a worse proxy, and with the reward itself), `reviews` (a lexicon as reward), `decoding`
(guided against plain), `strengths` (`async-grpo evaluate` of one η against four). `--quick` leaves out `deep`,
`grpo_hf`, `weak_proxy`, `rewarded`, `decoding`, `reviews`, learned PITA and DPO. `--docs` puts the rows, with those of
earlier runs that were not measured again, into docs/algorithms.md. Each part says what it took: its time, and that of
all its cores together.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import logging
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from benchmarks.table import (
    Row,
    as_text,
    describe_machine,
    figure,
    machine_line,
    row,
    update_docs,
    with_earlier,
    write_json,
)
from transformers import LogitsProcessor, Qwen3Config, Qwen3ForCausalLM, set_seed

from async_grpo.evals.estimators import mean_with_interval
from async_grpo_experiments.algorithms.dpo import DPO, DPOSettings
from async_grpo_experiments.algorithms.grpo import GRPO, GRPOHF, GRPOHFSettings, GRPOSettings
from async_grpo_experiments.algorithms.pita import PITA, PITASettings
from async_grpo_experiments.algorithms.protocols import Continuations, Cut, PostTraining, Trained, collect, configured
from async_grpo_experiments.algorithms.proxy import Proxy, ProxyRecord
from async_grpo_experiments.algorithms.qsharp import QSharp, QSharpSettings
from async_grpo_experiments.algorithms.qsharp_hf import QSharpHF, QSharpHFSettings
from async_grpo_experiments.algorithms.training import load_policy
from async_grpo_experiments.guidance.divergence import divergence_of_policy
from async_grpo_experiments.guidance.head import HeadRecord, ValueHead
from async_grpo_experiments.guidance.offsets import offsets
from async_grpo_experiments.guidance.processor import Guidance
from async_grpo_experiments.worlds.enumerable import Enumerable, Steps, numbers_of, sample, values_of
from async_grpo_experiments.worlds.sampler import CutSampler
from async_grpo_experiments.worlds.sentiment import (
    sentiment_reward,
    sentiment_rows,
    sentiment_tokenizer,
    train_on_reviews,
)
from async_grpo_experiments.worlds.star import (
    chances,
    optimum,
    star_graphs,
    star_reward,
    star_rows,
    star_tokenizer,
    train_reference,
)
from async_grpo_experiments.worlds.tiny import save, small_transformer, words_tokenizer

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "guidance.json"
RECIPE = ROOT / "src" / "app" / "trainer_setup_tiny.py"
GUIDED_STAR = ROOT / "benchmarks" / "setups" / "guided_star.py"
ETAS = (1.0, 0.5, 0.25, 0.1)
PROXY: dict[str, Any] = {"epochs": 14, "lr": 1e-3}
REWARD = "async_grpo_experiments.problems.table:exactly"
SEEDS, ROUNDS, ROUND = (1, 2, 3), 2, 40
_Made = TypeVar("_Made")
FAST: dict[str, Any] = {"num_workers": 0, "gradient_checkpointing": False}


# --- Worlds that are enumerated ---------------------------------------------------------------------------


def formulas(quick: bool, folder: Path) -> Iterator[Row]:
    """Each formula with exact values: what it lacks of the optimum."""
    modes = ("histogram", "contrastive", "expectation", "bernoulli")
    limits = {"contrastive": (0.261, 0.072), "expectation": (0.055, 0.207), "bernoulli": (0, 0.194)}
    for graded in (False, True):
        world = Enumerable.tables(graded=graded)
        for mode in modes:
            gap = abs(world.gap(world.guided(exactly(world, mode, 0.2)), 0.2))
            limit = limits.get(mode, (0, 0))[graded]
            yield row(
                f"tables, {kind(graded)}, eta .2, {mode}: KL(q‖π*)",
                [gap],
                "nats",
                target=f"<= {limit * 1.01 + 1e-9:.3g}",
            )
    world = Enumerable.ascents()
    gap = world.gap(world.guided(exactly(world, "contrastive", 0.3)), 0.3)
    yield row("ascents, binary, eta .3, contrastive: KL(q‖π*)", [gap], "nats")
    for graded in (True, False):
        world = Enumerable.ascents(graded=graded)
        for both in (False, True):
            values = [np.log(chance / (1 - chance)) / 0.2 for chance in world.preferred(1.0, both=both)]
            gap = world.gap(world.guided(values), 0.2)
            yield row(f"ascents, {kind(graded)}, eta .2, PITA's log_odds, label {label(both)}: KL(q‖π*)", [gap], "nats")


def exactly(world: Enumerable, mode: str, eta: float) -> Steps:
    """The offsets of a head without error."""
    levels = torch.linspace(0, 1, 11, dtype=torch.float64)
    if mode == "histogram":
        logits = [torch.tensor(chances).clamp_min(1e-300).log() for chances in world.chances(levels.tolist())]
    else:
        logits = [
            torch.special.logit(torch.tensor(mean).clamp(0, 1))[..., None].clamp(-700, 700) for mean in world.means()
        ]
    return [offsets(mode, step, eta=eta, levels=levels).numpy() for step in logits]


def ascents(quick: bool, folder: Path) -> Iterator[Row]:
    """Heads trained on 20,000 sequences."""
    tokenizer = words_tokenizer("abcdefgh")
    reference = save(folder / "model", small_transformer(tokenizer, width=32, scale=0.1), tokenizer)
    keys = {
        "reference": reference,
        "batch_size": 256,
        "micro_batch_size": 256,
        "lr": 5e-3,
        "max_steps": 700,
        "weight_decay": 0.1,
        **FAST,
    }
    world = Enumerable.ascents()
    qsharp = QSharp(
        configured(QSharpSettings, {**keys, "loss_type": "bce", "guidance": {"eta": 0.3, "mode": "bernoulli"}})
    )
    rows = qsharp.rows(world.answers([Cut(problem=problem, count=4) for problem in range(5000)], seed=1))
    trained = qsharp.train(rows, out=folder / "qsharp")
    gap = world.gap(world.guided(of_head(world, trained.folder, "bernoulli", 0.3)), 0.3)
    yield row("ascents, binary, eta .3, Q# learned: KL(q‖π*)", [gap], "nats", target="<= 0.05", note=spent(trained))
    yield row("training of that head", [700 * 256 / trained.seconds], "sequences/s")
    if quick:
        return
    world = Enumerable.ascents(graded=True)
    for both in (False, True):
        pita = PITA(configured(PITASettings, {**keys, "label": label(both), "bradley_terry_sampling": False}))
        rows = pita.rows(collect(pita.plan(2500), lambda cuts: world.answers(cuts, seed=len(cuts))))
        trained = pita.train(rows, out=folder / f"pita_{both}")
        gap = world.gap(world.guided(of_head(world, trained.folder, "log_odds", 0.2)), 0.2)
        yield row(
            f"ascents, graded, eta .2, PITA learned, label {label(both)}: KL(q‖π*)", [gap], "nats", note=spent(trained)
        )


def of_head(world: Enumerable, folder: Path, mode: str, eta: float) -> Steps:
    head = ValueHead.load(folder)
    record = head.record
    values = values_of(lambda ids: head(ids).logits, world.prompt)
    return [
        offsets(mode, torch.tensor(step), eta=eta, levels=record.levels, beta=record.beta).numpy() for step in values
    ]


def kl(quick: bool, folder: Path) -> Iterator[Row]:
    """How often the 95% interval of avg_kl holds the enumerated value, by seed."""
    world = Enumerable.ascents(graded=True)
    policy = world.best(0.2)
    truth = world.divergence(policy)
    steps = [(np.exp(q) * (q - p)).sum(1) for q, p in zip(policy, world.reference, strict=True)]
    held = 0
    for seed in range(100):
        tokens_NT = sample(policy, np.random.default_rng(seed), 200)
        numbers = [numbers_of(tokens_NT[:, :t]) for t in range(tokens_NT.shape[1])]
        sums_N = sum(step[number] for step, number in zip(steps, numbers, strict=True))
        found = mean_with_interval(sums_N.tolist(), (0.0, float("inf")))
        held += found.low is not None and found.high is not None and found.low <= truth <= found.high
    yield row("seeds of 100 whose interval of avg_kl holds the enumerated value", [held], "", target=">= 90")


# --- Graphs -----------------------------------------------------------------------------------------------


def star(quick: bool, folder: Path) -> Iterator[Row]:
    """G(3,3) of 12 nodes: the reference is right a third of the time."""
    tokenizer, test = star_tokenizer(), list(star_graphs(3, 3, 1000, seed=5))
    model, began = small_transformer(tokenizer), time.monotonic()
    train_reference(model, tokenizer, 3, 3, steps=900)
    took, chance_N = time.monotonic() - began, chances(model, tokenizer, test)
    yield row(
        "G(3,3): success of the reference less 1/3",
        [abs(chance_N.mean() - 1 / 3)],
        "",
        target="<= 0.05",
        note=f"{took:.0f} s",
    )
    reference = save(folder / "reference", model, tokenizer)
    graphs = list(star_graphs(3, 3, 8192, seed=6))
    sampler = CutSampler(model, tokenizer, star_rows(graphs), star_reward, max_new_tokens=4, verified=True)
    keys = {"reference": reference, "batch_size": 128, "micro_batch_size": 128, "lr": 1e-3, "max_steps": 600, **FAST}
    qsharp = QSharp(configured(QSharpSettings, {**keys, "loss_type": "bce", "guidance": {"mode": "bernoulli"}}))
    torch.manual_seed(0)
    trained = trained_on(sampler, qsharp, len(graphs), folder / "qsharp")
    for eta in ETAS:
        success, divergence = guided_success(model, tokenizer, trained.folder, "bernoulli", eta, star_rows(test))
        best, furthest = optimum(chance_N, eta)
        name = f"G(3,3), eta {eta:g}: "
        yield row(
            f"{name}Q# succeeds, less the optimum's {best:.3f}",
            [abs(success - best)],
            "",
            target="<= 0.06",
            note=f"{success:.3f}; {spent(trained)}",
        )
        yield row(
            f"{name}its KL, less the optimum's {furthest:.3f}",
            [abs(divergence - furthest)],
            "nats",
            target="<= 0.06",
            note=f"{divergence:.3f}",
        )
    if quick:
        return
    pita = PITA(configured(PITASettings, keys))
    trained = trained_on(sampler, pita, len(graphs), folder / "pita")
    for eta in (1.0, 0.5, 0.2):
        bonus = pita.settings.correctness_bonus  # r of what is right, so the head's eta is in its units
        success, divergence = guided_success(model, tokenizer, trained.folder, "log_odds", eta * bonus, star_rows(test))
        yield row(
            f"G(3,3), eta {eta:g}: PITA succeeds", [success], "", note=f"KL {divergence:.3f} nats; {spent(trained)}"
        )
    dpo = DPO(configured(DPOSettings, {**keys, "lr": 1e-4, "max_steps": 300}))
    trained = trained_on(sampler, dpo, len(graphs), folder / "dpo")
    policy = load_policy(str(trained.folder), dpo.settings).eval()
    success = chances(policy, tokenizer, test).mean()
    divergence = policy_divergence(policy, model, tokenizer, star_rows(test))
    yield row("G(3,3): DPO succeeds", [success], "", note=f"KL {divergence:.3f} nats; {spent(trained)}")


def deep(quick: bool, folder: Path) -> Iterator[Row]:
    """G(2,5): the first hop of five decides. A head of three layers begins from the reference."""
    tokenizer, test = star_tokenizer(), list(star_graphs(2, 5, 500, seed=5))
    model = small_transformer(tokenizer, layers=3)
    train_reference(model, tokenizer, 2, 5, steps=1200)
    chance_N = chances(model, tokenizer, test)
    yield row("G(2,5): success of the reference, which knows no goal", [float(chance_N.mean())], "")
    reference = save(folder / "reference", model, tokenizer)
    graphs = list(star_graphs(2, 5, 4096, seed=6))
    sampler = CutSampler(model, tokenizer, star_rows(graphs), star_reward, max_new_tokens=6)
    keys = {"reference": reference, "batch_size": 128, "micro_batch_size": 128, "lr": 1e-3, "max_steps": 750, **FAST}
    qsharp = QSharp(configured(QSharpSettings, {**keys, "loss_type": "bce", "guidance": {"mode": "bernoulli"}}))
    torch.manual_seed(0)
    trained = trained_on(sampler, qsharp, len(graphs), folder / "qsharp")
    for eta in (0.5, 0.1):
        success, divergence = guided_success(
            model, tokenizer, trained.folder, "bernoulli", eta, star_rows(test), max_new_tokens=6
        )
        best, _ = optimum(chance_N, eta)
        note = f"the optimum's is {best:.3f}; KL {divergence:.3f} nats; {spent(trained)}"
        yield row(f"G(2,5), eta {eta:g}: Q# succeeds", [success], "", note=note)


def trained_on(sampler: CutSampler, algorithm: PostTraining, problems: int, out: Path) -> Trained:
    """One round: what the algorithm asks for is sampled, and it trains on it."""
    return algorithm.train(algorithm.rows(collect(algorithm.plan(problems), sampler.answer)), out=out)


class Divergences(LogitsProcessor):
    """Adds up what the processor of guidance says of each token, up to the end of each row."""

    def __init__(self, guiding: Any, prompt_tokens: int, end: int) -> None:
        self._guiding, self._prompt_tokens, self._end = guiding, prompt_tokens, end
        self.sums_B = torch.zeros(1)

    def __call__(self, ids_BT: torch.Tensor, scores_BV: torch.Tensor) -> torch.Tensor:
        alive_B = (ids_BT[:, self._prompt_tokens :] != self._end).all(1)
        added_B = self._guiding.divergences_b * alive_B
        self.sums_B = self.sums_B + added_B
        return scores_BV


def guided_success(
    model: Any, tokenizer: Any, head: Path, mode: str, eta: float, problems: list[dict[str, str]], **other: Any
) -> tuple[float, float]:
    """The mean reward of guided completions, one a problem, and avg_kl."""
    guidance = Guidance(head=ValueHead.load(head), eta=eta, mode=mode, top_k=-1)
    watched: list[Divergences] = []

    def processors(mask_BP: torch.Tensor) -> list[Any]:
        found = guidance.processors(model, tokenizer, attention_mask=mask_BP, temperature=1.0)
        watched.append(Divergences(found[0], mask_BP.shape[1], tokenizer.eos_token_id))
        return [*found, watched[-1]]

    reward, longest = other.get("reward", star_reward), other.get("max_new_tokens", 4)
    sampler = CutSampler(model, tokenizer, problems, reward, max_new_tokens=longest, processors=processors)
    set_seed(0)
    found = sampler.answer([Cut(problem=problem, guided=True) for problem in range(len(problems))])
    return mean_reward(found), float(torch.cat([one.sums_B for one in watched]).mean())


def mean_reward(found: Sequence[Any]) -> float:
    return float(np.mean([one.rewards for one in found]))


def policy_divergence(policy: Any, reference: Any, tokenizer: Any, problems: list[dict[str, str]]) -> float:
    """avg_kl of a trained policy: its own completions, passed through both."""
    set_seed(0)
    sampler = CutSampler(
        policy, tokenizer, problems, lambda completions, **_: [0.0] * len(completions), max_new_tokens=4
    )
    found = sampler.answer([Cut(problem=problem) for problem in range(len(problems))])
    texts = [(one.prompt, one.completions[0]) for one in found]
    longest = max(len(prompt) + len(tokens) for prompt, tokens in texts)
    ids_BT, mask_BT = torch.zeros(2, len(texts), longest, dtype=torch.long)
    for index, (prompt, tokens) in enumerate(texts):
        end = len(prompt) + len(tokens)
        ids_BT[index, :end] = torch.tensor(prompt + tokens)
        mask_BT[index, len(prompt) : end] = 1
    return float(divergence_of_policy(policy, reference, ids_BT, mask_BT).sum(1).mean())


# --- Sums and reviews ------------------------------------------------------------------------------------


class Demo:
    """The sums of the demo: its reference, and answers to held-out problems, sampled at temperature 1."""

    def __init__(self, folder: Path) -> None:
        recipe = module_of(RECIPE)
        self.tokenizer, self.reward = recipe.build_tokenizer(), recipe.accuracy
        self.model = recipe.build_model(self.tokenizer).eval()
        self.train, self.test = (list(recipe.as_dataset(problems)) for problems in recipe.split_problems())
        self.keys = {"reference": save(folder / "reference", self.model, self.tokenizer), **FAST}
        self.keys |= {"batch_size": 128, "micro_batch_size": 128}
        self.sampler = CutSampler(self.model, self.tokenizer, self.train, self.reward, max_new_tokens=4, verified=True)

    def answers(self, model: Any, processors: Any = None) -> list[Continuations]:
        """4 answers to each held-out problem."""
        set_seed(1)
        sampler = CutSampler(
            model, self.tokenizer, self.test, self.reward, max_new_tokens=4, processors=processors, verified=True
        )
        cuts = [Cut(problem=problem, count=4, guided=processors is not None) for problem in range(len(self.test))]
        return sampler.answer(cuts)


def sums(quick: bool, folder: Path) -> Iterator[Row]:
    """The sums of the demo: QSharp-HF."""
    demo = Demo(folder)
    plain = shares(demo.answers(demo.model))
    yield row("sums: accuracy of the reference", [float(np.mean(plain))], "")
    keys = {**demo.keys, "lr": 1e-3, "max_steps": 400, "proxy": PROXY}
    algorithm = QSharpHF(configured(QSharpHFSettings, keys))
    set_seed(0)
    trained = trained_on(demo.sampler, algorithm, len(demo.train), folder / "qsharp_hf")
    guidance = Guidance(head=ValueHead.load(trained.folder), **algorithm.guidance())

    def processors(mask_BP: torch.Tensor) -> list[Any]:
        return list(guidance.processors(demo.model, demo.tokenizer, attention_mask=mask_BP, temperature=1.0))

    guided = shares(demo.answers(demo.model, processors))
    yield better("sums: QSharp-HF, eta .2, more than the reference", guided, plain, spent(trained))


ONLINE: dict[str, Any] = {"samples_per_prompt": 8, "max_new_tokens": 4, "lr": 4e-4, "max_steps": ROUND, "workers": 1}


def grpo_hf(quick: bool, folder: Path) -> Iterator[Row]:
    """The sums of the demo: GRPO-HF as its steps grow. Held-out pairs chose how long its proxy trains."""
    demo = Demo(folder)
    plain = shares(demo.answers(demo.model))
    with ProcessPoolExecutor(len(SEEDS), get_context("spawn")) as pool:  # each is mostly starts and short waits
        found = list(pool.map(of_seed, SEEDS, repeat(folder)))
    yield from as_it_grows(f"GRPO-HF, {len(SEEDS)} seeds", found)
    ours = [float(np.mean(of_problem)) for of_problem in zip(*(rounds[-1].shares for rounds in found), strict=True)]
    each = ", ".join(f"{np.mean(rounds[-1].shares):.3f}" for rounds in found)
    yield better("sums: GRPO-HF more than the reference", ours, plain, f"{ROUNDS * ROUND} steps; by seed {each}")


def of_seed(seed: int, folder: Path) -> list[Grown]:
    demo = Demo(folder / str(seed))
    settings = configured(GRPOHFSettings, {**demo.keys, **ONLINE, "proxy": PROXY, "seed": seed})
    return list(silently(grown(demo, GRPOHF(settings, demo.train), folder / str(seed))))


def weak_proxy(quick: bool, folder: Path) -> Iterator[Row]:
    """The same with a proxy of 3 epochs, on pairs of which 27% are the wrong way round."""
    demo = Demo(folder)
    keys = {**demo.keys, **ONLINE, "correctness_bonus": 1, "seed": SEEDS[0]}
    algorithm = GRPOHF(configured(GRPOHFSettings, keys), demo.train)
    yield from as_it_grows("GRPO-HF, weak proxy", [list(grown(demo, algorithm, folder))])


def rewarded(quick: bool, folder: Path) -> Iterator[Row]:
    """The same with the reward itself: what the settings are good for."""
    demo = Demo(folder)
    algorithm = GRPO(configured(GRPOSettings, {**demo.keys, **ONLINE, "seed": SEEDS[0]}), demo.train, REWARD)
    yield from as_it_grows("GRPO with the reward", [list(grown(demo, algorithm, folder))])


class Grown(NamedTuple):
    """A policy after a round."""

    shares: list[float]  # right, of each held-out problem
    divergence: float
    proxy: ProxyRecord | None
    score: float  # what the proxy says of the same answers


def grown(demo: Demo, algorithm: GRPO | GRPOHF, folder: Path) -> Iterator[Grown]:
    """Rounds of one algorithm, of `ROUND` steps each."""
    set_seed(algorithm.settings.seed)
    rows = algorithm.rows(collect(algorithm.plan(len(demo.train)), demo.sampler.answer))
    start = None
    for number in range(1, ROUNDS + 1):
        start = algorithm.train(rows, start, out=folder / str(number)).folder
        policy = load_policy(str(start), algorithm.settings).eval()
        answers = demo.answers(policy)
        proxy = Proxy(start.parent / "proxy") if isinstance(algorithm, GRPOHF) else None
        texts = [one.prompt + tokens for one in answers for tokens in one.completions]
        yield Grown(
            shares(answers),
            policy_divergence(policy, demo.model, demo.tokenizer, demo.test),
            proxy.record if proxy else None,
            float(np.mean(proxy.scaled(texts))) if proxy else 0.0,
        )


def as_it_grows(name: str, found: Sequence[Sequence[Grown]]) -> Iterator[Row]:
    """A row for each round, and one for what was known of the proxy before the first; means over seeds."""
    records = [rounds[0].proxy for rounds in found]
    if known := [one.held_out_right for one in records if one is not None and one.held_out_right is not None]:
        pairs = sum(one.held_out_pairs for one in records if one is not None)
        yield row(f"sums: {name}: held-out pairs that it orders right", [float(np.mean(known))], "", note=f"of {pairs}")
    for number, policies in enumerate(zip(*found, strict=True), 1):
        score = f"; the proxy's score {np.mean([one.score for one in policies]):.3f}" if policies[0].proxy else ""
        accuracy = float(np.mean([one.shares for one in policies]))
        divergence = np.mean([one.divergence for one in policies])
        yield row(
            f"sums: {name}, {number * ROUND} steps: accuracy", [accuracy], "", note=f"KL {divergence:.2f} nats{score}"
        )


def shares(answers: Sequence[Continuations]) -> list[float]:
    """The mean reward of the answers to each problem."""
    return [float(np.mean(found.rewards)) for found in answers]


def better(name: str, ours: list[float], theirs: list[float], note: str) -> Row:
    found = mean_with_interval([one - other for one, other in zip(ours, theirs, strict=True)], (-1.0, 1.0))
    ok = found.low is not None and found.low > 0
    return row(name, [found.value], "", ok=ok, target="> 0", note=f"95% {found.interval}; {note}")


def reviews(quick: bool, folder: Path) -> Iterator[Row]:
    """Reviews with a lexicon as reward, which is graded."""
    tokenizer = sentiment_tokenizer()
    model = small_transformer(tokenizer)
    train_on_reviews(model, tokenizer, steps=150)
    reference = save(folder / "reference", model, tokenizer)
    problems, test = sentiment_rows(512), sentiment_rows(400, seed=2)
    sampler = CutSampler(model, tokenizer, problems, sentiment_reward, max_new_tokens=30)
    set_seed(0)
    yield row(
        "reviews: share of good words, reference",
        [mean_reward(sampler.answer([Cut(problem=p) for p in range(512)]))],
        "",
    )
    keys = {"reference": reference, "batch_size": 64, "micro_batch_size": 64, "lr": 1e-3, "max_steps": 200, **FAST}
    qsharp = QSharp(configured(QSharpSettings, {**keys, "num_atoms": 13}))
    trained = trained_on(sampler, qsharp, len(problems), folder / "qsharp")
    for eta in (0.5, 0.2, 0.1):
        success, divergence = guided_success(
            model, tokenizer, trained.folder, "histogram", eta, test, reward=sentiment_reward, max_new_tokens=30
        )
        yield row(
            f"reviews: the same, Q# at eta {eta:g}", [success], "", note=f"KL {divergence:.2f} nats; {spent(trained)}"
        )


# --- Decoding --------------------------------------------------------------------------------------------


def decoding(quick: bool, folder: Path) -> Iterator[Row]:
    """Guided against plain: one prompt of 16 tokens and 128 more, a head as large as the model, 20 candidates.

    Without cache every candidate is a pass over its whole prefix, so two tokens at the mean length stand for all.
    """
    tokenizer = words_tokenizer([f"w{index}" for index in range(4000)])
    for name, width, layers in (("tiny", 64, 2), ("100 M parameters", 768, 12)):
        torch.manual_seed(0)
        shape = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers}
        heads = {"num_attention_heads": width // 32, "num_key_value_heads": width // 32, "head_dim": 32}
        model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **shape, **heads)).eval()
        record = HeadRecord.of(model, tokenizer, kind="value", loss="bce", temperature=1.0)
        head = ValueHead.beginning_from(model, record, tokenizer)
        torch.nn.init.normal_(head.scores.weight, std=0.02)
        plain = decoded(model, tokenizer, head, None, 16, 128)
        cached = decoded(model, tokenizer, head, True, 16, 128)
        alone = decoded(model, tokenizer, head, False, 80, 2)
        yield row(f"{name}: plain decoding", [1 / plain], "tokens/s")
        yield row(f"{name}: guided", [1 / cached], "tokens/s", note=f"share of the head {1 - plain / cached:.0%}")
        target = ">= 3" if width == 768 else ""
        yield row(f"{name}: guided, cache against none", [alone / cached], "x", target=target)


def decoded(model: Any, tokenizer: Any, head: ValueHead, use_cache: bool | None, prompt: int, tokens: int) -> float:
    """Seconds a token; None: without guidance."""
    ids_BP = torch.randint(4000, (1, prompt), generator=torch.Generator().manual_seed(0))
    mask_BP = torch.ones_like(ids_BP)
    guiding: list[Any] = []
    if use_cache is not None:
        guidance = Guidance(head=head, eta=0.2, mode="bernoulli", use_cache=use_cache)
        guiding = list(guidance.processors(model, tokenizer, attention_mask=mask_BP, temperature=1.0))
    began = time.monotonic()
    lengths = {"max_new_tokens": tokens, "min_new_tokens": tokens, "pad_token_id": tokenizer.pad_token_id}
    model.generate(ids_BP, attention_mask=mask_BP, do_sample=True, top_k=0, logits_processor=guiding, **lengths)
    return (time.monotonic() - began) / tokens


def strengths(quick: bool, folder: Path) -> Iterator[Row]:
    """One evaluation of four η against one of one η: a command, two workers, 200 graphs, 8 completions of each.

    A head that was not trained costs what a trained one does. What all processes compute counts, so that other work
    on the machine does not; and so does their start.
    """
    folder.mkdir(parents=True)
    tokenizer = star_tokenizer()
    model = small_transformer(tokenizer)
    reference = save(folder / "reference", model, tokenizer)
    record = HeadRecord.of(model, tokenizer, kind="value", loss="bce", temperature=1.0, model=reference)
    ValueHead.beginning_from(model, record, tokenizer).save(folder / "head")
    one, four = (evaluated(folder, etas) for etas in ("0.2", "0.1,0.2,0.5,1"))
    note = f"{four:.0f} s of CPU to {one:.0f} s, of which the start is {(4 * one - four) / 3:.0f} s of each"
    yield row("evaluate: 4 eta in one command against 1", [four / one], "x", target="<= 4.2", note=note)


def evaluated(folder: Path, etas: str) -> float:
    """Seconds of CPU of `async-grpo evaluate`, with all of its processes."""
    before = cpu_s(resource.RUSAGE_CHILDREN)
    options = ["-n", "2", "--eval-replicates", "8", "--eval-k", "1", "--eval-eta", etas, "--overwrite"]
    run: Any = subprocess.run(
        [sys.executable, "-m", "async_grpo.cli", "evaluate", "reference", "--config", str(GUIDED_STAR), *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = (folder / "evaluation" / "evaluations.jsonl").read_text().splitlines() if run.returncode == 0 else []
    if len(lines) != len(etas.split(",")):
        sys.exit(run.stdout + run.stderr)
    return cpu_s(resource.RUSAGE_CHILDREN) - before


def computed_s() -> float:
    return cpu_s(resource.RUSAGE_SELF) + cpu_s(resource.RUSAGE_CHILDREN)


def cpu_s(whose: int) -> float:
    used = resource.getrusage(whose)
    return used.ru_utime + used.ru_stime


# --- All of it -------------------------------------------------------------------------------------------


def kind(graded: bool) -> str:
    return "graded" if graded else "binary"


def label(both: bool) -> str:
    return "both" if both else "sampled"


def spent(trained: Trained) -> str:
    return f"{trained.steps} steps in {trained.seconds:.0f} s"


def module_of(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def silently(rows: Iterator[_Made]) -> Iterator[_Made]:
    """The rows, or what they are made of, without what trainers print."""
    while True:
        with Path(os.devnull).open("w") as nothing, contextlib.redirect_stdout(nothing):
            one = next(rows, None)
        if one is None:
            return
        yield one


def table(rows: Sequence[Row]) -> str:
    lines = ["| what | value | target | reached |", "|---|---|---|---|"]
    for one in rows:
        note = f" ({one.note})" if one.note else ""
        reached = {True: "yes", False: "no", None: ""}[one.ok]
        lines.append(f"| {one.name}{note} | {figure(one.value)} {one.unit} | {one.target} | {reached} |")
    return "\n".join(lines)


PARTS: dict[str, Callable[[bool, Path], Iterator[Row]]] = {
    part.__name__: part
    for part in (formulas, ascents, kl, star, deep, sums, grpo_hf, weak_proxy, rewarded, reviews, decoding, strengths)
}
NOT_QUICK = ("deep", "grpo_hf", "weak_proxy", "rewarded", "reviews", "decoding")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), metavar="PART")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here, beside the earlier ones")
    parser.add_argument("--docs", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    load, rows = os.getloadavg(), []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only or [name for name in PARTS if not options.quick or name not in NOT_QUICK]:
            began, used = time.monotonic(), computed_s()
            for one in silently(PARTS[name](options.quick, Path(folder) / name)):
                rows.append(one)
                print(as_text([one]), flush=True)
            print(f"    {name}: {time.monotonic() - began:.0f} s, {computed_s() - used:.0f} s of CPU", flush=True)
    written = options.json or (RESULTS if options.docs else None)
    if written:
        rows = with_earlier(written, rows)
        write_json(written, rows, load_before=load)
    if options.docs:
        busy = "; other work ran beside it" if load[0] >= len(os.sched_getaffinity(0)) else ""
        update_docs("guidance", f"Machine: {machine_line(describe_machine())}{busy}.\n\n{table(rows)}")


if __name__ == "__main__":
    main()
