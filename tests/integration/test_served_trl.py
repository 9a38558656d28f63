"""Plain TRL with a vLLM server of its own, which it is trained with to the end, unless the server dies.

The server is the small one of `fake_vllm_server.py` and its process a stub, so all that is real is TRL and its client.
The real server is in `tests/with_vllm`, and the life of a process in `tests/unit/serving`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trl.generation import vllm_client
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from async_grpo.errors import GeneratorError, UnsupportedError, UsageError
from async_grpo.roles import served_trl
from async_grpo.roles.served_trl import HOOKS, own_server
from kit.fake_vllm_server import MortalServer, send_weights_by_http, serving
from kit.tiny_trainer import build_trainer

pytestmark = pytest.mark.integration


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[MortalServer]:
    monkeypatch.setattr("trl.generation.vllm_generation.is_vllm_available", lambda: True)
    with serving(MortalServer()) as mortal:
        send_weights_by_http(mortal.url, monkeypatch)
        monkeypatch.setattr(served_trl, "VLLMServerProcess", mortal.started_by)
        yield mortal


def train(tmp_path: Path, steps: int = 3, **changes: Any) -> Any:
    """The trainer after its training."""
    asks = {"use_vllm": True, "vllm_mode": "server", "vllm_importance_sampling_correction": True}
    with own_server(tmp_path / "run", None):
        trainer = build_trainer(tmp_path, max_steps=steps, **{**asks, **changes})
        trainer.train()
    return trainer


def mismatches(trainer: Any) -> list[float]:
    """How far the server's log-probabilities were from the trainer's, by step."""
    name = "sampling/sampling_logp_difference/max"
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def test_it_is_started_with_what_the_trainer_has_fed_and_ended(server: MortalServer, tmp_path: Path) -> None:
    (mine := tmp_path / "run" / "vllm_server" / "notes.txt").parent.mkdir(parents=True)
    mine.write_text("a user's")
    trainer = train(tmp_path, vllm_max_model_length=64)
    assert trainer.state.global_step == server.updates == 3
    assert max(mismatches(trainer)) < 1e-4, "it sampled with the very weights of the step"
    [plan] = server.process.plans
    assert (plan.weights, plan.log) == ("nccl", tmp_path / "run" / "log_vllm_server.txt")
    arguments = " ".join(plan.arguments)
    assert "--dtype float32" in arguments and "--max-model-len 64" in arguments and "--load-format dummy" in arguments
    assert not server.process.running
    assert not Path(plan.model).exists()
    assert mine.read_text() == "a user's"


def test_what_the_server_reads_of_the_model_is_a_model(server: MortalServer, tmp_path: Path) -> None:
    with own_server(tmp_path / "run", None):
        build_trainer(tmp_path, use_vllm=True, vllm_mode="server")
        described = Path(server.process.plans[0].model)
        assert json.loads((described / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
        assert (described / "tokenizer.json").exists()
        assert described.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("at", ["/v1/completions", "/start_weight_update", "/reset_prefix_cache"])
def test_a_server_that_dies_ends_the_run_with_its_last_words(server: MortalServer, tmp_path: Path, at: str) -> None:
    server.dies_at = [at]
    with pytest.raises(GeneratorError, match=r"(?s)log_vllm_server.txt:\nKilled\nThe same command continues the run"):
        train(tmp_path)
    assert (server.process.starts, server.process.running) == (1, False)


def test_a_death_during_an_update(server: MortalServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL would wait for it for ever."""
    never = threading.Event()

    def broadcast(*given: Any, **named: Any) -> None:
        server.process.running = False
        never.wait()  # in a thread that ends with the tests

    monkeypatch.setattr("async_grpo.engines.served.client.SAY_EVERY_S", 0.1)
    monkeypatch.setattr(vllm_client, "packed_nccl_broadcast_producer", broadcast)
    with pytest.raises(GeneratorError, match="is gone"):
        train(tmp_path)


def test_a_request_that_a_living_server_refuses_is_no_death(server: MortalServer, tmp_path: Path) -> None:
    server.answers["/update_weights"] = (500, {"error": "KeyError: lm_head"})
    with pytest.raises(GeneratorError, match="lm_head"):
        train(tmp_path)
    assert (server.process.starts, server.process.running) == (1, False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vllm_mode": "colocate"}, r'vllm_mode="colocate". Add --set use_vllm=true --set vllm_mode=server'),
        ({"vllm_server_base_url": "http://other:8000"}, r"names one that runs already"),
    ],
)
def test_a_file_that_asks_otherwise_is_refused(server: MortalServer, tmp_path: Path, changes: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        train(tmp_path, **changes)
    assert server.process.starts == 0


def test_without_a_gpu_trl_sends_nothing(server: MortalServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(self: Any, device: torch.device) -> None:
        raise NotImplementedError("it needs a CUDA device")

    monkeypatch.setattr(VLLMClient, "init_communicator", none)
    with pytest.raises(UnsupportedError, match=r"needs a CUDA device.*--set use_vllm=false"):
        train(tmp_path)
    assert not server.process.running


def test_trl_has_the_methods_that_are_replaced() -> None:
    for name in HOOKS:
        assert callable(getattr(VLLMGeneration, name, None)), f"VLLMGeneration.{name} is gone: see roles/served_trl.py"
