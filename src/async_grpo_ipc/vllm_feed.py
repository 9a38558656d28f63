"""`VLLMFeed` feeds a vLLM server on this machine with what an exporter publishes.

It needs neither vLLM nor HTTP libraries; the server has the backend `async_grpo_ipc` (`vllm_engine`).
"""

import json
import time
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from async_grpo_ipc.checkpoint import Adapter
from async_grpo_ipc.errors import IPCError

STARTED_WITH = (
    'Start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{"backend": "async_grpo_ipc"}\', where '
    "this package is installed."
)


POLL_S = 0.5


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
