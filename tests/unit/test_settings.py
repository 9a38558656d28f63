"""Settings: their flags, and how much of the archive of used groups stays."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from async_grpo.errors import UsageError
from async_grpo.settings import ArchiveLimit, TrainingSettings, etas, name, share


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("10000", ArchiveLimit(10000)),
        ("0", ArchiveLimit(0)),
        ("2GB", ArchiveLimit(2 * 10**9, in_bytes=True)),
        (" 500 mb ", ArchiveLimit(500 * 10**6, in_bytes=True)),
    ],
)
def test_a_limit_is_read_and_passed_on_as_it_is(text: str, limit: ArchiveLimit) -> None:
    assert ArchiveLimit.parse(text) == limit
    assert ArchiveLimit.parse(str(limit)) == limit


@pytest.mark.parametrize("text", ["", "-1", "1.5GB", "GB", "2 gigabytes", "2GiB"])
def test_no_limit(text: str) -> None:
    with pytest.raises(UsageError, match="--keep-done must be a number of groups or a size"):
        ArchiveLimit.parse(text)


def test_a_size_keeps_the_newest_groups_that_fit(tmp_path: Path) -> None:
    for number in range(6):
        folder = tmp_path / f"{number // 3:05d}"
        folder.mkdir(exist_ok=True)
        (folder / f"{number:010d}.a00_complete").write_bytes(bytes(1000))
    kept = {size: ArchiveLimit(size, in_bytes=True).groups(tmp_path) for size in (0, 999, 2000, 2999, 10**9)}
    assert kept == {0: 0, 999: 0, 2000: 2, 2999: 2, 10**9: 6}


def test_a_size_holds_for_evaluations_and_training_together(tmp_path: Path) -> None:
    for number, size in ((0, 4000), (1, 4000), (9_000_000_000, 100), (9_000_000_001, 100), (9_000_000_002, 100)):
        folder = tmp_path / f"{number // 1000:07d}"
        folder.mkdir(exist_ok=True)
        (folder / f"{number:010d}.a00_complete").write_bytes(bytes(size))
    kept = {size: ArchiveLimit(size, in_bytes=True).groups(tmp_path) for size in (99, 4100, 8200, 8300)}
    assert kept == {99: 0, 4100: 1, 8200: 2, 8300: 3}


@pytest.mark.parametrize("text", ["", " ", "-x", " -x", "a\x1b[31m", "a\nb"])
def test_what_is_no_name(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="must be a name"):
        name(text)


def test_strengths_of_guidance_are_over_zero_each_once() -> None:
    assert etas("0.1, 2,off") == (0.1, 2.0, "off")
    said = "must be over 0, in units of the reward, got .*; off is no guidance"
    for text in ("0", "-1", "nan", "inf", "", "x"):
        with pytest.raises(ArgumentTypeError, match=said):
            etas(text)
    with pytest.raises(ArgumentTypeError, match="names a strength twice"):
        etas("0.1,0.10")


def test_the_k_of_an_evaluation_fit_its_completions() -> None:
    assert TrainingSettings(eval_replicates=5).evaluated_ks() == (1, 5)
    assert TrainingSettings(eval_replicates=1).evaluated_ks() == (1,)
    assert TrainingSettings(eval_replicates=4, eval_k=(1, 4)).evaluated_ks() == (1, 4)
    with pytest.raises(UsageError, match="--eval-k 10 needs at least as many completions of each problem"):
        TrainingSettings(eval_replicates=5, eval_k=(1, 10)).evaluated_ks()


@pytest.mark.parametrize("text", ["-0.1", "1.5", "nan", "inf", "0", "x"])
def test_a_share_is_over_0_and_at_most_1(text: str) -> None:
    with pytest.raises(ArgumentTypeError):
        share(text)
