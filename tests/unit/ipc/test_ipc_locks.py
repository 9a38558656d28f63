"""Kernel locks: independent of the process, counted within it, gone with their holder."""

import os

import pytest

from async_grpo_ipc import WeightExporter
from async_grpo_ipc.attachment import Attachment
from async_grpo_ipc.errors import ForkedError
from async_grpo_ipc.locks import LockFile, OwnedFd


@pytest.fixture
def open_lock(tmp_path):
    path = tmp_path / "locks"
    path.touch(mode=0o600)
    return lambda writable=True: LockFile(str(path), writable=writable, what="a test's lock")


def test_two_openings_exclude_each_other_in_one_process(open_lock):
    writer, reader = open_lock(), open_lock(writable=False)
    assert writer.try_lock(3)
    assert not reader.try_lock(3, shared=True)
    assert reader.try_lock(4, shared=True), "each byte is a lock of its own"
    assert reader.held_elsewhere(3) and not writer.held_elsewhere(3)
    assert writer.held_elsewhere(4)
    writer.unlock(3)
    assert reader.try_lock(3, shared=True)
    assert not writer.try_lock(3)


def test_closing_drops_the_locks(open_lock):
    first, second = open_lock(), open_lock()
    first.try_lock(1)
    first.close()
    assert second.try_lock(1)


def test_holders_are_found_for_messages(open_lock):
    lock, other = open_lock(), open_lock()
    assert other.holders(1) == []
    lock.try_lock(1, shared=True)
    assert other.holders(1) == [os.getpid()]
    assert other.holders(2) == []


@pytest.fixture
def lone_slot(trainer, handle):
    with WeightExporter.from_model(trainer, handle, slots=1) as exporter:
        exporter.publish(1)
        yield exporter


def test_leases_are_counted(lone_slot, handle):
    attachment = Attachment(handle)
    first, second = attachment.try_lease(), attachment.try_lease()
    attachment.end_lease(first)
    assert not lone_slot.publish(2)
    attachment.end_lease(second)
    assert lone_slot.publish(2)
    attachment.try_lease()
    assert not lone_slot.publish(3)
    attachment.close()
    assert lone_slot.publish(3)


@pytest.mark.parametrize("held", [True, False])
def test_a_forked_child_has_neither_descriptor_nor_lease(lone_slot, handle, held):
    attachment = Attachment(handle)
    lease, other = attachment.try_lease(), attachment.try_lease()
    attachment.end_lease(other)
    if (pid := os.fork()) == 0:
        try:
            if not held:
                attachment.end_lease(lease)  # must not drop the parent's
            attachment.try_lease()
        except ForkedError as error:
            os._exit(0 if "Open the handle again in this process" in str(error) else 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not lone_slot.publish(2), "the parent's lease is there"


def test_a_closed_descriptor_says_so(tmp_path):
    fd = OwnedFd(os.open(tmp_path, os.O_RDONLY), "this folder")
    fd.close()
    fd.close()
    with pytest.raises(ValueError, match="this folder is closed"):
        fd.fileno()
