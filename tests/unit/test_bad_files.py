"""Every reader of a file, and every file that is not what it should be: refused at once, by name."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from async_grpo.archive import rollout_state
from async_grpo.archive.history import read_record
from async_grpo.deltas import chain
from async_grpo.errors import AsyncGRPOError, BadFileError, DeltaChainError, RunDirError
from async_grpo.evals import eval_ledger
from async_grpo.queue.codec import decode_group, decode_job
from async_grpo.queue.filesystem import OsFiles
from async_grpo.rundir import summary
from async_grpo.rundir.files import LineFile
from async_grpo.rundir.paths import RunDir
from async_grpo.rundir.reading import LineReader, read_end, read_object
from async_grpo.telemetry import entries
from async_grpo.telemetry.activity import read_activity
from async_grpo_experiments.runner.config_files import config_of
from async_grpo_experiments.slots import ledger
from async_grpo_experiments.sweeps import plan

HUGE = "a sparse file of 300 MiB"


def _link(path: Path) -> None:
    (path.parent / "victim").write_text('{"secret": 1}\n')
    path.symlink_to(path.parent / "victim")


def _listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


class NoFile(NamedTuple):
    """What is no plain file."""

    plant: Callable[[Path], object]
    reason: str  # a pattern of what a reader says


_LINKS = "it is a link|links are not followed"
NO_FILES: dict[str, NoFile] = {
    "a named pipe": NoFile(os.mkfifo, "named pipe|not a regular file"),
    "a link": NoFile(_link, _LINKS),
    "a link to nothing": NoFile(lambda path: path.symlink_to("nowhere"), _LINKS),
    "a link to a device": NoFile(lambda path: path.symlink_to("/dev/zero"), _LINKS),
    "a directory": NoFile(lambda path: path.mkdir(), "a directory|not a regular file"),
    "a socket": NoFile(_listening, "cannot be opened"),
}
NO_OBJECTS: dict[str, bytes] = {
    "nothing": b"",
    "zero bytes, as a power cut leaves them": b"\0" * 1000,
    "half an object": b"{",
    "a list": b"[]",
    "null": b"null",
    "another encoding": '{"format": "async-grpo-ipc"}'.encode("utf-16"),
    "no encoding": b"\xff\xfe",
    "a million brackets": b"[" * 10**6,
    "brackets in a field": b'{"format": "async-grpo-ipc", "x": ' + b"[" * 100_000,
    "500 levels": b'{"options": ' + b"[" * 500 + b"]" * 500 + b"}",  # json reads it, `dataclasses.asdict` fails on it
    "990 levels": b'{"format": "async-grpo-ipc", "format_version": 1, "x": ' + b"[" * 990 + b"]" * 990 + b"}",
    "a number of 5000 digits": b'{"format": "async-grpo-ipc", "x": ' + b"9" * 5000 + b"}",
}
"""Bytes that are no JSON object, or one that no record of ours can be."""


def plant(what: str, path: Path) -> Path:
    """Put the bad file of that name in the place of `path`, and return it."""
    if what in NO_FILES:
        NO_FILES[what].plant(path)
        return path
    path.touch(mode=0o600)
    if what == HUGE:
        os.truncate(path, 300 << 20)
    else:
        path.write_bytes(NO_OBJECTS[what])
    return path


@dataclass(frozen=True)
class Reader:
    """What reads a file of this name, given its path."""

    file: str
    read: Callable[[Path], object]
    error: type[Exception] | None = BadFileError  # None: the one of the weights' handle
    names_it: bool = True  # in its error


def of_weights(read: Callable[[Any, Path], object]) -> Reader:
    """A reader of the handle of the weights. Its package imports torch, so the others are tried without it."""

    def later(path: Path) -> object:
        import async_grpo_ipc

        return read(async_grpo_ipc, path)

    return Reader("handle.json", later, None)


def _report() -> Any:
    from async_grpo_ipc import report as of_weights_report

    return of_weights_report


OF_OBJECTS: dict[str, Reader] = {
    "a JSON file": Reader("any.json", read_object),
    "run.json": Reader("run.json", lambda path: RunDir(path.parent).read_state(), RunDirError),
    "summary.json": Reader("summary.json", summary.read_figures),
    "the rollout state": Reader("rollout_state.json", rollout_state.read),
    "sweep.json": Reader("sweep.json", lambda path: plan.load(path.parent), RunDirError),
    "the configuration of an experiment": Reader("config.yaml", lambda path: config_of(path.parent), AsyncGRPOError),
    "a chain of deltas": Reader("chain.json", lambda path: chain.read_about(path.parent), DeltaChainError),
    "a job": Reader("job", lambda path: decode_job(OsFiles(path.parent).read(path.name)), names_it=False),
    "a group": Reader("group", lambda path: decode_group(OsFiles(path.parent).read(path.name)), names_it=False),
    "weights": of_weights(lambda ipc, path: ipc.open_remote_memory(path, timeout_s=0).close()),
    "weights, a look at the slots": of_weights(lambda _, path: _report().look_at_slots(path, [])),
    "weights, ipc-inspect": of_weights(lambda _, path: _report().inspect(path, tensors=True)),
    "weights, ipc-check": of_weights(lambda _, path: _report().check(path, None)),
}
OF_LINES: dict[str, Reader] = {
    "lines": Reader("any.jsonl", lambda path: list(LineReader(path).new_lines())),
    "the end of a file": Reader("any.log", lambda path: read_end(path, 10)),
    "lines that are added": Reader("any.jsonl", lambda path: LineFile(path).append("x")),
    "the ledger of slots": Reader("tasks.jsonl", ledger.read),
    "evaluations": Reader("evaluations.jsonl", eval_ledger.read),
    "metrics": Reader("metrics.jsonl", entries.read),
}
"""A line that is none of theirs is left out."""
TELLING: dict[str, Reader] = {
    "the record of used groups": Reader("consumed.jsonl", lambda path: read_record(path, "run")),
    "the status of a process": Reader("dev1.status", read_activity),
}
"""They raise nothing: a bad file is one of their findings, or None."""


def refused(reader: Reader, path: Path, reason: str | None = None) -> None:
    with pytest.raises(reader.error or _error_of_weights(), match=reason) as raised:
        reader.read(path)
    assert not reader.names_it or str(path) in str(raised.value)


def _error_of_weights() -> type[Exception]:
    from async_grpo_ipc import HandleFileError

    return HandleFileError


def places(folder: Path, bad: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """Each of these bad files, and a folder for it."""
    for number, what in enumerate(bad):
        (place := folder / str(number)).mkdir()
        yield what, place


@pytest.mark.parametrize("name", [*OF_OBJECTS, *OF_LINES])
def test_what_is_no_plain_file_is_refused(name: str, tmp_path: Path) -> None:
    reader = {**OF_OBJECTS, **OF_LINES}[name]
    for bad, place in places(tmp_path, NO_FILES):
        refused(reader, plant(bad, place / reader.file), NO_FILES[bad].reason)
        victim = place / "victim"
        assert not victim.exists() or victim.read_text() == '{"secret": 1}\n'


@pytest.mark.parametrize("name", OF_OBJECTS)
def test_a_huge_file_is_refused_before_it_is_read(name: str, tmp_path: Path) -> None:
    reader = OF_OBJECTS[name]
    refused(reader, plant(HUGE, tmp_path / reader.file), "314,572,800 bytes")


@pytest.mark.parametrize("name", OF_OBJECTS)
def test_what_is_no_object_is_refused(name: str, tmp_path: Path) -> None:
    reader = OF_OBJECTS[name]
    for bad, place in places(tmp_path, NO_OBJECTS):
        refused(reader, plant(bad, place / reader.file))


@pytest.mark.parametrize("name", OF_LINES)
def test_lines_that_are_no_objects_are_left_out(name: str, tmp_path: Path) -> None:
    reader = OF_LINES[name]
    for bad, place in places(tmp_path, NO_OBJECTS):
        path = plant(bad, place / reader.file)
        with path.open("ab") as file:
            file.write(b"\n")
        reader.read(path)


@pytest.mark.parametrize("name", TELLING)
def test_some_readers_tell_and_raise_nothing(name: str, tmp_path: Path) -> None:
    reader = TELLING[name]
    for bad, place in places(tmp_path, [*NO_FILES, HUGE, *NO_OBJECTS]):
        found = reader.read(plant(bad, place / reader.file))
        assert found is None or (found[0] == [] and (found[1] or bad == "nothing")), bad  # type: ignore[index]
