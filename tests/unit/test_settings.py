"""Settings: their flags, and how much of the archive of used groups stays."""

from __future__ import annotations

from argparse import ArgumentTypeError
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from async_grpo.cli import options
from async_grpo.cli.compute import server, worker
from async_grpo.errors import UsageError
from async_grpo.settings import ArchiveLimit, TrainingSettings, WorkerSettings, as_flags, etas, name, share


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


OTHER_TRAINING = TrainingSettings(
    steps=3,
    seed=7,
    set={"learning_rate": "1e-5", "output_dir": "a, b=c"},
    max_staleness=0,
    run_name="warm start",
    run_group="seeds",
    run_tags=("a", "b c"),
    correction="tis",
    correction_level="sequence",
    correction_min=0.5,
    correction_max=3.0,
    padding="trl",
    accept_mismatch=True,
    choose_prompts=True,
    filter_zero_variance=True,
    train_of_group=4,
    weights="host",
    deterministic=True,
    max_attempts=5,
    keep_done=ArchiveLimit(2 * 10**9, in_bytes=True),
    eval_every=7,
    no_eval_first=True,
    eval_replicates=16,
    eval_k=(2, 16),
    eval_temperature=0.0,
    eval_top_p=1.0,
    eval_top_k=0,
    publish_dtype="bf16",
    delta_every=2,
    delta_keep=20,
    delta_dir="/runs/deltas",
    resume=True,
    stall_warning=1.5,
)
OTHER_WORK = WorkerSettings(
    groups_per_claim=2,
    score_concurrency=1,
    score_alone=True,
    tool_timeout=2.5,
    stall_warning=0.5,
    generator="hf",
    in_flight_update="on",
    server_devices="1,2",
    server_timeout=60.0,
)


def parsed(settings: TrainingSettings | WorkerSettings) -> TrainingSettings | WorkerSettings:
    flags = [text for field in fields(settings) for text in as_flags(field.name, getattr(settings, field.name))]
    if isinstance(settings, TrainingSettings):
        return options.gathered(TrainingSettings, server.build_parser().parse_args(flags))
    return options.gathered(WorkerSettings, worker.build_parser().parse_args(flags))


@pytest.mark.parametrize("changed", [OTHER_TRAINING, OTHER_WORK])
def test_the_flags_of_settings_are_read_back_as_the_same_settings(changed: Any) -> None:
    default = type(changed)()
    assert parsed(default) == default
    assert parsed(changed) == changed
    for field in fields(changed):
        value = getattr(changed, field.name)
        assert value != field.default, f"{field.name} is not tried"
        one = replace(default, **{field.name: value})
        assert parsed(one) == one


def test_strengths_of_guidance_are_over_zero_each_once() -> None:
    assert etas("0.1, 2,off") == (0.1, 2.0, "off")
    for text in ("0", "-1", "nan", "inf", "", "x"):
        with pytest.raises(
            ArgumentTypeError, match=r"must be over 0, in units of the reward, got .*; off is no guidance"
        ):
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
