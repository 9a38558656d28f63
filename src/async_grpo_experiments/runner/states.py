"""What a stage leaves: a folder that appears whole, with a manifest. The state of a job is what lies there and holds.

An attempt writes into `data.partial-TOKEN/`, which is there before the attempt is submitted, with `attempt.json`: what
it is made of. At its end it hashes and syncs all files, writes `manifest.json` and renames the folder. Two attempts
never share a folder. What a next attempt may continue from is in `work/`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from async_grpo.errors import BadFileError, UsageError
from async_grpo.rundir.files import sync, write_json
from async_grpo.rundir.reading import open_plain, read_object
from async_grpo.rundir.shape import as_json, read_shaped, shaped
from async_grpo_experiments.runner.config import ExperimentConfig
from async_grpo_experiments.runner.graph import Stage, below, graph_of, keys_of
from async_grpo_experiments.slots.ledger import BLOCKED, FAILED, Record

MANIFEST, ATTEMPT, WORK = "manifest.json", "attempt.json", "work"
RAN_OUT = "out_of_memory"  # is in the folder of an attempt that was
_PARTIAL = ".partial-"
_MOST_DIFFERENCES = 5
NOT_STARTED = "NOT_STARTED"
_DONE = {"generate": "DATA_GENERATED", "train": "MODEL_TRAINED", "evaluate": "EVAL_COMPLETED"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeOf:
    """What decides what a stage leaves."""

    inputs: dict[str, str]  # digest of each stage that is needed, by name
    keys: dict[str, Any]  # part of the configuration, flat


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(MadeOf):
    """What a folder holds and what it was made of."""

    files: dict[str, str]  # hash of each file, by its path in the folder
    attempt: str


def begin(folder: Path, made_of: MadeOf) -> Path:
    """Make the folder of a new attempt, and return it. No process of an earlier attempt may live any more.

    It holds the `work/` of an earlier attempt at the same; of an attempt with other inputs or keys nothing is kept.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_of(folder, uuid4().hex[:12])
    for left in partials(folder):
        if partial.exists() or read_shaped(MadeOf, left / ATTEMPT) != made_of:
            shutil.rmtree(left)
            continue
        empty(left)
        left.rename(partial)
    partial.mkdir(mode=0o700, exist_ok=True)
    write_json(partial / ATTEMPT, as_json(made_of))
    return partial


def empty(partial: Path) -> None:
    """Remove what an attempt has left that was killed, but for what may be continued."""
    for path in partial.iterdir():
        if path.name not in (WORK, ATTEMPT):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def work_of(partial: Path) -> Path:
    """Where an attempt keeps what a next one continues from; it is deleted when the attempt has finished."""
    return partial / WORK


def partials(folder: Path) -> list[Path]:
    """Folders of attempts that have not finished, oldest first."""
    return sorted(folder.parent.glob(f"{folder.name}{_PARTIAL}*"), key=lambda path: path.stat().st_mtime)


def partial_of(folder: Path, token: str) -> Path:
    """The folder of the attempt with this token, at what `folder` will be."""
    return folder.with_name(f"{folder.name}{_PARTIAL}{token}")


def token_of(partial: Path) -> str:
    return partial.name.partition(_PARTIAL)[2]


def finish(partial: Path) -> Path:
    """Give what an attempt has made its name. `DiskFullError` if there is no space for the manifest."""
    made_of = shaped(MadeOf, read_object(partial / ATTEMPT))
    if work_of(partial).exists():
        shutil.rmtree(work_of(partial))
    files = [path for path in _files(partial) if path != partial / ATTEMPT]
    manifest = Manifest(
        files={_name_in(partial, path): hash_of(path, sync=True) for path in files},
        inputs=made_of.inputs,
        keys=made_of.keys,
        attempt=token_of(partial),
    )
    write_json(partial / MANIFEST, as_json(manifest))
    hash_of(partial / MANIFEST, sync=True)
    return _give_name(partial)


def _give_name(partial: Path) -> Path:
    folder = partial.with_name(partial.name.partition(_PARTIAL)[0])
    (partial / ATTEMPT).unlink(missing_ok=True)  # only now: a stage that is killed before is started again by it
    partial.rename(folder)
    sync(folder.parent)
    return folder


def adopt(folder: Path) -> None:
    """Give what was whole its name: its process was killed between its manifest and its rename."""
    for partial in partials(folder):
        if folder.exists() or not (partial / MANIFEST).exists():
            continue
        with suppress(BadFileError):
            manifest = manifest_of(partial)
            if manifest is not None and not damage(partial, manifest):
                _give_name(partial)


def manifest_of(folder: Path) -> Manifest | None:
    """None if the folder is not there. `BadFileError`: it has no manifest that can be read."""
    if not folder.is_dir():
        return None
    try:
        return shaped(Manifest, read_object(folder / MANIFEST))
    except FileNotFoundError:
        raise BadFileError(f"{folder} has no {MANIFEST}") from None


def damage(folder: Path, manifest: Manifest) -> str:
    """What does not hold of a folder, in words; empty if all does."""
    if new := [path for path in _files(folder) if _name_in(folder, path) not in {*manifest.files, MANIFEST, ATTEMPT}]:
        return f"{new[0]} was not written by its stage"
    for name, before in manifest.files.items():
        try:
            now = hash_of(folder / name)
        except (FileNotFoundError, BadFileError):
            return f"{folder / name} is gone"
        if now != before:
            return f"{folder / name} is not what was written"
    return ""


def digest(manifest: Manifest) -> str:
    """The hash of what a folder holds, by which stages that read it know it again."""
    return hashlib.sha256(json.dumps(manifest.files, sort_keys=True).encode()).hexdigest()


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Keys that differ: `algos.PITA.lr: 1e-05, now 2e-05`."""
    names = sorted({*before, *now})
    absent = "not set"
    found = [
        f"{name}: {before.get(name, absent)}, now {now.get(name, absent)}"
        for name in names
        if before.get(name, absent) != now.get(name, absent)
    ]
    return found[:_MOST_DIFFERENCES]


def hash_of(path: Path, *, sync: bool = False) -> str:
    """SHA-256 of a file; with `sync`, it survives a power cut from then on."""
    with os.fdopen(open_plain(path), "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
        if sync:
            os.fsync(file.fileno())
    return found


def _files(folder: Path) -> Sequence[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _name_in(folder: Path, path: Path) -> str:
    return str(path.relative_to(folder))


@dataclass(frozen=True, slots=True)
class OnDisk:
    """What lies in an experiment's folder."""

    done: dict[str, str]  # digests of the stages whose folders hold, by name
    redo: dict[str, str]  # why a stage that was finished is not any more, by name
    changed: dict[str, list[str]]  # how the configuration differs from that of a finished stage, by name


def look(root: Path, config: ExperimentConfig) -> OnDisk:
    """Verify what every stage has left. What was made of something that does not hold does not hold either."""
    graph = graph_of(config)
    done: dict[str, str] = {}
    redo: dict[str, str] = {}
    changed: dict[str, list[str]] = {}
    for name, stage in graph.items():
        try:
            manifest = manifest_of(root / stage.folder)
            if manifest is None:
                continue
            why = damage(root / stage.folder, manifest)
        except BadFileError as error:
            redo[name] = str(error)
            continue
        if lost := next((need for need in stage.needs if done.get(need) != manifest.inputs.get(need)), ""):
            why = why or f"it was made of {lost}, which is not there as it was"
        if why:
            redo[name] = why
        elif found := differences(manifest.keys, json.loads(json.dumps(keys_of(config, stage)))):
            changed[name] = found
        else:
            done[name] = digest(manifest)
    return OnDisk(done, redo, changed)


def state_of(stages: Sequence[Stage], done: Collection[str], records: Mapping[str, Record]) -> str:
    """The state of a job with these stages: how far its folders hold, or why it goes no further."""
    reached = NOT_STARTED
    for stage in stages:
        record = records.get(stage.name)
        if stage.name in done:
            reached = _DONE[stage.kind]
        elif record is not None and record.state == FAILED:
            return "FAILED"
        elif record is not None and record.state == BLOCKED:
            return f"BLOCKED ({record.why})"
    return reached


def refuse_changes(root: Path, found: OnDisk, graph: Mapping[str, Stage]) -> None:
    """`UsageError` where a finished stage was made with other keys: the difference, and the jobs that it touches."""
    if not found.changed:
        return
    name, first = next(iter(found.changed.items()))
    jobs = sorted({graph[one].job.id for one in below(graph, found.changed)})
    raise UsageError(
        f"{name} is finished, and was made with other keys ({'; '.join(first)}). This touches {', '.join(jobs)}. Give "
        f"the same values, start another experiment, or delete the folders of these jobs in {root / 'jobs'}."
    )


def move_aside(root: Path, graph: Mapping[str, Stage], found: OnDisk, say: Callable[[str], None]) -> None:
    """Rename what is made again, and say what and why: nothing is deleted unasked."""
    for name, why in found.redo.items():
        folder = root / graph[name].folder
        aside = folder.with_name(f"{folder.name}.outdated-{uuid4().hex[:8]}")
        folder.rename(aside)
        say(f"{name} is made again: {why}. What was there is in {aside}.")
