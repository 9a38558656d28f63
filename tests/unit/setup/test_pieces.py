"""Pieces of padded rows: how they are divided, what a model is given of them, and what is put back."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from async_grpo.setup import pieces as subject
from async_grpo.setup.pieces import Pieces, divide, divided_further, spans

DEADLINE_S = 120
PAD = 99


@pytest.fixture(autouse=True)
def every_piece_is_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "CALLS", 0.0)


class Accelerator:
    """One process, which may hear of others."""

    device, mixed_precision, is_main_process = torch.device("cpu"), "no", True

    def __init__(self, *others: list[int]) -> None:
        self.num_processes, self._others = 1 + len(others), others

    def unwrap_model(self, model: Any, **_: Any) -> Any:
        return model

    def gather(self, own: Tensor) -> Tensor:
        if own.is_floating_point():  # of the trial, on which all agree
            return own
        return torch.cat([own, *(torch.tensor([other]) for other in self._others)])


class Model(nn.Module):
    """Says of each token a number that its row and its position decide: by what is there, by columns, or by length."""

    def __init__(self, kind: str = "relative") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.kind = kind
        self.seen: list[tuple[Tensor, Tensor]] = []

    def forward(self, ids: Tensor, mask: Tensor, keep: int) -> tuple[Tensor, None]:
        self.seen.append((ids, mask))
        position = mask.cumsum(1) if self.kind == "relative" else torch.arange(ids.shape[1]).expand_as(ids)
        told = (ids * mask).cumsum(1) + 0.1 * position
        if self.kind == "bidirectional":
            told = told + ids.shape[1]
        return ((told * self.weight * mask)[:, -keep:], None)


def batch(lengths: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor, int]:
    """Rows of a prompt and a completion of these lengths, with other ids in each row: ids, mask, columns to keep."""
    prompt, keep = max(p for p, _ in lengths), max(c for _, c in lengths)
    ids, mask = (torch.full((len(lengths), prompt + keep), fill) for fill in (PAD, 0))
    for row, (before, behind) in enumerate(lengths):
        there = slice(prompt - before, prompt + behind)
        ids[row, there], mask[row, there] = row + 1, 1
    return ids, mask, keep


LENGTHS = [(2, 9), (5, 1), (3, 30), (1, 2), (4, 10), (2, 28), (5, 3), (3, 1)]


def test_each_row_gets_what_it_gets_alone_and_less_is_computed() -> None:
    ids, mask, keep = batch(LENGTHS)
    model = Model()
    (said, nothing), computed = Pieces(Accelerator())(model, model, ids, mask, keep)
    whole, _ = Model()(ids, mask, keep)
    assert nothing is None and torch.equal(said, whole)
    assert mask.sum() <= computed <= 1.15 * mask.sum() < ids.numel()


def test_no_piece_has_a_column_of_a_row_that_is_not_in_it() -> None:
    ids, mask, keep = batch(LENGTHS)
    model = Model()
    Pieces(Accelerator())(model, model, ids, mask, keep)
    pieces = model.seen[3:]  # behind the trial
    rows = [int(row[seen.bool()][0]) for given, there in pieces for row, seen in zip(given, there)]
    assert sorted(rows) == [*range(1, 1 + len(LENGTHS))], "each row is in one piece"
    for given, there in pieces:
        assert there[:, 0].any() and there[:, -1].any(), "a column that is padding in each row was computed"
        for row, seen in zip(given, there):
            assert set(row[seen.bool()].tolist()) == {int(row[seen.bool()][0])} and set(row[seen == 0].tolist()) <= {
                PAD
            }


def test_gradients_go_to_every_row() -> None:
    ids, mask, keep = batch(LENGTHS)
    model, plain = Model(), Model()
    (said, _), _ = Pieces(Accelerator())(model, model, ids, mask, keep)
    weights = torch.arange(said.numel()).view_as(said)
    (said * weights).sum().backward()
    (plain(ids, mask, keep)[0] * weights).sum().backward()
    assert torch.equal(model.weight.grad, plain.weight.grad)


@pytest.mark.parametrize(
    ("kind", "left", "right"),
    [("relative", True, True), ("absolute", False, True), ("bidirectional", False, False)],
)
def test_a_trial_decides_which_padding_is_left_out(kind: str, left: bool, right: bool) -> None:
    ids, mask, keep = batch(LENGTHS)
    model = Model(kind)
    model.train()
    (said, _), computed = Pieces(Accelerator())(model, model, ids, mask, keep)
    assert model.training and torch.equal(said, Model(kind)(ids, mask, keep)[0])
    for given, there in model.seen[3:]:
        assert there[:, 0].any() or not left
        assert given.shape[1] >= ids.shape[1] - keep + 1 or left
    assert (computed < ids.numel()) is right


def test_the_trial_is_made_once_and_draws_nothing() -> None:
    ids, mask, keep = batch(LENGTHS)
    model, pieces = Model(), Pieces(Accelerator())
    state = torch.random.get_rng_state()
    for _ in range(3):
        pieces(model, model, ids, mask, keep)
    assert torch.equal(state, torch.random.get_rng_state())
    assert sum(len(given) == 1 and given.shape[1] in (16, 24) for given, _ in model.seen[:3]) == 3
    assert len(model.seen) == 3 + 3 * (len(model.seen) - 3) // 3


def test_a_rank_that_disagrees_decides_for_all() -> None:
    ids, mask, keep = batch(LENGTHS)

    class Disagreeing(Accelerator):
        def gather(self, own: Tensor) -> Tensor:
            return torch.cat([own, own + 1.0 if own.is_floating_point() else own])

    model, accelerator = Model(), Disagreeing()
    _, computed = Pieces(accelerator)(model, model, ids, mask, keep)
    assert computed == ids.numel()


@pytest.mark.parametrize("others", [[5, 8], [8, 8], [1, 8]])
def test_all_processes_take_as_many_pieces(others: list[int]) -> None:
    ids, mask, keep = batch([(3, 7)] * 8)  # one piece would do
    accelerator, model = Accelerator(others), Model()
    (said, _), _ = Pieces(accelerator)(model, model, ids, mask, keep)
    assert len(model.seen) - 3 == others[0]
    assert torch.equal(said, Model()(ids, mask, keep)[0])


def test_processes_with_other_numbers_of_rows_take_one_piece() -> None:
    ids, mask, keep = batch(LENGTHS)
    accelerator, model = Accelerator([3, 7]), Model()
    Pieces(accelerator)(model, model, ids, mask, keep)
    assert len(model.seen) - 3 == 1


def test_rows_without_a_completion_a_prompt_or_anything() -> None:
    ids, mask, keep = batch(LENGTHS)
    mask[1, -keep:] = 0  # truncated and masked
    mask[2, :-keep] = 0
    mask[3] = 0
    model = Model()
    (said, _), _ = Pieces(Accelerator())(model, model, ids, mask, keep)
    assert torch.equal(said, Model()(ids, mask, keep)[0])
    assert all(there.shape[1] >= 2 for _, there in model.seen), "of the prompt and of the completion"


def test_one_row_and_rows_of_one_length() -> None:
    for lengths in ([(3, 7)], [(3, 7)] * 8):
        ids, mask, keep = batch(lengths)
        model = Model()
        (said, _), computed = Pieces(Accelerator())(model, model, ids, mask, keep)
        given, there = model.seen[3]
        assert len(model.seen) == 4 and computed == ids.numel(), "one piece, as TRL computes it"
        assert given is ids and there is mask, "as they are"
        assert torch.equal(said, Model()(ids, mask, keep)[0])


def test_no_piece_is_larger_than_the_rows_that_trl_takes_at_a_time() -> None:
    ids, mask, keep = batch([(3, 17)] * 12 + [(3, 2)] * 12)
    model = Model()
    Pieces(Accelerator())(model, model, ids, mask, keep, 4)
    assert max(given.numel() for given, _ in model.seen[3:]) <= 4 * ids.shape[1]
    assert max(len(given) for given, _ in model.seen[3:]) > 4, "of short rows it takes more"


def test_columns_are_multiples_for_compiled_models() -> None:
    ids, mask, keep = batch([(40, 100), (3, 9), (20, 60), (1, 1)])
    model = Model()
    (said, _), _ = Pieces(Accelerator(), 64)(model, model, ids, mask, keep)
    assert {given.shape[1] for given, _ in model.seen[3:]} <= {64, 128, ids.shape[1]}
    assert torch.equal(said, Model()(ids, mask, keep)[0])


def test_rotary_positions_that_depend_on_the_length_of_a_batch_keep_long_ones_whole() -> None:
    class Config:
        max_position_embeddings = 30

        def __init__(self, **rope: Any) -> None:
            self.rope_parameters = rope

    of_layers = {"sliding": {"rope_type": "default"}, "full": {"rope_type": "longrope"}}
    for rope in (
        {"rope_type": "dynamic"},
        {"rope_type": "longrope", "original_max_position_embeddings": 20},
        of_layers,
    ):
        ids, mask, keep = batch(LENGTHS)  # 35 columns
        model = Model()
        model.config = Config(**rope)
        assert Pieces(Accelerator())(model, model, ids, mask, keep)[1] == ids.numel()
        model.config.max_position_embeddings = model.config.rope_parameters["original_max_position_embeddings"] = 35
        assert Pieces(Accelerator())(model, model, ids, mask, keep)[1] < ids.numel()


def test_small_passes_are_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "CALLS", 1000.0)
    ids, mask, keep = batch(LENGTHS)
    model = Model()
    assert Pieces(Accelerator())(model, model, ids, mask, keep)[1] == ids.numel()
    assert len(model.seen) == 4


def test_a_gpu_begins_no_pass_that_is_shorter_than_its_launches() -> None:
    class Sized(nn.Module):
        def __init__(self, numbers: float) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(int(numbers), device="meta"))

    sizes = {numbers: subject.cost_of_a_pass(Sized(numbers), torch.device("cuda"))[0] for numbers in (1e6, 6e8, 7e9)}
    assert sizes[1e6] == 4096 and 4000 < sizes[6e8] <= 4096 and 300 < sizes[7e9] < 400
    rows = [(0, 1000)] * 4 + [(0, 200)] * 30  # 10,000 tokens of 34,000
    assert len(divide(rows, smallest=4096, each=512, most=10**9)) == 2
    assert len(divide(rows, smallest=10**5, each=512, most=10**9)) == 1


def fewest(rows: list[tuple[int, int]], smallest: int, each: float) -> float:
    """By trying every division of the sorted rows."""
    order = sorted(rows, key=lambda row: row[0] - row[1])

    def cost(part: list[tuple[int, int]]) -> float:
        return max(smallest, len(part) * (max(stop for _, stop in part) - min(start for start, _ in part))) + each

    sums = []
    for chosen in range(1 << (len(rows) - 1)):
        cuts = [0, *(cut + 1 for cut in range(len(rows) - 1) if chosen >> cut & 1), len(rows)]
        sums.append(sum(cost(order[start:stop]) for start, stop in pairwise(cuts)))
    return min(sums)


@pytest.mark.parametrize(("smallest", "each"), [(0, 0), (0, 20), (40, 5)])
@pytest.mark.parametrize("seed", range(5))
def test_the_division_is_the_best_of_sorted_rows(seed: int, smallest: int, each: float) -> None:
    chance = random.Random(seed)
    rows = [(10 - chance.randint(1, 10), 10 + chance.randint(1, 60)) for _ in range(9)]
    made = divide(rows, smallest=smallest, each=each, most=10**9)
    each += subject.WORTH * sum(stop - start for start, stop in rows)
    assert sum(max(smallest, piece.tokens) + each for piece in made) == pytest.approx(fewest(rows, smallest, each))
    assert sorted(row for piece in made for row in piece.rows) == [*range(9)]


def test_thousands_of_rows_are_divided_at_once() -> None:
    chance = random.Random(0)
    rows = [(0, chance.randint(1, 500)) for _ in range(3000)]
    made = divide(rows, smallest=0, each=0, most=10**9)
    assert sum(piece.tokens for piece in made) <= 1.15 * sum(stop for _, stop in rows)
    assert len(made) < 100


def test_more_pieces_than_rows_there_are_not() -> None:
    rows = [(0, 5), (0, 3), (1, 4)]
    made = divided_further(divide(rows, smallest=0, each=0, most=100), rows, 7)
    assert sorted(piece.rows[0] for piece in made) == [0, 1, 2] and len(made) == 3
    assert {(piece.start, piece.stop) for piece in made} == set(rows)


def test_spans_have_a_column_of_the_prompt_and_one_of_the_completion() -> None:
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 1, 1]])
    assert spans(mask, 2) == [(1, 4), (0, 4), (2, 4), (2, 5)]
