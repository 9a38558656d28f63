"""The side that reads: `RemoteWeights`, made by `open_remote_memory`."""

import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from async_grpo_ipc.attachment import Generations, Lease
from async_grpo_ipc.errors import ExporterDiedError, HandleFileError, MismatchError
from async_grpo_ipc.handle import handle_path
from async_grpo_ipc.model import Binding

ATTACH_POLL_S = 0.02
DEFAULT_TIMEOUT_S = 10.0


def open_remote_memory(
    path: str | Path | None = None, timeout_s: float = 0.0, device: torch.device | str | None = None
) -> "RemoteWeights":
    """Attach to what an exporter publishes.

    Args:
        path: The handle file; by default what `CUDA_IPC_HANDLE_PATH` says, or `worker/ps_ipc_handle.json`.
        timeout_s: How long to wait for an exporter that is not there yet.
        device: The device of the models that will read, where the weights are on a GPU; by default the
            current GPU.

    Raises:
        HandleFileError: There is no handle file (in time), or it is damaged or not to be trusted.
        ExporterDiedError: The handle file's exporter is gone and no other came in time.
        AttachError: The memory cannot be mapped from here.
    """
    where = handle_path(path)
    reader = None if device is None else torch.device(device)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return RemoteWeights(Generations(where, reader))
        except (HandleFileError, ExporterDiedError) as error:
            if time.monotonic() >= deadline:
                if timeout_s:
                    error.add_note(f"Waited {timeout_s:g} s for an exporter at {where}.")
                raise
        time.sleep(ATTACH_POLL_S)


class WeightsView:
    """The tensors of one version by name, without a copy. Do not write to them, and do not keep them after
    the lease ends.
    """

    def __init__(self, tensors: dict[str, Tensor], version: int, generation: str) -> None:
        self._tensors: dict[str, Tensor] | None = tensors
        self.version = version
        self.generation = generation

    def __getitem__(self, name: str) -> Tensor:
        return self._open()[name]

    def __contains__(self, name: object) -> bool:
        return name in self._open()

    def __len__(self) -> int:
        return len(self._open())

    def names(self) -> list[str]:
        return list(self._open())

    def items(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._open().items())

    def _open(self) -> dict[str, Tensor]:
        if self._tensors is None:
            raise ValueError("The lease of this view has ended: its memory may hold another version by now.")
        return self._tensors

    def _end(self) -> None:
        self._tensors = None


class RemoteWeights:
    """The weights that an exporter publishes. Use it from one thread; it is a context manager."""

    _aliasing: ClassVar[set["RemoteWeights"]] = set()  # kept, with their leases, as long as a model is aliased

    def __init__(self, generations: Generations) -> None:
        self._generations = generations
        self._aliased: list[tuple[nn.Module, Binding]] = []
        self._held: Lease | None = None
        self._pulled: weakref.WeakKeyDictionary[nn.Module, Binding] = weakref.WeakKeyDictionary()
        self._closed = False

    def __repr__(self) -> str:
        held = f"version {self._held.version} is held" if self._held is not None else "no version is held"
        state = "closed" if self._closed else f"{held}, models aliased: {len(self._aliased)}"
        return f"<RemoteWeights of {self._generations.path}: {state}>"

    @property
    def generation(self) -> str:
        """The generation of the version that was read last: each exporter has its own."""
        return self._generations.read_last

    @property
    def version(self) -> int | None:
        """The newest version published, None before the first. It can go down with a new generation, never
        within one.
        """
        newest = self.newest
        return None if newest is None else newest[1]

    @property
    def newest(self) -> tuple[str, int] | None:
        """Generation and number of the newest version published, None before the first. The number alone does not
        tell it from one of an exporter before, as where training continues from a checkpoint.
        """
        attachment = self._generations.follow()
        newest = attachment.newest()
        return None if newest is None else (attachment.handle.generation, newest.version)

    def exporter_alive(self) -> bool:
        """Whether the process that publishes lives. Reading stays possible after its death, on CPU memory."""
        self._generations.follow()
        return self._generations.exporter_alive()

    @contextmanager
    def lease(self, timeout_s: float = DEFAULT_TIMEOUT_S, *, version: int | None = None) -> Iterator[WeightsView]:
        """Hold the newest version until the block ends; the exporter writes into other slots meanwhile.

        Args:
            timeout_s: How long to wait for it.
            version: Hold this version instead: one that another process holds and told this one to read, so that
                both read the same.

        Raises:
            ShareTimeoutError: It was not published in time.
            VersionGoneError: `version` was overwritten, because nobody held it.
            ExporterDiedError: Nothing is published, and no exporter lives; or at the block's end: the exporter died
                meanwhile and its memory with it, so nothing that was read may be used, nor an error drawn from it.
        """
        lease = self._generations.take_lease(timeout_s, version)
        attachment = lease.attachment
        view = WeightsView(dict(attachment.tensors(lease.slot)), lease.version, attachment.handle.generation)
        is_finalizing = sys.is_finalizing  # a local: modules are emptied when the interpreter ends
        try:
            yield view
        finally:
            if not is_finalizing():  # else it was left open, and the kernel ends it with the process
                view._end()
                try:
                    attachment.memory.synchronize()
                    attachment.require_readable()
                finally:
                    attachment.end_lease(lease)

    def can_alias(self, model: nn.Module, device: torch.device | None = None) -> bool:
        """Whether the weights lie on the model's own device. If not, `pull` copies them to it.

        Args:
            device: Where the model belongs, for parameters on the meta device.
        """
        there = self._generations.follow().memory.alias_device
        own = (parameter.device for parameter in model.parameters())
        return all((device if on.type == "meta" else on) == there for on in own)

    def pull(self, model: nn.Module, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """Copy the newest version into the model's own memory, matched by name. Returns the version."""
        if any(aliased is model for aliased, _ in self._aliased):
            raise MismatchError(
                "This model is aliased, so it has no memory to copy into. Call refresh(), or detach() first."
            )
        lease = self._generations.take_lease(timeout_s)
        attachment = lease.attachment
        try:
            binding = self._pulled.get(model)
            if binding is None or not binding.fits(attachment.handle):
                binding = self._pulled[model] = attachment.bind(model)
            with torch.no_grad():
                binding.pull_from_slot(lease.slot)
            attachment.memory.synchronize()
            attachment.require_readable()
        finally:
            attachment.end_lease(lease)
        return lease.version

    def alias(self, model: nn.Module, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """Let the model's parameters be views of the newest version, and hold it until `refresh()`,
        `release()` or `close()`.

        Parameters on the meta device are replaced, others stay the same objects. The memory is read-only: a
        write to an aliased parameter ends the process. Returns the version.
        """
        others = [(other, its) for other, its in self._aliased if other is not model]
        version = self._move_to(self._generations.take_lease(timeout_s), [(model, None), *others])
        self._aliasing.add(self)
        return version

    def refresh(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """Move aliased models to the newest version, and hold it: the new lease is taken before the old one is
        dropped. Returns the version.
        """
        return self._move_to(self._generations.take_lease(timeout_s), self._aliased)

    def intact(self, *, wait: bool = True) -> bool:
        """Whether all that was read of aliased weights so far is what was published.

        True where no model is aliased: its weights are a copy, which `pull` and `lease` have checked themselves.
        False once their exporter has died where its memory is lost with it (CUDA). Ask before `release()` and
        `refresh()`, and use nothing that was computed before the answer was True.

        Args:
            wait: Wait for the GPU, which may have reads ahead of it. Without, True says nothing of what it computes:
                a quick look on the way, for one who will ask again before anything is used.
        """
        held = self._held
        if not self._aliased or held is None or held.attachment.memory.survives_exporter:
            return True
        if wait:
            held.attachment.memory.synchronize()
        return held.attachment.readable()

    def release(self) -> None:
        """Let the exporter have the slot while this process is idle. The caller does not read aliased weights
        until `refresh()`.
        """
        held, self._held = self._held, None
        if held is not None:
            held.attachment.memory.synchronize()
            held.attachment.end_lease(held)

    def detach(self, *, keep_weights: bool) -> None:
        """Move aliased models out of the shared memory: to copies of their own, or to the meta device, which
        has no memory.

        Raises:
            ValueError: Weights were to be kept, but `release()` gave up the lease, so they may be mixed by
                now.
        """
        if keep_weights and self._aliased and self._held is None:
            raise ValueError(
                "The lease was released, so the weights may change while they are copied. Call refresh() first."
            )
        for _, binding in self._aliased:
            binding.move_out(keep_weights=keep_weights)
        self._aliased = []
        self._aliasing.discard(self)
        self.release()

    def close(self) -> None:
        """Detach without keeping weights, and unmap. A model that was aliased is on the meta device afterwards."""
        if not self._closed:
            self.detach(keep_weights=False)
            self._closed = True
            self._pulled.clear()
            self._generations.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _move_to(self, lease: Lease, models: Sequence[tuple[nn.Module, Binding | None]]) -> int:
        """Point these models to `lease`, keep it, and drop the one held so far. None moves where one does not match."""
        attachment = lease.attachment
        try:
            matched = [
                (model, old if old is not None and old.fits(attachment.handle) else attachment.bind(model))
                for model, old in models
            ]
            for _, binding in matched:
                binding.alias_slot(lease.slot)
        except BaseException:
            attachment.end_lease(lease)
            raise
        self._aliased = matched
        self.release()
        self._held = lease
        return lease.version
