"""A whole run that reports to W&B and trackio, read from the files that their real clients write offline."""

from __future__ import annotations

import importlib
import json
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("wandb", reason="W&B is not installed here: `make test-trackers` makes an environment that has it")
pytest.importorskip("trackio", reason="trackio is not installed here: see above")

from async_grpo.evals.eval_ledger import read
from kit.runs import finish

BLOCK, HEADER = 32768, struct.Struct("<IHB")  # of LevelDB's log, which W&B writes: checksum, length, kind
WHOLE, FIRST, LAST = 1, 2, 4


def wandb_records(path: Path) -> Iterator[Any]:
    """The messages in a `.wandb` file, whose first 7 bytes name the format."""
    messages = importlib.import_module("wandb.proto.wandb_internal_pb2")
    data, at, message = path.read_bytes(), 7, b""
    while at + HEADER.size <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER.size:
            at += left
            continue
        _, length, kind = HEADER.unpack_from(data, at)
        at += HEADER.size
        message = data[at : at + length] if kind in (WHOLE, FIRST) else message + data[at : at + length]
        at += length
        if kind in (WHOLE, LAST):
            yield messages.Record.FromString(message)


def in_wandb(folder: Path) -> tuple[Any, list[dict[str, float]]]:
    """The run, and what was logged entry by entry."""
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    run: Any = None
    history = []
    for record in wandb_records(path):
        if record.WhichOneof("record_type") == "run":
            run = record.run
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            history.append({name: json.loads(value) for name, value in items.items()})
    return run, history


def in_trackio(folder: Path) -> tuple[dict[str, Any], list[dict[str, float]]]:
    database = sqlite3.connect(folder / "huggingface.db")
    ((config,),) = database.execute("SELECT config FROM configs WHERE run_name = 'warm start'")
    metrics = database.execute("SELECT metrics FROM metrics ORDER BY id")
    return json.loads(config), [json.loads(entry) for (entry,) in metrics]


def test_the_files_of_the_real_clients_have_every_evaluation_and_the_names_of_the_run(tmp_path: Path) -> None:
    named = ("--run-name", "warm start", "--run-group", "seeds", "--run-tags", "small,first try")
    finish(
        tmp_path,
        *("--distributed", "-n", "1"),
        *("--max-staleness", "1"),  # training waits at version 2 for the evaluation of 0, so that of 3 is not skipped
        *("--eval-every", "3", "--eval-replicates", "2", *named),
        TEST_EVAL="3",  # fewer than a batch
        TEST_STEPS="6",
        TEST_GRPO='{"report_to": ["wandb", "trackio"]}',
        WANDB_MODE="offline",
        TRACKIO_DIR=str(tmp_path / "trackio"),
    )
    run, in_wandbs_file = in_wandb(tmp_path)
    assert (run.display_name, run.run_group, list(run.tags)) == ("warm start", "seeds", ["small", "first try"])
    config, in_trackios_file = in_trackio(tmp_path / "trackio")
    assert (config["run_name"], config["_Group"], config["tags"]) == ("warm start", "seeds", ["small", "first try"])
    expected = {
        one.step: {f"eval/{name}": figure.value for name, figure in one.figures.items()}
        for one in read(tmp_path / "worker" / "evaluations.jsonl")
    }
    assert sorted(expected) == [0, 3, 6]
    for logged in (in_wandbs_file, in_trackios_file):
        found = {int(entry["eval/version"]): entry for entry in logged if "eval/version" in entry}
        assert sorted(found) == sorted(expected)
        for step, figures in expected.items():
            assert {name: found[step][name] for name in figures} == pytest.approx(figures)
        assert sum("train/loss" in entry for entry in logged) == 6, "and the training as ever"
