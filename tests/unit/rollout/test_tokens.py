"""Tokens with their columns, and the transcript of a completion."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from async_grpo.rollout.held_data import PATIENCE, Numberless
from async_grpo.tokens import NO_VERSION, Tokens, as_tokens, ids_and_logprobs
from async_grpo.tokens.transcript import TokenLimits, Transcript


def sampled(*ids: int, version: int = NO_VERSION) -> Tokens:
    count = len(ids)
    return Tokens(list(ids), [-1.0] * count, versions=[version] * count, kept=[bytes([token]) for token in ids])


def columns(tokens: Tokens) -> list[list[object]]:
    return [getattr(tokens, each.name) for each in fields(tokens)]


def test_every_column_is_cut_and_joined_with_the_others() -> None:
    tokens = sampled(1, 2, 3, version=4) + Tokens([5])
    assert tokens[1:] == sampled(2, 3, version=4) + Tokens([5])
    assert columns(tokens[2:]) == [[3, 5], [-1.0, 0.0], [1, 1], [4, NO_VERSION], [b"\x03", b""]]
    assert len(tokens[:0]) == 0 and not tokens[:0]


def test_a_sum_leaves_its_parts_as_they_were() -> None:
    first = sampled(1)
    whole = first + sampled(2)
    whole.extend(sampled(3))
    assert first == sampled(1) and whole == sampled(1, 2, 3)


def test_what_was_sampled_is_noted_at_its_index_and_no_more_than_is_left_of_it() -> None:
    completion = Tokens([1, 9, 2, 3], [-0.5] * 4, [1, 0, 1, 1])
    noted = completion.noted(0, sampled(1, version=4)).noted(2, sampled(2, 3, 8, version=5))
    assert columns(noted) == [
        [1, 9, 2, 3],
        [-0.5] * 4,
        [1, 0, 1, 1],
        [4, NO_VERSION, 5, 5],
        [b"\x01", b"", b"\x02", b"\x03"],
    ]
    assert noted.of_version(4).versions == [4, 4, 5, 5]
    assert noted.names_versions and noted.names_kept and not (completion.names_versions or completion.names_kept)


def test_lists_of_trl_become_tokens_and_back() -> None:
    tokens = as_tokens([[1, 2], [3]], [[-1.0, -2.0], [-3.0]], [[1, 0], [1]])
    assert [each.mask for each in tokens] == [[1, 0], [1]]
    assert ids_and_logprobs(tokens) == ([[1, 2], [3]], [[-1.0, -2.0], [-3.0]])
    ids_and_logprobs(tokens)[0][0].append(7)
    assert tokens[0].ids == [1, 2], "TRL cuts its lists in place"
    with pytest.raises(ValueError, match="shorter"):
        as_tokens([[1], [2]], [[-1.0]])


def test_a_transcript_has_what_was_read_between_two_turns() -> None:
    transcript = Transcript([7, 8])
    transcript.write(sampled(1, 2, version=4))
    transcript.read([9])
    transcript.write(sampled(3, version=5))
    assert transcript.whole == [7, 8, 1, 2, 9, 3] and transcript.turns == 2
    tokens = transcript.tokens
    assert tokens.mask == [1, 1, 0, 1]
    assert tokens.versions == [4, 4, 4, 5], "nobody sampled the token of the tool: it has that of the turn before"
    assert tokens.logprobs == [-1.0, -1.0, 0.0, -1.0] and tokens.kept[2] == b""


@pytest.mark.parametrize(("completion", "sequence", "left"), [(10, 100, 5), (100, 9, 2), (100, 7, 0), (4, 100, -1)])
def test_the_model_has_the_tokens_that_the_completion_and_the_sequence_leave(
    completion: int, sequence: int, left: int
) -> None:
    transcript = Transcript([7, 8])
    transcript.write(sampled(1, 2, 3))
    assert transcript.tokens_left(TokenLimits(completion=completion, sequence=sequence), unread=[9, 9]) == left


# --- Reward functions that give nothing but NaN: -----------------------------------------------------------------

NAN = float("nan")


def test_a_function_that_is_the_only_one_is_warned_of_at_once_and_once(warnings: list[str]) -> None:
    numberless = Numberless()
    for _ in range(PATIENCE + 1):
        numberless.saw(["right"], torch.tensor([[NAN], [NAN]]), groups=1)
    assert len(warnings) == 1
    assert "the reward function right gave no number, only NaN or None, for any of 2 completions" in warnings[0]
    assert "nothing is learnt from them" in warnings[0]


def test_each_function_has_its_own_warning_when_some_groups_had_none_of_it(warnings: list[str]) -> None:
    numberless = Numberless()
    for seq in range(PATIENCE):
        assert len(warnings) == 0, f"before group {seq}"
        numberless.saw(["right", "form", "form"], torch.tensor([[NAN, 1.0, NAN]]), groups=1)
    assert [line.partition(" gave")[0].split(maxsplit=3)[3] for line in warnings] == ["right", "form (2)"]
    assert f"any of {PATIENCE} completions so far: it has no part in the reward" in warnings[0]


def test_a_function_that_is_for_some_rows_only_is_not_warned_of(warnings: list[str]) -> None:
    numberless = Numberless()
    numberless.saw(["sums", "words"], torch.tensor([[NAN, 1.0]]), groups=1)
    numberless.saw(["sums", "words"], torch.tensor([[0.5, NAN]]), groups=1)
    for _ in range(PATIENCE):
        numberless.saw(["sums", "words"], torch.tensor([[NAN, 1.0]]), groups=1)
    assert warnings == []
