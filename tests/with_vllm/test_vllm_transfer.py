"""vLLM's own engine class with the backend `async_grpo_ipc`: it maps the published weights and loads them.

The names of vLLM that `async_grpo_ipc.vllm_engine` uses, and weights against transformers: also those that a CPU packs.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import qwen3_1m
import requests
import torch

from async_grpo.engines.vllm import ENVIRONMENT
from async_grpo.serving.vllm_server import ServerPlan, VLLMServerProcess
from async_grpo_ipc import MismatchError, VersionGoneError, WeightExporter
from async_grpo_ipc.vllm_engine import BACKEND, SharedMemoryEngine, register
from kit.runs import ROOT

TOKENIZER = qwen3_1m.build_tokenizer()
PROMPTS = [TOKENIZER(text)["input_ids"] for text in ("1+1=", "7+3=", "hello")]


@pytest.fixture(scope="module")
def model() -> Any:
    return qwen3_1m.build_model(TOKENIZER)


@pytest.fixture(scope="module")
def llm(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with started(model, tmp_path_factory.mktemp("model")) as engine:
        yield engine


@contextmanager
def started(model: Any, folder: Path, *, packed: bool = True) -> Iterator[Any]:
    """A server's engine; without packed layers, as it is on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        model.save_pretrained(folder)
        TOKENIZER.save_pretrained(folder)
        from vllm import LLM, _custom_ops

        if not packed:
            patch.setattr(_custom_ops, "_supports_onednn", False)
        options = {"enforce_eager": True, "max_model_len": 128, "weight_transfer_config": {"backend": BACKEND}}
        engine = LLM(model=str(folder), dtype="float32", **options)
        yield engine
        engine.llm_engine.engine_core.shutdown()


@pytest.fixture
def exporter(model: Any, tmp_path: Path) -> Iterator[WeightExporter]:
    with WeightExporter.from_model(model, tmp_path / "handle.json") as exporter:
        yield exporter


def take(llm: Any, **update: Any) -> None:
    llm.start_weight_update()
    llm.update_weights({"update_info": update})
    llm.finish_weight_update()
    llm.reset_prefix_cache()


def change(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * torch.randn_like(parameter))


def greedy(llm: Any) -> list[list[int]]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=16, stop_token_ids=[TOKENIZER.eos_token_id])
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, sampling, use_tqdm=False)]


def greedy_of_transformers(model: Any) -> list[list[int]]:
    end, pad = TOKENIZER.eos_token_id, TOKENIZER.pad_token_id
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": end, "pad_token_id": pad}
    return [model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist() for ids in PROMPTS]


def test_vllm_finds_the_backend_and_has_what_it_uses() -> None:
    (found,) = entry_points(group="vllm.general_plugins", name=BACKEND)
    assert found.load() is register
    register()
    register()  # once in each of vLLM's processes, at least
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    assert WeightTransferEngineFactory._registry[BACKEND]() is SharedMemoryEngine
    assert not SharedMemoryEngine.__abstractmethods__, "vLLM asks more of an engine; async_grpo_ipc.vllm_engine follows"


def test_each_version_gives_the_tokens_of_transformers(llm: Any, model: Any, exporter: WeightExporter) -> None:
    llm.init_weight_transfer_engine({"init_info": {"handle": str(exporter.path)}})
    seen = []
    for version in (1, 2, 3):
        change(model)
        exporter.publish(version)
        take(llm, version=version, generation=exporter.generation)
        seen.append(greedy(llm))
        assert seen[-1] == greedy_of_transformers(model)
    assert len({str(tokens) for tokens in seen}) > 1, "the updates changed nothing"


def test_a_new_exporter_is_followed_and_a_wrong_one_refused(llm: Any, model: Any, exporter: WeightExporter) -> None:
    llm.init_weight_transfer_engine({"init_info": {"handle": str(exporter.path)}})
    for version in (1, 2, 3):
        exporter.publish(version)
    with pytest.raises(VersionGoneError):
        take(llm, version=1)
    with pytest.raises(MismatchError, match="exporter another"):
        take(llm, version=3, generation="another")
    take(llm, version=3)
    exporter.close()
    change(model)
    with WeightExporter.from_model(model, exporter.path) as again:
        again.publish(1)
        take(llm, version=1, generation=again.generation)
        assert greedy(llm) == greedy_of_transformers(model)


def test_later_versions_are_copied_without_vllms_loading(
    model: Any, exporter: WeightExporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test here: the end of its engine takes what engines of one process share."""
    with started(model, tmp_path / "model", packed=False) as llm:
        llm.init_weight_transfer_engine({"init_info": {"handle": str(exporter.path)}})
        inner = llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
        calls = []
        load = inner.load_weights
        monkeypatch.setattr(inner, "load_weights", lambda weights: calls.append(1) or load(weights))
        for version in (1, 2, 3):
            change(model)
            exporter.publish(version)
            take(llm, version=version)
            assert greedy(llm) == greedy_of_transformers(model)
        assert len(calls) == 1, "every layer is looked up in Python again"


# --- `examples/feed_vllm.py` with a real server of two processes, that `VLLMServerProcess` starts

DEADLINE_S = 300


def test_a_server_with_tensor_parallelism_is_fed(tmp_path: Path) -> None:
    model, tokenizer = tmp_path / "model", qwen3_1m.build_tokenizer()
    qwen3_1m.build_model(tokenizer).save_pretrained(model)
    tokenizer.save_pretrained(model)
    arguments = ("--enforce-eager", "--dtype", "float32", "--max-model-len", "64")
    plan = ServerPlan(model=str(model), port=8100, log=tmp_path / "log", tensor_parallel_size=2, arguments=arguments)
    with VLLMServerProcess(plan) as server:
        server.wait_ready(DEADLINE_S)
        by_a_page = {"Origin": "http://evil.example"}
        answer = requests.post(f"{server.base_url}/reset_prefix_cache", headers=by_a_page, timeout=DEADLINE_S)
        assert answer.status_code == 403, "vLLM answers every page of the web"
        command = [sys.executable, str(ROOT / "examples" / "feed_vllm.py"), str(model), server.base_url]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        assert done.returncode == 0, done.stderr
        said = [line.rpartition(" says ")[2] for line in done.stdout.splitlines() if line.startswith("version ")]
        assert len(said) == 5 and len(set(said)) > 1, said
    assert not server.running
