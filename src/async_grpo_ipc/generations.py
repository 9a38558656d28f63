"""Follows a path from one exporter to the next, and takes leases on the newest version there is."""

import logging
import time
from pathlib import Path

import torch

from async_grpo_ipc.attachment import Attachment, Lease, died, stamp_of
from async_grpo_ipc.errors import IPCError, ShareTimeoutError

logger = logging.getLogger(__name__)

POLL_S = 0.001


class Generations:
    """The attachment in use, and the next one from the moment its exporter has written a handle file.

    The next one comes into use with its first version: until then the last version of the exporter before
    stays readable.
    """

    def __init__(self, path: Path, device: torch.device | None = None) -> None:
        self._path = path
        self._device = device
        self.current = Attachment(path, device)
        self._next: Attachment | None = None
        self._seen = self.current.stamp

    def follow(self) -> None:
        """Notice a new exporter, and change over to it once it has published."""
        stamp = stamp_of(self._path)
        if stamp is not None and stamp != self._seen:
            self._seen = stamp
            self._attach_next()
        if self._next is not None and self._next.newest() is not None:
            old, self.current, self._next = self.current, self._next, None
            old.retire()
            logger.info(
                "Weights at %s come from a new exporter: pid %d, generation %s (before: pid %d, %s).",
                self._path,
                self.current.handle.pid,
                self.current.handle.generation,
                old.handle.pid,
                old.handle.generation,
            )

    def exporter_alive(self) -> bool:
        return self.current.exporter_alive() or (self._next is not None and self._next.exporter_alive())

    def take_lease(self, timeout_s: float) -> Lease:
        """A hold on the newest version. Waits where none is there yet, or the only slot is being written."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.follow()
            lease = self.current.try_lease() if self.current.readable() else None
            if lease is not None:
                return lease
            if not self.exporter_alive() and (not self.current.readable() or self.current.newest() is None):
                raise died(self._path, self.current.handle.pid)
            if time.monotonic() >= deadline:
                raise ShareTimeoutError(
                    f"No version could be read at {self._path} within {timeout_s:g} s "
                    f"({self.current.describe_slots()}; exporter "
                    f"{'alive' if self.exporter_alive() else 'gone'}). Wait longer, or see whether it "
                    f"publishes: python -m async_grpo_ipc inspect {self._path}"
                )
            time.sleep(POLL_S)

    def close(self) -> None:
        for attachment in (self.current, self._next):
            if attachment is not None:
                attachment.retire()

    def _attach_next(self) -> None:
        try:
            attachment = Attachment(self._path, self._device)
        except IPCError as error:
            logger.warning("Stay with the weights of generation %s: %s", self.current.handle.generation, error)
            return
        if self._next is not None:
            self._next.close()
            self._next = None
        if attachment.handle.generation == self.current.handle.generation:
            attachment.close()
        else:
            self._next = attachment
