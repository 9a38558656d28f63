"""The handle file and the shared header: written whole, read with suspicion."""

import json
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from async_grpo_ipc import (
    AttachError,
    ExporterDiedError,
    HandleFileError,
    HeaderError,
    IPCError,
    WeightExporter,
    open_remote_memory,
)
from async_grpo_ipc.control import HEADER_BYTES, RECORD_BYTES, Header, SlotState
from async_grpo_ipc.handle import WeightsHandle, crc32, read_handle, write_handle
from async_grpo_ipc.report import check, inspect, look_at_slots


def edit(path: Path, change) -> None:
    """Change the JSON and make its checksum right again."""
    body = json.loads(path.read_text())
    body.pop("crc32")
    change(body)
    path.write_text(json.dumps(body | {"crc32": crc32(body)}))


def test_a_handle_is_read_as_it_was_written(published, handle, tmp_path):
    read = read_handle(handle)
    assert isinstance(read, WeightsHandle)
    copy = tmp_path / "copy.json"
    write_handle(copy, read)
    assert read_handle(copy) == read
    assert read.pid == os.getpid()
    assert read.complete and read.buffers
    assert read.tied == {"head.weight": "embed.weight"}


def test_files_are_private(published, handle):
    assert stat.S_IMODE(handle.parent.stat().st_mode) == 0o700
    for path in handle.parent.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert not [*handle.parent.glob(".*")], "no temporary file is left"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: body.update(format="other"), "not a handle file of async-grpo-ipc"),
        (lambda body: body.update(format_version=0), "format version 0, this package reads 2"),
        (lambda body: body.update(boot_id="elsewhere"), "written on another machine"),
        (lambda body: body.pop("slots"), "field that makes no sense: KeyError"),
        (lambda body: body.update(slots=5), "field that makes no sense.*5 slots and 3 blocks"),
        (lambda body: body.update(generation="12"), "field that makes no sense.*generation"),
        (lambda body: body["memory"].update(kind="tape"), "field that makes no sense.*memory of kind"),
        (lambda body: body["memory"]["blocks"][1].update(offset=2**40), "a block that ends behind"),
        (lambda body: body["memory"]["blocks"][1].update(nbytes=4096), "a layout of .* in a block of 4096"),
        (lambda body: body["slot"]["tensors"][0].update(offset=2**40), "tensor .* at offset"),
        (lambda body: body["slot"]["tensors"][0].update(offset=8), "tensor .* at offset 8"),
        (lambda body: body["slot"]["tensors"][0].update(dtype="nn"), "dtype 'nn', which this torch does not have"),
        (lambda body: body["slot"]["tensors"][0].update(shape=[-1]), "integer of at least 0"),
        (lambda body: body["slot"]["tensors"][0].update(name=3), "where text belongs"),
        (lambda body: body["tied"].update(a="nowhere"), "field that makes no sense"),
        (lambda body: body.update(pid="1; rm"), "integer of at least 1"),
    ],
)
def test_fields_that_make_no_sense_are_refused(published, handle, change, message):
    edit(handle, change)
    with pytest.raises(HandleFileError, match=message):
        open_remote_memory(handle)


def test_another_pid_namespace_is_explained(published, handle):
    edit(handle, lambda body: body.update(pid_namespace="pid:[1]"))
    with pytest.raises(AttachError, match=r"another container .*--pid=host"):
        open_remote_memory(handle)


@given(st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_truncated_or_garbled_file_is_refused(published, handle, data):
    raw = handle.read_bytes()
    try:
        if data.draw(st.booleans()):
            handle.write_bytes(raw[: data.draw(st.integers(0, len(raw) - 1))])
        else:
            offset = data.draw(st.integers(0, len(raw) - 1))
            garbled = raw[offset] ^ data.draw(st.integers(1, 255))
            handle.write_bytes(raw[:offset] + bytes([garbled]) + raw[offset + 1 :])
            if json_equal(handle, raw):
                return  # white space for white space
        with pytest.raises(HandleFileError, match=r"Delete it and restart|not a handle file|format version"):
            read_handle(handle)
    finally:
        handle.write_bytes(raw)


def json_equal(path: Path, raw: bytes) -> bool:
    try:
        return bool(json.loads(path.read_bytes()) == json.loads(raw))
    except ValueError:
        return False


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_may_write_is_refused(published, handle, mode):
    handle.chmod(mode)
    with pytest.raises(HandleFileError, match=f"can be written by others .mode {mode:04o}"):
        open_remote_memory(handle)


def test_a_file_of_another_user_is_refused(published, handle, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: handle.stat().st_uid + 1)
    with pytest.raises(HandleFileError, match=r"belongs to user .* same user"):
        open_remote_memory(handle)


def test_a_recycled_pid_is_not_taken_for_the_exporter(published, handle):
    edit(handle, lambda body: body.update(pid=1))
    with pytest.raises((ExporterDiedError, AttachError), match=r"exporter \(pid 1\) has ended|Process 1 publishes"):
        open_remote_memory(handle)
    edit(handle, lambda body: body.update(pid=os.getpid(), control={"fd": 0, "inode": 1}))
    with pytest.raises(ExporterDiedError):
        open_remote_memory(handle)


def test_a_stale_handle_of_an_older_generation_is_refused(published, handle):
    edit(handle, lambda body: body.update(generation="0" * 32))
    with pytest.raises(HeaderError, match="the file is stale"):
        open_remote_memory(handle)


def header_bytes(exporter: WeightExporter):
    return exporter._control.header._control


@pytest.mark.parametrize("bit", [0, 8 * 9, 8 * 20 + 3, 8 * 63])
def test_a_flipped_bit_in_the_header_is_refused_at_attach(published, handle, bit):
    header_bytes(published)[bit // 8] ^= 1 << bit % 8
    with pytest.raises(HeaderError, match="fails its checksum"):
        open_remote_memory(handle)


def test_a_flipped_bit_in_a_slots_record_hides_that_slot_only(published, remote):
    published.publish(2)
    assert remote.version == 2
    header_bytes(published)[2 * RECORD_BYTES + 17] ^= 4
    assert remote.version == 1
    published.publish(3)
    assert remote.version == 3


@pytest.mark.parametrize("block", [0, 1, 2])
def test_a_block_that_is_mapped_wrongly_is_refused(published, handle, block):
    memory = published._memory
    memory.blocks[block][:4096] = memory.blocks[block - 1][:4096].clone()
    with pytest.raises(AttachError, match=f"4[0-9]{{3}} of 4096 canary bytes of block {block} differ"):
        open_remote_memory(handle)


def test_header_records_have_the_documented_bytes():
    control = bytearray(HEADER_BYTES)
    header = Header(control, "ab" * 16, 2)
    header.initialise()
    header.mark(1, SlotState.READY, 258)
    assert control[:16] == b"AGIPCTRL\x01\0\0\0\x02\0\0\0"
    assert control[16:32] == b"\xab" * 16
    assert control[128:144] == b"\xab" * 16
    assert control[144:152] == (258).to_bytes(8, "little")
    assert control[152:156] == b"\x02\0\0\0"
    assert header.newest().slot == 1
    assert header.slot(0).state is SlotState.EMPTY


def test_remaining_files_of_a_dead_exporter_do_not_stop_the_next(published, handle, trainer):
    raw = handle.read_bytes()
    published.close()
    handle.write_bytes(raw)
    with pytest.raises(ExporterDiedError):
        open_remote_memory(handle)
    with WeightExporter.from_model(trainer, handle) as successor:
        successor.publish(1)
        assert open_remote_memory(handle).version == 1


# --- Handles whose fields make no sense: -------------------------------------------------------------------------

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
    edit(handle, CHANGES[change])
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
