"""A vLLM server is told to take what is published; a stand-in for it reads the memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer
from threading import Thread
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from async_grpo_ipc import FeedError, VLLMFeed, WeightExporter, open_remote_memory
from async_grpo_ipc.checkpoint import Adapter, checkpoint
from kit.fake_vllm_server import FakeVLLMServer, serving


class Server(FakeVLLMServer):
    """Reads each version that it is told to take, as the backend in vLLM does."""

    def reply(self, path: str, body: Any) -> Any:
        if path == "/init_weight_transfer_engine":
            self.handle = body["init_info"]["handle"]
        if path != "/update_weights":
            return super().reply(path, body)
        wanted = body["update_info"]
        with open_remote_memory(self.handle) as remote, remote.lease(version=wanted["version"]) as view:
            assert view.generation == wanted["generation"] or not wanted["generation"]
            self.weights = {name: tensor.clone() for name, tensor in view.items()}
        return {}


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(Server()) as server:
        yield server


@contextmanager
def no_http_server() -> Iterator[str]:
    """The address of a program that answers to whatever it is asked, and not in HTTP."""

    class Other(BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(4096)
            self.request.sendall(b"-ERR unknown command\r\n")

    with ThreadingTCPServer(("127.0.0.1", 0), Other) as other:
        thread = Thread(target=other.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{other.server_address[1]}"
        other.shutdown()
        thread.join()


UPDATE = ["/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache"]


def test_a_version_is_taken_in_the_order_that_vllm_wants(server: Server, tmp_path: Path) -> None:
    weights = {"w": torch.zeros(3)}
    with WeightExporter.from_tensors(weights, tmp_path / "handle.json") as exporter:
        feed = VLLMFeed(server.url, exporter.path)
        for version in (1, 2):
            weights["w"].fill_(version)
            exporter.publish(version)
            feed.take(version)
            assert server.weights["w"].eq(version).all()
    assert [path for path, _ in server.asked] == ["/init_weight_transfer_engine", *UPDATE, *UPDATE]


def test_what_cannot_be_had_is_a_sentence(server: Server, tmp_path: Path) -> None:
    nobody = VLLMFeed("http://127.0.0.1:9", tmp_path / "handle.json")
    with pytest.raises(FeedError, match=r"No vLLM server answers at http://127.0.0.1:9.*--weight-transfer-config"):
        nobody.take(1)
    with pytest.raises(FeedError):
        nobody.wait_ready(0.0)
    with no_http_server() as url:
        for ask in (VLLMFeed(url, tmp_path / "handle.json").resume, lambda: VLLMFeed(url, tmp_path).wait_ready(0.0)):
            with pytest.raises(FeedError, match=f"No vLLM server answers at {url}"):
                ask()
    server.answers["/resume"] = (404, {})
    with pytest.raises(FeedError, match=r"answered /resume with 404.*VLLM_SERVER_DEV_MODE=1"):
        VLLMFeed(server.url, tmp_path / "handle.json").resume()


# --- Published tensors under a checkpoint's names, with the adapter merged as PEFT merges it ---------------------

SMALL: dict[str, Any] = {"vocab_size": 16, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}


def llama() -> nn.Module:
    config = LlamaConfig(**SMALL, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    return LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    """Its layers store their weights transposed (`fan_in_fan_out`)."""
    return GPT2LMHeadModel(GPT2Config(**SMALL, n_embd=8, n_layer=1, n_head=2, n_positions=8))


@pytest.mark.parametrize(
    ("build", "modules"), [(llama, ["q_proj", "down_proj"]), (llama, ["embed_tokens", "v_proj"]), (gpt2, ["c_attn"])]
)
def test_an_adapter_is_merged_as_peft_merges_it(build: Any, modules: list[str]) -> None:
    config = LoraConfig(r=2, lora_alpha=8, target_modules=modules, init_lora_weights=False, use_rslora=True)
    model = get_peft_model(build(), config)
    layers = {
        name: (module.scaling["default"], bool(getattr(module, "fan_in_fan_out", False)) or "Emb" in str(type(module)))
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }
    adapter = Adapter.of_json(json.loads(json.dumps(Adapter("default", layers).as_json())))
    found = dict(checkpoint(((name, p.detach()) for name, p in model.named_parameters()), adapter))
    merged = model.merge_and_unload()
    expected = {name: p.detach() for name, p in merged.named_parameters()}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=1e-5, msg=name)


def test_tied_weights_come_once() -> None:
    weight = torch.ones(3)
    tensors = {"embed.weight": weight, "head.weight": weight.view(3), "bias": torch.zeros(3)}
    assert list(dict(checkpoint(tensors.items()))) == ["embed.weight", "bias"]
