"""Feeds a vLLM server on this machine with what an exporter publishes: `VLLMFeed`, and `SharedWeightTransfer`.

It needs neither vLLM nor HTTP libraries; the server has the backend `async_grpo_ipc` (`vllm_engine`).
"""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
from torch import Tensor

from async_grpo_ipc.checkpoint import Adapter
from async_grpo_ipc.errors import IPCError
from async_grpo_ipc.exporter import WeightExporter
from async_grpo_ipc.memory import Way
from async_grpo_ipc.sources import Blueprint, Sources

STARTED_WITH = (
    'Start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{"backend": "async_grpo_ipc"}\', where '
    "this package is installed."
)


POLL_S = 0.5
SLOT_POLL_S = 0.002


class FeedError(IPCError):
    """The vLLM server cannot be reached, or refused what it was asked. After a refused update, start it again."""


class VLLMFeed:
    """One server, fed from one handle file.

    Args:
        url: of the server, as in `http://127.0.0.1:8000`.
        handle: the exporter's handle file (`WeightExporter.path`); it is there when `take` is called.
        adapter: a LoRA adapter among the published tensors, which the server merges into the others.
        timeout_s: for each answer.
    """

    def __init__(
        self, url: str, handle: str | Path, *, adapter: Adapter | None = None, timeout_s: float = 600.0
    ) -> None:
        self._url, self._timeout_s = url.rstrip("/"), timeout_s
        merged = None if adapter is None else adapter.as_json()
        self._source = {"handle": str(Path(handle).absolute()), "adapter": merged}
        self._knows = False  # the server knows the handle

    def take(self, version: int, generation: str = "") -> None:
        """Have the server take this version, and forget cached prefixes. Requests that run meanwhile should be paused.

        Nothing newer may be published until this returns, unless the caller holds a lease on the version.

        Args:
            version: a version that was published.
            generation: `WeightExporter.generation`, where one exporter may follow another.

        Raises:
            FeedError: there is no such server, it was not started for this, or the update failed.
        """
        if not self._knows:
            self._post("init_weight_transfer_engine", init_info=self._source)
            self._knows = True
        self._post("start_weight_update")
        self._post("update_weights", update_info={"version": version, "generation": generation})
        self._post("finish_weight_update", weight_version=str(version))
        self._post("reset_prefix_cache")

    def pause(self) -> None:
        """Let running requests wait where they are; new ones wait as well."""
        self._post("pause?mode=keep")

    def resume(self) -> None:
        self._post("resume")

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the server answers. Raises `FeedError` after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                urlopen(f"{self._url}/health", timeout=POLL_S * 10).read()
                return
            except (OSError, HTTPException) as error:
                if time.monotonic() > deadline:
                    raise self._silent(error) from error
            time.sleep(POLL_S)

    def _post(self, request: str, **body: Any) -> None:
        data = json.dumps(body).encode() if body else b""
        message = Request(f"{self._url}/{request}", data, {"Content-Type": "application/json"}, method="POST")
        try:
            urlopen(message, timeout=self._timeout_s).read()
        except HTTPError as error:
            text = error.read(2000).decode(errors="replace")
            hint = f" {STARTED_WITH}" if error.code == 404 or "not configured" in text else ""
            raise FeedError(f"The vLLM server answered /{request} with {error.code}: {text}{hint}") from error
        except (OSError, HTTPException) as error:
            raise self._silent(error) from error

    def _silent(self, error: Exception) -> FeedError:
        return FeedError(f"No vLLM server answers at {self._url} ({error}). {STARTED_WITH}")


class SharedWeightTransfer:
    """A weight-transfer backend for TRL's asynchronous trainer (`AsyncGRPOTrainer(weight_transfer=…)`), without NCCL.

    The trainer's process publishes the weights in memory, other processes map them: a vLLM server that is told of each
    version, or whoever opens the handle file. It needs memory for `slots` more copies of the model, on the model's
    device, and while the first version is sent for another one.

    Args:
        url: of the vLLM server; None: there is none to tell.
        handle: where the handle file is written; its folder is made.
        slots: versions that exist at a time. Where readers hold all but the newest, the next one waits for them.
        way: as for `WeightExporter.from_model`.
        timeout_s: for the server to be ready, for each answer, and for a free slot.
    """

    def __init__(
        self, url: str | None, handle: str | Path, *, slots: int = 1, way: Way = "auto", timeout_s: float = 1800.0
    ) -> None:
        self._feed = None if url is None else VLLMFeed(url, handle, timeout_s=timeout_s)
        self._path, self._slots, self._way, self._timeout_s = Path(handle), slots, way, timeout_s
        self._exporter: WeightExporter | None = None
        self._incoming: dict[str, Tensor] | Iterator[tuple[str, Tensor]] = {}
        self.version = 0  # that was sent last

    def init_weight_transfer(self) -> None:
        if self._feed is not None:
            self._feed.wait_ready(self._timeout_s)

    def pause(self) -> None:
        if self._feed is not None:
            self._feed.pause()

    def resume(self) -> None:
        if self._feed is not None:
            self._feed.resume()

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Publish the tensors as one more version, and have the server take it.

        Raises:
            FeedError: the server did not take it: it keeps weights that are neither the old nor the new ones. Or
                readers kept every slot for `timeout_s` seconds.
        """
        self._incoming = iterator
        if self._exporter is None:
            self._incoming = {name: tensor.detach().clone() for name, tensor in iterator}
            self._exporter = self._open(self._incoming)
        self._publish(self._exporter, self.version + 1)
        self.version += 1
        self._incoming = {}
        if self._feed is not None:
            self._feed.take(self.version, self._exporter.generation)

    def destroy(self) -> None:
        if self._exporter is not None:
            self._exporter.close()
            self._exporter = None

    def _publish(self, exporter: WeightExporter, version: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not exporter.publish(version):
            if time.monotonic() > deadline:
                raise FeedError(
                    f"Version {version} of the weights was not published: for {self._timeout_s:g} s other processes "
                    "have held every older one. Give SharedWeightTransfer more slots, or fewer readers."
                )
            time.sleep(SLOT_POLL_S)

    def _open(self, first: Mapping[str, Tensor]) -> WeightExporter:
        """For these tensors; a model may have more, which do not train and are what its checkpoint has."""
        changing = {name: torch.empty_like(tensor, device="meta") for name, tensor in first.items()}
        device = next(iter(first.values())).device
        blueprint = Blueprint(changing=changing, static={}, tied={})
        sources = replace(Sources.of_blueprint(blueprint, self._write, device), complete=False)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return WeightExporter(sources, self._path, self._slots, self._way)

    def _write(self, published: Mapping[str, Tensor]) -> None:
        """Copy what the trainer sends, one tensor at a time, since it may not have all of them at once."""
        incoming = self._incoming.items() if isinstance(self._incoming, dict) else self._incoming
        for name, tensor in incoming:
            published[name].copy_(tensor)
