"""The handle file and the shared header: written whole, read with suspicion."""

import json
import os
import stat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from async_grpo_ipc import (
    AttachError,
    ExporterDiedError,
    HandleFileError,
    HeaderError,
    WeightExporter,
    open_remote_memory,
)
from async_grpo_ipc.control import HEADER_BYTES, RECORD_BYTES, Header, SlotState
from async_grpo_ipc.handle import WeightsHandle, crc32, read_handle, write_handle


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
    with pytest.raises(ExporterDiedError, match="has ended"):
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
    with pytest.raises(ExporterDiedError, match="has ended"):
        open_remote_memory(handle)
    with WeightExporter.from_model(trainer, handle) as successor:
        successor.publish(1)
        assert open_remote_memory(handle).version == 1
