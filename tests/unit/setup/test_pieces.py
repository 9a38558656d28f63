"""Pieces of padded rows: how they are divided, what a model is given of them, and what is put back."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
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
    """One process, which may hear of others' rows and pieces, or of a trial that came out otherwise there."""

    mixed_precision, is_main_process = "no", True

    def __init__(self, *others: list[int], disagrees: bool = False) -> None:
        self.num_processes, self._others, self._disagrees = 1 + len(others), others, disagrees

    def unwrap_model(self, model: Any, **_: Any) -> Any:
        return model

    def gather(self, own: Tensor) -> Tensor:
        if own.is_floating_point():  # of the trial
            return torch.cat([own, own + self._disagrees])
        return torch.cat([own, *(torch.tensor([other]) for other in self._others)])


class Model(nn.Module):
    """Says of each token a number that its row and its position decide: by what is there, by columns, or by length."""

    rounds = 0.0  # what is added to all where one has padding

    def __init__(self, kind: str = "relative") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.kind = kind
        self.seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def forward(self, ids: Tensor, mask: Tensor, asked: Tensor, keep: int) -> tuple[Tensor, None]:
        self.seen.append((ids, mask, asked))
        position = torch.arange(ids.shape[1]).expand_as(ids) if self.kind == "absolute" else mask.cumsum(1)
        told = (ids * mask).cumsum(1) + 0.1 * position + self.rounds * (not mask.all())
        if self.kind == "bidirectional":
            told = told + (ids * mask).sum(1, keepdim=True)
        if self.kind == "by length":
            told = told + ids.shape[1]
        return ((told * self.weight * asked)[:, -keep:], None)


def batch(lengths: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor, int]:
    """Rows of a prompt and a completion of these lengths, with other ids in each row: ids, mask, columns to keep."""
    prompt, keep = max(p for p, _ in lengths), max(c for _, c in lengths)
    ids, mask = (torch.full((len(lengths), prompt + keep), fill) for fill in (PAD, 0))
    for row, (before, behind) in enumerate(lengths):
        there = slice(prompt - before, prompt + behind)
        ids[row, there], mask[row, there] = row + 1, 1
    return ids, mask, keep


LENGTHS = [(2, 9), (5, 1), (3, 30), (1, 2), (4, 10), (2, 28), (5, 3), (3, 1)]
TRIAL = 5  # passes


class InPieces:
    """A pass in pieces, which gives each row what it gets alone; and what the model has seen behind the trial."""

    def __init__(self, lengths: Any = LENGTHS, model: Any = None, accelerator: Any = None, **more: Any) -> None:
        self.ids, self.mask, self.keep = batch(lengths) if isinstance(lengths, list) else lengths
        self.model = model or Model()
        made = Pieces(accelerator or Accelerator(), more.pop("multiple", 1))
        (self.said, nothing), self.computed = made(self.model, self.model, self.ids, self.mask, self.keep, **more)
        self.plain = Model(self.model.kind)
        whole = self.plain(self.ids, self.mask, self.mask, self.keep)[0]
        assert nothing is None and torch.equal(self.said, whole)
        self.pieces = [(ids, ids != PAD) for ids, _, _ in self.model.seen[TRIAL:]]
        self.all_computed = self.computed == self.ids.numel()


def test_each_row_gets_what_it_gets_alone_and_less_is_computed() -> None:
    done = InPieces()
    assert done.mask.sum() <= done.computed <= 1.15 * done.mask.sum() < done.ids.numel()


def test_each_row_begins_at_the_first_column_of_its_piece_and_the_longest_ends_at_the_last() -> None:
    rows = []
    for given, there in InPieces().pieces:
        assert there[:, 0].all() and there[:, -1].any() and torch.equal(there, there.cummin(1).values)
        rows += [int(row[0]) for row in given]
        assert torch.equal(given, given[:, :1].where(there, PAD))
    assert sorted(rows) == [*range(1, 1 + len(LENGTHS))], "each row is in one piece"


def test_gradients_go_to_every_row() -> None:
    done = InPieces()
    weights = torch.arange(done.said.numel()).view_as(done.said)
    (done.said * weights).sum().backward()
    (done.plain(done.ids, done.mask, done.mask, done.keep)[0] * weights).sum().backward()
    assert torch.equal(done.model.weight.grad, done.plain.weight.grad)


def test_a_model_is_asked_for_completions_only_and_attends_without_a_mask() -> None:
    done = InPieces()
    for ids, mask, asked in done.model.seen[TRIAL:]:
        assert mask.all()
        for row, wanted in zip(ids, asked, strict=True):
            prompt, completion = LENGTHS[int(row[0]) - 1]
            assert wanted.nonzero().flatten().tolist() == [*range(prompt, prompt + completion)]


@pytest.mark.parametrize(
    ("kind", "left", "right"),
    [
        ("relative", True, True),
        ("absolute", False, True),
        ("by length", False, False),
        ("bidirectional", False, True),
    ],
)
def test_a_trial_decides_which_padding_is_left_out(kind: str, left: bool, right: bool) -> None:
    done = InPieces(model=Model(kind).train())
    assert done.model.training
    for given, there in done.pieces:
        assert there[:, 0].all() or not left
        assert given.shape[1] >= done.ids.shape[1] - done.keep + 1 or left
    assert done.all_computed is not right
    for _, mask, _ in done.model.seen[TRIAL:]:
        assert mask.all() or not left


def test_a_mask_stays_where_no_kernel_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pieces, "_tried", lambda *_: subject._Padding(True, True, True, 0.0, 0.0, 1e9))
    for ids, mask, _ in InPieces().model.seen:
        assert torch.equal(mask.bool(), ids != PAD)


def test_rows_with_gaps_keep_their_columns_and_their_mask() -> None:
    ids, mask, keep = batch(LENGTHS)
    mask[4, -keep + 3] = 0
    done = InPieces((ids, mask, keep))
    assert not done.all_computed and not any(there.all() for _, there, _ in done.model.seen[TRIAL:])


@pytest.mark.parametrize(("kind", "left"), [("relative", True), ("absolute", False)])
def test_what_any_padding_rounds_is_no_reason_to_compute_it(kind: str, left: bool) -> None:
    accelerator, model = Accelerator(), Model(kind)
    accelerator.mixed_precision, model.rounds = "bf16", 0.2
    ids, mask, keep = batch(LENGTHS)
    Pieces(accelerator)(model, model, ids, mask, keep)
    assert all(given.shape[1] < ids.shape[1] for given, *_ in model.seen[TRIAL + 1 :])
    assert all((given[:, 0] != PAD).all() for given, *_ in model.seen[TRIAL:]) is left


def test_tf32_is_not_float32_by_whichever_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends, "fp32_precision", "tf32")
    assert not subject.multiplies_in_float32()


def test_the_trial_is_made_once_and_draws_nothing() -> None:
    ids, mask, keep = batch(LENGTHS)
    model, pieces = Model(), Pieces(Accelerator())
    state = torch.random.get_rng_state()
    for _ in range(3):
        pieces(model, model, ids, mask, keep)
    assert torch.equal(state, torch.random.get_rng_state())
    assert [given.shape for given, *_ in model.seen[:TRIAL]] == [(1, 16), (1, 24), (1, 24), (1, 24), (2, 16)]
    assert len(model.seen) == TRIAL + 3 * len(InPieces().pieces)


def test_a_rank_that_disagrees_decides_for_all() -> None:
    assert InPieces(accelerator=Accelerator(disagrees=True)).all_computed


@pytest.mark.parametrize("others", [[5, 8], [8, 8], [1, 8]])
def test_all_processes_take_as_many_pieces(others: list[int]) -> None:
    assert len(InPieces([(3, 7)] * 8, accelerator=Accelerator(others)).pieces) == others[0], "one piece would do"


def test_processes_with_other_numbers_of_rows_take_one_piece() -> None:
    ids, mask, keep = batch(LENGTHS)
    accelerator, model = Accelerator([3, 7]), Model()
    Pieces(accelerator)(model, model, ids, mask, keep)
    assert len(model.seen) - TRIAL == 1


@pytest.mark.parametrize("without_a_prompt", [False, True])
def test_rows_without_a_completion_a_prompt_or_anything(without_a_prompt: bool) -> None:
    ids, mask, keep = batch(LENGTHS)
    mask[1, -keep:] = 0  # truncated and masked
    if without_a_prompt:
        mask[2, :-keep] = 0
        mask[3] = 0
    done = InPieces((ids, mask, keep))
    assert all(given.shape[1] >= 2 for given, _ in done.pieces), "of the prompt and of the completion"
    assert all(told.all() for _, told, _ in done.model.seen[TRIAL:]) is not without_a_prompt


@pytest.mark.parametrize("lengths", [[(3, 7)], [(3, 7)] * 8])
def test_one_row_and_rows_of_one_length(lengths: list[tuple[int, int]]) -> None:
    done = InPieces(lengths)
    [given] = done.model.seen[TRIAL:]
    assert given[0] is done.ids and given[1] is given[2] is done.mask, "as they are, as TRL computes them"


def test_no_piece_is_larger_than_the_rows_that_trl_takes_at_a_time() -> None:
    done = InPieces([(3, 17)] * 12 + [(3, 2)] * 12, most_rows=4)
    assert max(given.numel() for given, _ in done.pieces) <= 4 * done.ids.shape[1]
    assert max(len(given) for given, _ in done.pieces) > 4, "of short rows it takes more"


def test_columns_are_multiples_for_compiled_models() -> None:
    done = InPieces([(40, 100), (3, 9), (20, 60), (1, 1)], multiple=64)
    assert {given.shape[1] for given, _ in done.pieces} <= {64, 128, done.ids.shape[1]}
    for ids, mask, _ in done.model.seen[TRIAL:]:  # positions may count no more than the rows have
        assert {*mask.sum(1).tolist()} == {int((ids != PAD).sum(1).max())}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic"},
        {"rope_type": "longrope", "original_max_position_embeddings": 20},
        {"sliding": {"rope_type": "default"}, "full": {"rope_type": "longrope"}},  # of layers
    ],
)
def test_rotary_positions_that_depend_on_the_length_of_a_batch_keep_long_ones_whole(rope: dict[str, Any]) -> None:
    model = Model()
    model.config = SimpleNamespace(max_position_embeddings=30, rope_parameters=rope)  # of 35 columns
    assert InPieces(model=model).all_computed
    model.config.max_position_embeddings = rope["original_max_position_embeddings"] = 35
    assert not InPieces(model=model).all_computed


def test_small_passes_are_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "CALLS", 1000.0)
    done = InPieces()
    assert done.all_computed and len(done.pieces) == 1
    assert InPieces([(3, 9), (30, 300)]).model.seen[-1][1].all(), "of long rows, attention would read the mask"


def test_a_gpu_begins_no_pass_that_is_shorter_than_its_launches() -> None:
    class Sized(nn.Module):
        def __init__(self, numbers: float) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(int(numbers), device="meta"))

    sizes = {numbers: subject.cost_of_a_pass(Sized(numbers), torch.device("cuda"))[0] for numbers in (1e6, 6e8, 7e9)}
    assert sizes[1e6] == 4096 and 4000 < sizes[6e8] <= 4096 and 300 < sizes[7e9] < 400
    rows = [1000] * 4 + [200] * 30  # 10,000 tokens of 34,000
    assert len(divide(rows, smallest=4096, each=512, most=10**9)) == 2
    assert len(divide(rows, smallest=10**5, each=512, most=10**9)) == 1


def fewest(rows: list[int], smallest: int, each: float) -> float:
    """By trying every division of the sorted rows."""
    order = sorted(rows)

    def cost(part: list[int]) -> float:
        return max(smallest, len(part) * max(part)) + each

    sums = []
    for chosen in range(1 << (len(rows) - 1)):
        cuts = [0, *(cut + 1 for cut in range(len(rows) - 1) if chosen >> cut & 1), len(rows)]
        sums.append(sum(cost(order[start:stop]) for start, stop in pairwise(cuts)))
    return min(sums)


@pytest.mark.parametrize(("smallest", "each"), [(0, 0), (0, 20), (40, 5)])
@pytest.mark.parametrize("seed", range(5))
def test_the_division_is_the_best_of_sorted_rows(seed: int, smallest: int, each: float) -> None:
    chance = random.Random(seed)
    rows = [chance.randint(2, 70) for _ in range(9)]
    made = divide(rows, smallest=smallest, each=each, most=10**9)
    each += subject.WORTH * sum(rows)
    assert sum(max(smallest, len(piece.rows) * piece.columns) + each for piece in made) == pytest.approx(
        fewest(rows, smallest, each)
    )
    assert sorted(row for piece in made for row in piece.rows) == [*range(9)]


def test_thousands_of_rows_are_divided_at_once() -> None:
    chance = random.Random(0)
    rows = [chance.randint(1, 500) for _ in range(3000)]
    made = divide(rows, smallest=0, each=0, most=10**9)
    assert sum(len(piece.rows) * piece.columns for piece in made) <= 1.15 * sum(rows)
    assert len(made) < 100


def test_more_pieces_than_rows_there_are_not() -> None:
    rows = [5, 3, 4]
    made = divided_further(divide(rows, smallest=0, each=0, most=100), rows, 7)
    assert sorted(piece.rows[0] for piece in made) == [0, 1, 2] and len(made) == 3
    assert {piece.columns for piece in made} == set(rows)


def test_spans_have_a_column_of_the_prompt_and_one_of_the_completion() -> None:
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 0, 0], [1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [0, 0, 0, 1, 1]])
    starts, stops, gaps = spans(mask, 2)
    assert list(zip(starts.tolist(), stops.tolist())) == [(1, 4), (0, 4), (0, 4), (2, 4), (2, 5)]
    assert gaps.tolist() == [False, False, True, True, True]
