"""A small HTTP server that speaks what TRL's client asks of a vLLM server, and generates with transformers.

Weights come as vLLM takes them: announced, then broadcast (here over HTTP: `setups/fake_nccl.py`), then finished.
"""

from __future__ import annotations

import importlib.util
import json
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest
import safetensors.torch
import torch
from transformers import PreTrainedModel
from trl.generation import vllm_client
from trl.generation.vllm_client import VLLMClient

from async_grpo.serving.vllm_server import VLLMServerProcess
from kit.engines import sample, transformers_of
from kit.tiny_trainer import build_model, build_tokenizer

DEADLINE_S = 60.0


class FakeVLLMServer(ThreadingHTTPServer):
    """Serves `model`. What was asked is in `asked` (path and body), answers that a test wants otherwise in `answers`.

    Attributes:
        answers: path -> status and body that are sent instead.
        hold: cleared by a test, completions are not answered until it is set again.
    """

    daemon_threads = True

    def __init__(self, model: PreTrainedModel | None = None, logprobs_mode: str = "processed_logprobs") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.model = model
        self.logprobs_mode = logprobs_mode
        self.asked: list[tuple[str, Any]] = []
        self.answers: dict[str, tuple[int, Any]] = {}
        self.hold = threading.Event()
        self.hold.set()
        self.updating = False
        self.updates = 0
        self._broadcasts: queue.Queue[dict[str, torch.Tensor]] = queue.Queue()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def bodies(self, path: str) -> list[Any]:
        return [body for asked, body in self.asked if asked == path]

    def reply(self, path: str, body: Any) -> Any:
        if path == "/server_info":
            return {"vllm_config": {"model_config": {"logprobs_mode": self.logprobs_mode}}}
        if path == "/v1/models":
            return {"data": [{"id": "tiny"}]}
        if path == "/get_world_size":
            return {"world_size": 1}
        if path == "/start_weight_update":
            self.updating = True
        elif path == "/update_weights":
            assert self.updating
            self._take_weights(**body["update_info"])
        elif path == "/finish_weight_update":
            self.updating = False
            self.updates += 1
        elif path == "/reset_prefix_cache":
            return {"success": True}
        elif path == "/v1/completions":
            assert not self.updating, "asked for completions in the middle of an update"
            assert self.hold.wait(DEADLINE_S)
            return {"choices": self._complete(body)}
        return {}

    def broadcast(self, data: bytes) -> None:
        self._broadcasts.put(safetensors.torch.load(data))

    def _take_weights(self, names: list[str], dtype_names: list[str], shapes: list[list[int]]) -> None:
        tensors = [tensor for _, tensor in sorted(self._broadcasts.get(timeout=DEADLINE_S).items())]
        described = [(str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in tensors]
        assert described == list(zip(dtype_names, shapes, strict=True))
        assert self.model is not None
        wanted = dict(self.model.named_parameters())
        assert sorted(names) == sorted(wanted), "not the names of a checkpoint"
        with torch.no_grad():
            for name, tensor in zip(names, tensors, strict=True):
                wanted[name].copy_(tensor)

    def _complete(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        assert self.model is not None
        prompts = [prompt for prompt in body["prompt"] for _ in range(body["n"])]
        end = body.get("stop_token_ids") or self.model.config.eos_token_id
        sampling = {"temperature": body["temperature"], "top_k": None}
        engine = transformers_of(self.model, body["max_tokens"], self.model.config.pad_token_id, end, sampling)
        completions, logprobs = sample(engine, prompts, seed=len(self.asked))
        return [
            {
                "prompt_token_ids": prompt,
                "token_ids": ids,
                "logprobs": {
                    "tokens": [f"token_id:{token}" for token in ids],
                    "token_logprobs": values,
                    "top_logprobs": [{f"token_id:{token}": value} for token, value in zip(ids, values, strict=True)],
                },
            }
            for prompt, ids, values in zip(prompts, completions, logprobs, strict=True)
        ]


class MortalServer(FakeVLLMServer):
    """Starts with weights of its own, and dies in the middle of requests: those of `dies_at`, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.dies_at: list[str] = []
        self.process = StubProcess(self)
        self.begin()

    def begin(self) -> None:
        self.model, self.updating = build_model(build_tokenizer(), seed=9), False

    def started_by(self, plan: Any) -> StubProcess:
        """In the place of `VLLMServerProcess`."""
        self.process.plans.append(plan)
        return self.process

    def reply(self, path: str, body: Any) -> Any:
        if not self.process.running or self.dies_at[:1] == [path]:
            self.dies_at = self.dies_at[1:]
            self.process.running = False
            raise ConnectionAbortedError("the server dies")
        return super().reply(path, body)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Its death needs no traceback."""


class StubProcess:
    """The process of a `MortalServer`, which is a thread."""

    answered, revive = VLLMServerProcess.answered, VLLMServerProcess.revive
    _plan = property(lambda self: self.plans[-1])

    def __init__(self, server: MortalServer) -> None:
        self._server = server
        self._deaths = self.starts = 0
        self.base_url = server.url
        self.running = False
        self.plans: list[Any] = []

    def start(self) -> None:
        self.running, self.starts = True, self.starts + 1

    def restart(self) -> None:
        self._server.begin()
        self.start()

    def answers(self) -> bool:
        return self.running

    def wait_ready(self) -> None:
        assert self.running

    def end(self, grace_s: float = 1.0) -> None:
        self.running = False

    def last_words(self) -> str:
        return "Killed"


class _Handler(BaseHTTPRequestHandler):
    server: FakeVLLMServer

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/nccl":
            self.server.broadcast(data)
            self._send(200, {})
        else:
            self._answer(json.loads(data) if data else None)

    def _answer(self, body: Any) -> None:
        path = urlparse(self.path).path
        self.server.asked.append((path, body))
        status, answer = self.server.answers.get(path) or (200, self.server.reply(path, body))
        self._send(status, answer)

    def _send(self, status: int, answer: Any) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with suppress(ConnectionError):  # who asked may be gone
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the test looks at `asked`."""


@contextmanager
def serving(server: FakeVLLMServer) -> Iterator[FakeVLLMServer]:
    """Answer requests until the block ends."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.hold.set()
        server.shutdown()
        server.server_close()
        thread.join()


def send_weights_by_http(url: str, patch: pytest.MonkeyPatch) -> None:
    """Put `setups/fake_nccl.py` in the place of NCCL, until the end of the test."""
    patch.syspath_prepend(str(Path(__file__).parent / "setups"))
    import fake_nccl

    names = ("is_vllm_available", "_HAS_STATEFUL_TRAINER_ENGINE", "get_ip", "open_trainer_endpoint")
    for name in (*names, "packed_nccl_broadcast_producer"):
        patch.setattr(vllm_client, name, None, raising=False)
    patch.setattr(VLLMClient, "init_communicator", VLLMClient.init_communicator)
    patch.setattr(importlib.util, "find_spec", importlib.util.find_spec)
    fake_nccl.install(url)
