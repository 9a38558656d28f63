"""Handles whose fields make no sense: every way to read one ends at once, with an `IPCError` or a sound handle.

What is no handle at all is in `test_bad_files`.
"""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from async_grpo_ipc import HandleFileError, IPCError, WeightExporter, open_remote_memory
from async_grpo_ipc.handle import crc32
from async_grpo_ipc.report import check, inspect, look_at_slots

Body = dict[str, Any]
WAYS: list[Callable[[Path], object]] = [
    lambda path: open_remote_memory(path, timeout_s=0).close(),
    lambda path: look_at_slots(path, []),
    lambda path: inspect(path, tensors=True),
    lambda path: check(path, None),
]


def set_to(*path_and_value: Any) -> Callable[[Body], object]:
    """`set_to("control", "fd", 0)` sets `body["control"]["fd"] = 0`."""
    *way, name, value = path_and_value

    def change(body: Body) -> None:
        inner: Any = body
        for step in way:
            inner = inner[step]
        inner[name] = value

    return change


def first_tensor(**fields: Any) -> Callable[[Body], object]:
    return lambda body: body["slot"]["tensors"][0].update(fields)


def no_room_for_the_canary(body: Body) -> None:
    body["memory"]["blocks"][0].update(nbytes=256)
    body["static"].update(nbytes=256, tensors=[], buckets=[])


def as_cuda(body: Body) -> None:
    blocks = [{"handle": "00" * 64, "nbytes": 1 << 20} for _ in body["memory"]["blocks"]]
    body["memory"] = {"kind": "cuda", "blocks": blocks}


CHANGES: dict[str, Callable[[Body], object]] = {
    "a time that no float holds": set_to("created", 10**400),
    "an infinite time": set_to("created", float("inf")),
    "a pid of 30 digits": set_to("pid", 10**30),
    "an infinite pid": set_to("pid", float("inf")),
    "a pid that is a list": set_to("pid", [1]),
    "slots without end": set_to("slots", 10**12),
    "a generation that is not hexadecimal": set_to("generation", "zz" * 16),
    "a generation with spaces": set_to("generation", "ab " * 16),
    "a control that is a list": set_to("control", []),
    "memory that is a list": set_to("memory", []),
    "a kind that is a list": set_to("memory", "kind", ["posix"]),
    "memory of a GPU that is not described": as_cuda,
    "blocks that are an object": set_to("memory", "blocks", {"a": 1}),
    "no blocks": set_to("memory", "blocks", []),
    "memory without end": set_to("memory", "nbytes", 1 << 70),
    "no room for the canary": no_room_for_the_canary,
    "a block at an odd offset": set_to("memory", "blocks", 1, "offset", 1),
    "a block of an odd size": set_to("memory", "blocks", 1, "nbytes", 4097),
    "an empty tensor without end": first_tensor(shape=[0, 1 << 62, 1 << 62], stride=[1 << 62, 1, 1]),
    "a length of over 64 bits": first_tensor(shape=[0, 1 << 70], stride=[1, 1]),
    "one element seen a million times": first_tensor(shape=[1 << 50], stride=[0]),
    "5000 dimensions": first_tensor(shape=[1] * 5000, stride=[1] * 5000),
    "half a character": first_tensor(dtype="\ud800"),
    "a tensor that is a list": set_to("slot", "tensors", 0, [1]),
    "tensors that are a number": set_to("slot", "tensors", 3),
    "tied names that are a list": set_to("tied", []),
    "a flag that is text": set_to("complete", "no"),
    "a boot id that is null": set_to("boot_id", None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_fields_that_make_no_sense(exporter: WeightExporter, handle: Path, change: str) -> None:
    exporter.publish(1)
    body = json.loads(handle.read_text())
    body.pop("crc32")
    CHANGES[change](body)
    handle.write_text(json.dumps(body | {"crc32": crc32(body)}))
    for read in WAYS:
        with suppress(IPCError):
            read(handle)
            assert read is WAYS[1], "only the look at the slots does without most of the fields"


@pytest.mark.parametrize("plant", [os.mkfifo, lambda path: path.symlink_to(path.with_name("victim"))])
def test_an_exporter_writes_its_lock_through_no_link_and_into_no_pipe(
    trainer: Any, handle: Path, plant: Callable[[Path], object]
) -> None:
    handle.parent.mkdir()
    (handle.parent / "victim").write_text("mine")
    plant(handle.with_name("ps_ipc_handle.owner.lock"))
    with pytest.raises(HandleFileError, match=r"owner\.lock"):
        WeightExporter.from_model(trainer, handle)
    assert (handle.parent / "victim").read_text() == "mine"
