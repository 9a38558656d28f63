"""Rows of token ids, made of continuations: one label each, in groups that stay together; and their arrow file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from async_grpo.errors import BadFileError, UsageError
from async_grpo.formatting import counted
from async_grpo.log import logger
from async_grpo.rundir.files import space_for
from async_grpo.rundir.reading import read_file
from async_grpo_experiments.algorithms.protocols import AlgorithmSettings, Continuations, Cut, Plan, PreferenceSettings

_IDS = pa.list_(pa.int32())
_SCHEMA = pa.schema(
    {"problem": pa.int64(), "group": pa.int64(), "prompt": _IDS, "prefix": _IDS, "continuation": _IDS}
    | {"label": pa.float64()}
)
_MOST_BYTES = 16 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledRow:
    """One continuation. Its label holds for the tokens behind the cut, which were sampled as the label assumes."""

    problem: int
    group: int  # rows of one number are in one batch together; a pair has the chosen one first
    prompt: tuple[int, ...]
    prefix: tuple[int, ...]
    continuation: tuple[int, ...]
    label: float  # a reward, or the probability that this one is preferred

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.prefix + self.continuation

    @property
    def unlabelled(self) -> int:
        """The number of tokens before the first that has the label."""
        return len(self.prompt) + len(self.prefix)


@dataclass(frozen=True)
class Rows:
    """The rows of one round, or of several."""

    items: tuple[LabelledRow, ...]
    dropped: int = 0  # problems or pairs that teach nothing and were left out

    @classmethod
    def together(cls, rounds: Iterable[Rows]) -> Rows:
        """The rows of several rounds; their groups stay apart."""
        items: list[LabelledRow] = []
        dropped = 0
        for one in rounds:
            first = items[-1].group + 1 if items else 0
            items += [replace(row, group=first + row.group) for row in one.items]
            dropped += one.dropped
        return cls(tuple(items), dropped)

    def groups(self) -> list[list[LabelledRow]]:
        found: dict[int, list[LabelledRow]] = {}
        for row in self.items:
            found.setdefault(row.group, []).append(row)
        return list(found.values())

    def save(self, path: Path) -> None:
        """Write an arrow file that appears whole or not at all."""
        table = pa.Table.from_pylist([asdict(row) for row in self.items], _SCHEMA)
        table = table.replace_schema_metadata({"dropped": str(self.dropped)})
        temporary = path.with_name(f".{path.name}.partial")
        with space_for(path), pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path) -> Rows:
        """Read what `save` wrote."""
        try:
            table = pa.ipc.open_file(pa.py_buffer(read_file(path, _MOST_BYTES))).read_all()
            if not table.schema.equals(_SCHEMA):
                raise BadFileError(f"{path} holds no rows: its columns are {', '.join(table.schema.names)}")
            dropped = int((table.schema.metadata or {}).get(b"dropped", b"0"))
        except (pa.ArrowInvalid, ValueError) as error:
            raise BadFileError(f"{path} is not an arrow file of rows: {error}") from error
        ids = ("prompt", "prefix", "continuation")
        return cls(
            tuple(LabelledRow(**row | {name: tuple(row[name]) for name in ids}) for row in table.to_pylist()), dropped
        )


NO_ROWS = Rows(())


def number_of_problems(settings: AlgorithmSettings, problems: int) -> int:
    return problems if settings.max_examples is None else min(problems, settings.max_examples)


def cuts_of(roll_ins: Sequence[Continuations], seed: int, round_number: int, each: int = 1) -> Iterator[Cut]:
    """`each` cuts of every roll-in, uniform over its tokens: behind a cut there is always one left to sample."""
    for roll_in in roll_ins:
        rng = np.random.default_rng([seed, round_number, roll_in.cut.problem])
        tokens = roll_in.completions[0]
        for position in rng.integers(max(1, len(tokens)), size=each).tolist():
            yield Cut(problem=roll_in.cut.problem, prefix=tokens[:position])


def pairs_plan(settings: PreferenceSettings, problems: int, round_number: int) -> Plan:
    """Plan pairs as PITA has them: from cuts of a greedy roll-in, a greedy continuation and a sampled one.

    From round 2 on the roll-in is guided. `samples_per_example` is the number of cuts of a problem.
    """
    wanted = range(number_of_problems(settings, problems))
    roll_ins = yield [Cut(problem=problem, greedy=True, guided=round_number > 1) for problem in wanted]
    wave = []
    for cut in cuts_of(roll_ins, settings.seed, round_number, settings.samples_per_example):
        wave += [Cut(problem=cut.problem, prefix=cut.prefix, greedy=True), cut]
    yield wave


def pairs_of(continuations: Sequence[Continuations]) -> Iterator[Continuations]:
    """The greedy and the sampled answer to each cut of `pairs_plan`, side by side, where neither has failed."""
    for greedy, sampled in pairwise(continuations):
        if not sampled.cut.greedy and greedy.cut == replace(sampled.cut, greedy=True):
            each = ("completions", "rewards", "correct", "scores")
            both: dict[str, Any] = {name: getattr(greedy, name) + getattr(sampled, name) for name in each}
            yield replace(sampled, **both)


def preferable(found: Continuations, settings: PreferenceSettings) -> tuple[float, ...]:
    """r of each completion: the score of the reward model, and the bonus of what is right."""
    if not found.correct:
        return found.scores or found.rewards
    scores = found.scores or (0.0,) * len(found.correct)
    return tuple(score + settings.correctness_bonus * right for score, right in zip(scores, found.correct, strict=True))


class Preferences:
    """Who is preferred, by Bradley and Terry. Each problem of each round has draws of its own.

    So a problem that fails changes nothing of the others, and a round that is made again is the same.
    """

    def __init__(self, settings: PreferenceSettings, round_number: int) -> None:
        self._settings, self._round = settings, round_number
        self._draws: dict[int, np.random.Generator] = {}

    def chance(self, problem: int, better: float, worse: float) -> float:
        """P(better ≻ worse), or 1 or 0 drawn by it."""
        probability = 1 / (1 + math.exp(-self._settings.bradley_terry_beta * (better - worse)))
        if not self._settings.bradley_terry_sampling:
            return probability
        seed = [self._settings.seed, self._round, problem, 1]  # not that of the problem's cuts
        return float(self._draws.setdefault(problem, np.random.default_rng(seed)).random() < probability)


def row_of(found: Continuations, group: int, label: float, index: int = 0) -> LabelledRow:
    return LabelledRow(
        problem=found.cut.problem,
        group=group,
        prompt=found.prompt,
        prefix=found.cut.prefix,
        continuation=found.completions[index],
        label=label,
    )


def rows_of(continuations: Sequence[Continuations], labels: Iterable[Sequence[float]]) -> list[LabelledRow]:
    """A row a continuation, in groups of one cut."""
    found = enumerate(zip(continuations, labels, strict=True))
    return [row_of(one, group, label, index) for group, (one, own) in found for index, label in enumerate(own)]


def varied(rows: Sequence[LabelledRow], values: Sequence[LabelledRow] | None = None) -> Rows:
    """The rows of prompts whose completions differ in their value. The other prompts are dropped and counted.

    Args:
        values: rows whose labels are the values; by default those of `rows`.
    """
    of_prompt: dict[tuple[int, ...], set[float]] = {}
    for row in rows if values is None else values:
        of_prompt.setdefault(row.prompt, set()).add(row.label)
    kept = [row for row in rows if len(of_prompt[row.prompt]) > 1]
    single = sum(len(found) == 1 for found in of_prompt.values())
    return some(kept, dropped=single, of=len(of_prompt), what="problem")


def best_and_worst(continuations: Sequence[Continuations], settings: PreferenceSettings, round_number: int = 1) -> Rows:
    """A pair of each cut's best and worst continuation, as `preferred_pairs` draws it."""
    values = [preferable(found, settings) for found in continuations]
    return preferred_pairs(Rows(tuple(rows_of(continuations, values))), settings, round_number)


def preferred_pairs(rows: Rows, settings: PreferenceSettings, round_number: int = 1) -> Rows:
    """A pair of the best and the worst row of each group, by their labels. Which one is chosen goes by `Preferences`.

    Groups of equal labels are dropped and counted.
    """
    preferences = Preferences(settings, round_number)
    items: list[LabelledRow] = []
    groups = rows.groups()
    for group in groups:
        chosen, rejected = (among(group, key=lambda row: row.label) for among in (max, min))
        if chosen.label == rejected.label:
            continue
        if preferences.chance(chosen.problem, chosen.label, rejected.label) < 0.5:
            chosen, rejected = rejected, chosen
        number = len(items) // 2
        items += [replace(chosen, group=number, label=1.0), replace(rejected, group=number, label=0.0)]
    return some(items, dropped=len(groups) - len(items) // 2, of=len(groups), what="pair")


def some(items: Sequence[LabelledRow], *, dropped: int, of: int, what: str) -> Rows:
    """The rows that are left; `UsageError` where none is."""
    if not items:
        raise UsageError(
            f"nothing to learn: each of the {counted(of, what)} has one reward; take problems that the reference "
            "solves sometimes, more of them, or more samples of each (samples_per_example)."
        )
    if dropped:
        logger.info("{} of {} left out: all of its rewards are equal.", dropped, counted(of, what))
    return Rows(tuple(items), dropped)
