"""A vLLM server as the generator, through TRL's own client.

The server is a small one of ours that generates with transformers (`fake_vllm_server.py`), and NCCL is replaced
(`kit/setups/fake_nccl.py`): it is the one thing that needs GPUs. All else is what runs with a real server.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from trl.generation.vllm_client import VLLMClient

from async_grpo.engines.policy import PolicyWeights
from async_grpo.engines.served import client
from async_grpo.engines.served.elsewhere import ServedPolicy, VLLMServer
from async_grpo.errors import GeneratorError, UnsupportedError, UsageError
from async_grpo.rollout.engine_choice import connect
from async_grpo.rollout.trl_trainer import RolloutTrainer
from async_grpo.rundir.locks import KernelLock
from async_grpo.rundir.paths import RunDir
from async_grpo.setup.generator_choice import NAMED_SERVER, choose_generator, engines_left_to_workers
from async_grpo.tokens import ids_and_logprobs
from async_grpo_ipc import WeightExporter, open_remote_memory
from kit.engines import group, logprobs_of, run, sample
from kit.fake_vllm_server import FakeVLLMServer, send_weights_by_http, serving
from kit.runs import SETUP, logged, ran, steps_logged
from kit.tiny_trainer import build_model, build_tokenizer, build_trainer

SETUPS = SETUP.parent
PROMPT, OTHER = [1, 2, 3], [4, 5]


@pytest.fixture
def server() -> Iterator[FakeVLLMServer]:
    """It starts with other weights than the worker's."""
    with serving(FakeVLLMServer(build_model(build_tokenizer(), seed=9))) as fake:
        yield fake


@pytest.fixture(autouse=True)
def fake_nccl(server: FakeVLLMServer, monkeypatch: pytest.MonkeyPatch) -> None:
    send_weights_by_http(server.url, monkeypatch)


def worker_trainer(tmp_path: Path, url: str, **changes: Any) -> Any:
    """A worker's trainer of a file that names the server at `url`."""
    with engines_left_to_workers():
        asked = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "vllm_server_timeout": 120.0}
        trainer = build_trainer(tmp_path, **{**asked, **changes})
    RolloutTrainer(trainer)
    return trainer


@pytest.fixture
def engine(server: FakeVLLMServer, tmp_path: Path) -> VLLMServer:
    return VLLMServer(worker_trainer(tmp_path, server.url))


def test_it_generates_with_the_weights_that_it_was_sent(server: FakeVLLMServer, tmp_path: Path) -> None:
    trainer = worker_trainer(tmp_path, server.url, temperature=0.7)
    engine = VLLMServer(trainer)
    engine.load()
    sampled = run(engine, [group([PROMPT] * 2), group([OTHER] * 2)])
    completions, logprobs = ids_and_logprobs(tokens for one in sampled for tokens in one.tokens)
    assert len(completions) == len(logprobs) == 4
    for prompt, ids, values in zip([PROMPT, PROMPT, OTHER, OTHER], completions, logprobs, strict=True):
        expected = logprobs_of(trainer.model, prompt, ids, temperature=0.7)
        torch.testing.assert_close(torch.tensor(values), expected, atol=1e-5, rtol=0)
    paths = [path for path, _ in server.asked]
    first, last = paths.index("/start_weight_update"), paths.index("/v1/completions")
    update = ["/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache"]
    assert paths[first : last + 1] == [*update, "/v1/completions"]


def test_sampling_parameters_go_as_trl_sends_them(server: FakeVLLMServer, tmp_path: Path) -> None:
    changes = {"top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "temperature": 0.8}
    kwargs = {"stop_strings": ["</a>"], "frequency_penalty": 0.5}
    trainer = worker_trainer(tmp_path, server.url, **changes, generation_kwargs=kwargs)
    sample(VLLMServer(trainer), [PROMPT] * 3)
    (body,) = server.bodies("/v1/completions")
    expected = {**changes, "n": 3, "max_tokens": 8, "stop": ["</a>"], "frequency_penalty": 0.5, "logprobs": 0}
    assert {name: body[name] for name in expected} == expected
    assert body["prompt"] == [PROMPT], "each prompt once"
    assert body["stop_token_ids"] == sorted(trainer.eos_token_ids)
    assert "detokenize" not in body


def test_groups_of_other_lengths_are_asked_for_together(server: FakeVLLMServer, engine: VLLMServer) -> None:
    groups = [group([PROMPT] * 2), *(group([PROMPT] * 2, max_tokens=most) for most in (2, 5))]
    sampled = run(engine, groups)
    longest = [max(len(tokens.ids) for tokens in one.tokens) for one in sampled]
    assert [one.prepared for one in sampled] == groups and longest == [8, 2, 5]
    assert [body["max_tokens"] for body in server.bodies("/v1/completions")] == [8]


def test_the_group_port_and_the_world_are_trls(server: FakeVLLMServer, tmp_path: Path) -> None:
    VLLMServer(worker_trainer(tmp_path, server.url, vllm_group_port=51999))
    (body,) = server.bodies("/init_weight_transfer_engine")
    assert body["init_info"]["master_port"] == 51999
    assert body["init_info"]["world_size"] == 2


def test_each_version_is_sent_once(server: FakeVLLMServer, tmp_path: Path) -> None:
    trainer = worker_trainer(tmp_path, server.url)
    trained = build_model(build_tokenizer(), seed=4)
    with WeightExporter.from_model(trained, tmp_path / "handle.json") as exporter:
        exporter.publish(1)
        with open_remote_memory(tmp_path / "handle.json") as remote:
            policy = ServedPolicy(remote, PolicyWeights(remote, trainer.model), VLLMServer(trainer))
            assert [policy.adopt(), policy.adopt()] == [1, 1]
            assert server.updates == 1
            with torch.no_grad():
                trained.model.norm.weight.fill_(0.5)
            exporter.publish(2)
            assert policy.adopt() == 2
            assert server.updates == 2
            for (name, ours), theirs in zip(trained.named_parameters(), server.model.parameters(), strict=True):
                torch.testing.assert_close(theirs, ours, msg=name)


@pytest.mark.parametrize("modules", [["q_proj", "down_proj"], "all-linear", ["embed_tokens", "v_proj"]])
def test_an_adapter_is_merged_into_what_is_sent(server: FakeVLLMServer, tmp_path: Path, modules: Any) -> None:
    model = build_model(build_tokenizer(), tie_word_embeddings=False)
    server.model = build_model(build_tokenizer(), seed=9, tie_word_embeddings=False)
    lora = LoraConfig(r=4, target_modules=modules, task_type="CAUSAL_LM", init_lora_weights=False, use_rslora=True)
    trainer = worker_trainer(tmp_path, server.url, model=model, arguments={"peft_config": lora})
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    engine = VLLMServer(trainer)
    engine.load()
    completions, logprobs = sample(engine, [PROMPT] * 4)
    for ids, values in zip(completions, logprobs, strict=True):
        expected = logprobs_of(trainer.model, PROMPT, ids)
        torch.testing.assert_close(torch.tensor(values), expected, atol=1e-5, rtol=0)
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(tensor, before[name]), "the worker's own weights, which may be mapped, are not written to"


@pytest.mark.parametrize("changes", [{"use_dora": True}, {"modules_to_save": ["norm"]}])
def test_what_cannot_be_merged_is_refused(server: FakeVLLMServer, tmp_path: Path, changes: dict[str, Any]) -> None:
    lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **changes)
    with pytest.raises(UnsupportedError, match="--generator hf"):
        VLLMServer(worker_trainer(tmp_path, server.url, arguments={"peft_config": lora}))


# --- What goes wrong --------------------------------------------------------------------------------------


def test_a_server_that_is_not_there_is_a_sentence_that_says_how_to_start_it(tmp_path: Path) -> None:
    url = "http://127.0.0.1:1"
    with pytest.raises(GeneratorError, match=rf"{url}.*vllm serve MODEL.*--logprobs-mode processed_logprobs"):
        VLLMServer(worker_trainer(tmp_path, url, vllm_server_timeout=0.1))


def test_a_server_of_other_settings_is_refused(server: FakeVLLMServer, tmp_path: Path) -> None:
    server.logprobs_mode = "raw_logprobs"
    with pytest.raises(UnsupportedError, match=r"returns raw_logprobs.*--logprobs-mode processed_logprobs"):
        VLLMServer(worker_trainer(tmp_path, server.url))
    server.answers["/server_info"] = (404, {"detail": "Not Found"})
    with pytest.raises(UnsupportedError, match=r"(?s)/server_info.* 404.*VLLM_SERVER_DEV_MODE=1"):
        VLLMServer(worker_trainer(tmp_path, server.url))


def test_a_refused_prompt_is_the_jobs_fault_and_an_error_is_the_servers(server: FakeVLLMServer, tmp_path: Path) -> None:
    engine = VLLMServer(worker_trainer(tmp_path, server.url))
    server.answers["/v1/completions"] = (400, {"error": "the prompt is too long"})
    with pytest.raises(ValueError, match="too long"):
        sample(engine, [PROMPT])
    server.answers["/v1/completions"] = (500, {"error": "EngineDeadError"})
    with pytest.raises(GeneratorError, match="EngineDeadError"):
        sample(engine, [PROMPT])
    assert len(server.bodies("/v1/completions")) == 2, "no request is sent again"


def test_a_dying_server_is_noticed(server: FakeVLLMServer, engine: VLLMServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "SAY_EVERY_S", 0.0)
    server.hold.clear()
    server.answers["/health"] = (503, {})
    with pytest.raises(GeneratorError, match="is gone"):
        sample(engine, [PROMPT])


def test_a_worker_is_not_held_up_by_a_server_that_generates(server: FakeVLLMServer, engine: VLLMServer) -> None:
    server.hold.clear()
    assert engine.sample([group([PROMPT])]) == []
    assert engine.sample([]) == []
    engine.close()


def test_a_wait_has_an_end(server: FakeVLLMServer, engine: VLLMServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "GENERATION_S", 0.1)
    server.hold.clear()
    with pytest.raises(GeneratorError, match="1 completions of the vLLM server"):
        sample(engine, [PROMPT])


def test_one_worker_feeds_a_server(server: FakeVLLMServer, tmp_path: Path) -> None:
    trainer = worker_trainer(tmp_path, server.url)
    assert choose_generator(None, trainer, on_gpu=True) == NAMED_SERVER
    lock = KernelLock(RunDir(tmp_path).generator_lock)
    assert lock.try_acquire()
    with pytest.raises(UsageError, match="Another worker feeds the vLLM server"):
        connect(RunDir(tmp_path), trainer)
    lock.release()


def test_trls_client_is_as_we_know_it() -> None:
    parameters = {
        "check_server": ("total_timeout", "retry_interval"),
        "_get": ("url",),
        "_post": ("url",),
        "init_communicator": ("device",),
        "update_named_params": ("metadata", "named_params"),
        "generate": ("prompts", "n", "logprobs", "generation_kwargs"),
    }
    assert set(parameters) == set(client.HOOKS)
    for hook, expected in parameters.items():
        method = getattr(VLLMClient, hook, None)
        follow = "async_grpo.engines.served.client must follow"
        assert callable(method), f"TRL: VLLMClient.{hook} is gone. {follow}."
        names = inspect.signature(method).parameters
        assert set(expected) <= set(names), f"TRL: VLLMClient.{hook} takes {list(names)}. {follow}."
    assert {"base_url", "group_port", "connection_timeout"} <= set(inspect.signature(VLLMClient).parameters)


# --- A run ------------------------------------------------------------------------------------------------


def test_a_run_whose_completions_come_from_a_server(
    server: FakeVLLMServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The synchronous schedule: the ratio to the sampler is 1 only if the server has each version in time."""
    monkeypatch.chdir(tmp_path)  # a trainer makes the folder of its checkpoints
    sys.path.insert(0, str(SETUPS))
    import random_model

    server.model = random_model.get_trainer().model
    with torch.no_grad():
        for parameter in server.model.parameters():
            parameter.normal_()
    config = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server.url}
    arguments = ["train", str(SETUPS / "served_model.py"), "--num-workers", "1", "--max-staleness", "0", "--steps", "4"]
    ran(*arguments, cwd=tmp_path, TEST_VLLM_SERVER=server.url, TEST_GRPO=json.dumps(config))
    assert steps_logged(tmp_path / "worker") == [1, 2, 3, 4]
    ratios = [line[f"async/ratio_{end}"] for line in logged(tmp_path / "worker") for end in ("min", "max")]
    assert ratios == pytest.approx([1.0] * 8, abs=1e-4)
    assert server.updates >= 4
