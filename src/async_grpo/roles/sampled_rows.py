"""Sampled groups as rows of token ids, in a folder that `datasets.load_from_disk` opens."""

from __future__ import annotations

import filecmp
import hashlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from async_grpo.archive.advantages import AdvantageRule
from async_grpo.errors import UsageError
from async_grpo.records import RolloutGroup
from async_grpo.rundir.files import room_for
from async_grpo.training.groups import rollout_output


class AnsweredRequest(NamedTuple):
    """A group, and where it belongs."""

    problem: int  # place of its row in the dataset
    wave: int
    request: int  # of those of its problem in its wave
    group: RolloutGroup


def write_rows(folder: Path, sampled: Sequence[AnsweredRequest], rule: AdvantageRule) -> None:
    """Write one row a completion, in the order of the dataset; the folder appears whole.

    Raises:
        DiskFullError: there is no room.
        UsageError: the folder exists and holds other rows.
    """
    from datasets import Dataset, Features, List, Value
    from datasets.utils.logging import disable_progress_bar

    disable_progress_bar()
    features = Features(
        {
            "problem": Value("int32"),
            "wave": Value("int32"),
            "request": Value("int32"),
            "sample": Value("int32"),
            "prompt_ids": List(Value("int32")),
            "completion_ids": List(Value("int32")),
            "completion_mask": List(Value("int8")),
            "reward": Value("float32"),
            "rewards": List(Value("float32")),
        }
    )
    rows = [row for one in sorted(sampled, key=lambda one: one[:3]) for row in _rows(one, rule)]
    part = folder.with_name(f".{folder.name}.{uuid4().hex}")
    try:
        with room_for(folder):
            found = Dataset.from_list(rows, features=features)
            Dataset(found.data, info=found.info, fingerprint=_fingerprint(found.data.table)).save_to_disk(part)
            if not folder.exists():
                part.replace(folder)
            elif not _holds_the_rows_of(part, folder):  # else this run wrote them, and was killed then
                raise UsageError(
                    f"{folder} has appeared since this generation began, and holds other rows. Move it away, then "
                    "continue with --resume: what is sampled is kept."
                )
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _fingerprint(table: Any) -> str:
    """The hash of what the table holds, where datasets would take a random one: the same rows are the same files."""
    digest = hashlib.sha256()
    for column in table.columns:
        for chunk in column.chunks:
            for buffer in filter(None, chunk.buffers()):
                digest.update(buffer)
    return digest.hexdigest()


def _holds_the_rows_of(part: Path, folder: Path) -> bool:
    names = [path.name for path in part.glob("*.arrow")]
    same, _, _ = filecmp.cmpfiles(part, folder, names, shallow=False)
    return same == names


def _rows(one: AnsweredRequest, rule: AdvantageRule) -> Iterator[dict[str, Any]]:
    group, written = one.group, rollout_output([one.group])
    totals, masks = rule.totals(group.rewards), group.masks()
    for sample in range(group.job.num_generations):
        yield {
            "problem": one.problem,
            "wave": one.wave,
            "request": one.request,
            "sample": sample,
            "prompt_ids": written["prompt_ids"][sample],
            "completion_ids": written["completion_ids"][sample],
            "completion_mask": masks[sample],
            "reward": totals[sample],
            "rewards": group.rewards[sample],
        }
