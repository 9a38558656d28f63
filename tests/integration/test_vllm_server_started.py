"""A vLLM server that the worker starts and feeds through memory: what the worker does when it dies.

The server is the small one of `fake_vllm_server.py`, which reads the published memory as the backend in vLLM does, and
the process is a stub. The real ones are in `tests/with_vllm`, and the life of a process in `tests/unit/serving`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from trl.generation import vllm_client
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from async_grpo.engines import SampledGroup
from async_grpo.engines.served import started
from async_grpo.engines.served.started import FedPolicy, StartedServer
from async_grpo.errors import GeneratorError, UnsupportedError, UsageError
from async_grpo.roles import served_trl
from async_grpo.roles.served_trl import HOOKS, own_server
from async_grpo.rollout.trl_trainer import RolloutTrainer
from async_grpo_ipc import RemoteWeights, WeightExporter, attachment, open_remote_memory
from async_grpo_ipc.checkpoint import Adapter, checkpoint
from kit.engines import group, logprobs_of, run
from kit.fake_cuda import Knobs, install
from kit.fake_vllm_server import MortalServer, send_weights_by_http, serving
from kit.tiny_trainer import build_model, build_tokenizer, build_trainer

PROMPT = [1, 2, 3]
Fed = tuple[StartedServer, FedPolicy]


class FedServer(MortalServer):
    """Takes its weights out of the memory that it was told of."""

    def begin(self) -> None:
        super().begin()
        self.taken: list[int] = getattr(self, "taken", [])
        self.source: dict[str, Any] = {}  # it knows of no handle file

    def reply(self, path: str, body: Any) -> Any:
        if path == "/init_weight_transfer_engine":
            self.source = body["init_info"]
        return super().reply(path, body)

    def _take_weights(self, version: int, generation: str) -> None:  # type: ignore[override]
        assert self.model is not None
        adapter = Adapter.of_json(self.source["adapter"]) if self.source["adapter"] else None
        with open_remote_memory(self.source["handle"]) as remote, remote.lease(version=version) as view:
            assert view.generation == generation
            tensors = dict(checkpoint(view.items(), adapter))
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    parameter.copy_(tensors[name])
        self.taken.append(version)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FedServer]:
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda min_version=None: True)
    with serving(FedServer()) as fake:
        monkeypatch.setattr(started, "VLLMServerProcess", fake.started_by)
        yield fake


@pytest.fixture
def model() -> Any:
    """The trainer's."""
    return build_model(build_tokenizer(), seed=4)


@pytest.fixture
def exporter(model: Any, tmp_path: Path) -> Iterator[WeightExporter]:
    with WeightExporter.from_model(model, tmp_path / "handle.json", slots=3) as exporter:
        exporter.publish(1)
        yield exporter


def change(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)


def engine_of(tmp_path: Path, **changes: Any) -> StartedServer:
    trainer = build_trainer(tmp_path, **changes)
    RolloutTrainer(trainer)
    folder, handle = tmp_path / "engine", tmp_path / "handle.json"
    return StartedServer(trainer, folder=folder, log=tmp_path / "log", handle=handle, number=1, seed=0, devices=None)


@pytest.fixture
def remote(exporter: WeightExporter) -> Iterator[RemoteWeights]:
    with open_remote_memory(exporter.path) as remote:
        yield remote


@pytest.fixture
def fed(server: FedServer, remote: RemoteWeights, tmp_path: Path) -> Iterator[Fed]:
    engine = engine_of(tmp_path)
    yield engine, engine.follow(remote)
    engine.end()
    assert not (tmp_path / "engine").exists()


def sample(engine: StartedServer, version: int) -> SampledGroup:
    [sampled] = run(engine, [replace(group([PROMPT] * 2), version=version)])
    return sampled


def check(sampled: SampledGroup, model: Any) -> None:
    for tokens in sampled.tokens:
        expected = logprobs_of(model, PROMPT, tokens.ids)
        torch.testing.assert_close(torch.tensor(tokens.logprobs), expected, atol=1e-5, rtol=0)


def test_memory_is_given_back_before_start(server: FedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes what is free on the GPU, and torch keeps what the worker's model had until it is asked for it."""
    order: list[str] = []
    trainers: list[Any] = []

    def plan(trainer: Any, *_: Any) -> None:
        trainers.append(trainer)

    def given_back() -> None:
        (trainer,) = trainers
        order.append("given back" if all(p.is_meta for p in trainer.model.parameters()) else "still there")

    monkeypatch.setattr(started, "_plan", plan)
    monkeypatch.setattr(torch.cuda, "empty_cache", given_back)
    monkeypatch.setattr(server.process, "start", lambda: order.append("server starts"))
    engine_of(tmp_path).end()
    assert order == ["given back", "server starts"]


def test_it_samples_with_each_version_and_takes_it_once(
    fed: Fed, server: FedServer, remote: RemoteWeights, exporter: WeightExporter, model: Any
) -> None:
    engine, policy = fed
    assert [policy.adopt(), policy.adopt()] == [1, 1]
    check(sample(engine, 1), model)
    remote.release()
    change(model)
    exporter.publish(2)
    assert policy.adopt() == 2
    check(sample(engine, 2), model)
    assert server.taken == [1, 2]


def test_a_server_that_dies_is_asked_again_with_the_version_of_its_groups(
    fed: Fed, server: FedServer, remote: RemoteWeights, exporter: WeightExporter, model: Any
) -> None:
    engine, policy = fed
    server.dies_at = ["/v1/completions"] * 2
    assert policy.adopt() == 1
    before = build_model(build_tokenizer(), seed=4)
    for version in (2, 3, 4):  # the slot of version 1 is held
        change(model)
        exporter.publish(version)
    check(sample(engine, 1), before)
    assert (server.process.starts, server.taken) == (3, [1, 1, 1])
    remote.release()
    assert policy.adopt() == 4
    check(sample(engine, 4), model)


def test_a_server_that_dies_again_and_again_ends_the_worker_with_its_last_words(fed: Fed, server: FedServer) -> None:
    engine, policy = fed
    policy.adopt()
    server.dies_at = ["/v1/completions"] * 9
    with pytest.raises(GeneratorError, match=r"(?s)died 4 times without an answer.*Killed"):
        sample(engine, 1)


def test_a_refused_update_ends_the_server(fed: Fed, server: FedServer) -> None:
    """It has some tensors of the one version and some of the other."""
    _, policy = fed
    server.answers["/update_weights"] = (500, {"error": "KeyError: lm_head"})
    with pytest.raises(GeneratorError, match="lm_head"):
        policy.adopt()
    assert not server.process.running


def test_a_trainer_that_dies_while_it_samples_spoils_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the memory goes with its exporter, but the server has a copy, so the worker finishes its groups."""
    install(Knobs(folder=str(tmp_path)), monkeypatch)
    with WeightExporter.from_model(torch.nn.Linear(3, 2), tmp_path / "handle.json") as exporter:
        exporter.publish(1)
        with open_remote_memory(exporter.path) as remote:
            policy = FedPolicy(remote, SimpleNamespace(take=lambda generation, version: None))  # type: ignore[arg-type]
            assert policy.adopt() == 1
            exporter.publish(2)
            assert not exporter.publish(3), "the server may read version 1 again"
            monkeypatch.setattr(attachment, "is_exiting", lambda pid: True)
            assert remote.intact()
            remote.release()
            assert exporter.publish(3)


def test_an_adapter_is_merged_on_the_way(server: FedServer, tmp_path: Path) -> None:
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(build_model(build_tokenizer(), seed=4), lora)
    with WeightExporter.from_model(model, tmp_path / "handle.json") as exporter:
        exporter.publish(1)
        engine = engine_of(tmp_path, arguments={"peft_config": lora})
        with open_remote_memory(exporter.path) as remote:
            assert engine.follow(remote).adopt() == 1
            check(sample(engine, 1), model)
        engine.end()


def test_a_server_that_is_there_already_is_not_started(server: FedServer, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"Remove vllm_server_base_url"):
        engine_of(tmp_path, vllm_server_base_url="http://127.0.0.1:8000")
    assert server.process.starts == 0


# --- Plain TRL with a vLLM server of its own, which it is trained with to the end, unless the server dies --------


@pytest.fixture
def mortal(monkeypatch: pytest.MonkeyPatch) -> Iterator[MortalServer]:
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


def test_it_is_started_with_what_the_trainer_has_fed_and_ended(mortal: MortalServer, tmp_path: Path) -> None:
    (mine := tmp_path / "run" / "vllm_server" / "notes.txt").parent.mkdir(parents=True)
    mine.write_text("a user's")
    trainer = train(tmp_path, vllm_max_model_length=64)
    assert trainer.state.global_step == mortal.updates == 3
    name = "sampling/sampling_logp_difference/max"
    mismatches = [entry[name] for entry in trainer.state.log_history if name in entry]
    assert max(mismatches) < 1e-4, "it sampled with the very weights of the step"
    [plan] = mortal.process.plans
    assert (plan.weights, plan.log) == ("nccl", tmp_path / "run" / "log_vllm_server.txt")
    arguments = " ".join(plan.arguments)
    assert "--dtype float32" in arguments and "--max-model-len 64" in arguments and "--load-format dummy" in arguments
    assert not mortal.process.running
    assert not Path(plan.model).exists()
    assert mine.read_text() == "a user's"


def test_what_the_server_reads_of_the_model_is_a_model(mortal: MortalServer, tmp_path: Path) -> None:
    with own_server(tmp_path / "run", None):
        build_trainer(tmp_path, use_vllm=True, vllm_mode="server")
        described = Path(mortal.process.plans[0].model)
        assert json.loads((described / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
        assert (described / "tokenizer.json").exists()
        assert described.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("at", ["/v1/completions", "/start_weight_update", "/reset_prefix_cache"])
def test_a_server_that_dies_ends_the_run_with_its_last_words(mortal: MortalServer, tmp_path: Path, at: str) -> None:
    mortal.dies_at = [at]
    with pytest.raises(GeneratorError, match=r"(?s)log_vllm_server.txt:\nKilled\nThe same command continues the run"):
        train(tmp_path)
    assert (mortal.process.starts, mortal.process.running) == (1, False)


def test_a_death_during_an_update(mortal: MortalServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL would wait for it for ever."""
    never = threading.Event()

    def broadcast(*given: Any, **named: Any) -> None:
        mortal.process.running = False
        never.wait()  # in a thread that ends with the tests

    monkeypatch.setattr("async_grpo.engines.served.client.SAY_EVERY_S", 0.1)
    monkeypatch.setattr(vllm_client, "packed_nccl_broadcast_producer", broadcast)
    with pytest.raises(GeneratorError, match="is gone"):
        train(tmp_path)


def test_a_request_that_a_living_server_refuses_is_no_death(mortal: MortalServer, tmp_path: Path) -> None:
    mortal.answers["/update_weights"] = (500, {"error": "KeyError: lm_head"})
    with pytest.raises(GeneratorError, match="lm_head"):
        train(tmp_path)
    assert (mortal.process.starts, mortal.process.running) == (1, False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vllm_mode": "colocate"}, r'vllm_mode="colocate". Add --set use_vllm=true --set vllm_mode=server'),
        ({"vllm_server_base_url": "http://other:8000"}, r"names one that runs already"),
    ],
)
def test_a_file_that_asks_otherwise_is_refused(mortal: MortalServer, tmp_path: Path, changes: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        train(tmp_path, **changes)
    assert mortal.process.starts == 0


def test_without_a_gpu_trl_sends_nothing(mortal: MortalServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(self: Any, device: torch.device) -> None:
        raise NotImplementedError("it needs a CUDA device")

    monkeypatch.setattr(VLLMClient, "init_communicator", none)
    with pytest.raises(UnsupportedError, match=r"needs a CUDA device.*--set use_vllm=false"):
        train(tmp_path)
    assert not mortal.process.running


def test_trl_has_the_methods_that_are_replaced() -> None:
    for name in HOOKS:
        assert callable(getattr(VLLMGeneration, name, None)), f"VLLMGeneration.{name} is gone: see roles/served_trl.py"
