"""What happens before a vLLM engine is built: which model runner it gets, and which other engine has to start first."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from async_grpo.engines import vllm_hooks
from async_grpo.errors import WaitTimeoutError
from async_grpo.rollout import engine_choice
from async_grpo.rundir.locks import KernelLock
from async_grpo.rundir.paths import RunDir


def second_runner(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    module = ModuleType(vllm_hooks.V2_RUNNER)
    module.GPUModelRunner = SimpleNamespace(**dict.fromkeys(names))  # type: ignore[attr-defined]
    parts = vllm_hooks.V2_RUNNER.split(".")
    for end in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    monkeypatch.setitem(sys.modules, vllm_hooks.V2_RUNNER, module)


@pytest.mark.parametrize(
    ("has", "env", "after"),
    [
        (vllm_hooks.OF_A_RUNNER, {}, None),
        (vllm_hooks.OF_A_RUNNER[:-1], {}, "0"),
        (vllm_hooks.OF_A_RUNNER[:-1], {vllm_hooks.SWITCH: "1"}, "1"),
    ],
)
def test_vllms_second_runner_is_left_out_where_it_lacks_what_we_use(
    has: tuple[str, ...], env: dict[str, str], after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    second_runner(monkeypatch, *has)
    vllm_hooks.choose_model_runner(env)
    assert env.get(vllm_hooks.SWITCH) == after


def test_a_vllm_without_a_second_runner_needs_no_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    env: dict[str, str] = {}
    vllm_hooks.choose_model_runner(env)
    assert env == {}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "alive").mkdir()
    return RunDir(tmp_path)


def test_engines_of_one_gpu_start_one_after_the_other(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    other = KernelLock(run.engine_start("5"))
    assert other.try_acquire()
    monkeypatch.setattr(engine_choice, "ENGINE_START_S", 0.05)
    with pytest.raises(WaitTimeoutError, match="another worker on the same GPU to load its model"):
        with engine_choice.alone_on_the_gpu(run, {"CUDA_VISIBLE_DEVICES": "5"}):
            pass
    with engine_choice.alone_on_the_gpu(run, {"CUDA_VISIBLE_DEVICES": "4"}):
        pass  # another GPU
    monkeypatch.setattr(engine_choice, "ENGINE_START_S", 30.0)
    threading.Timer(0.05, other.release).start()
    with engine_choice.alone_on_the_gpu(run, {"CUDA_VISIBLE_DEVICES": "5"}):
        assert not other.try_acquire()
    assert other.try_acquire(), "free for the next once the engine is built"
    other.release()


def test_on_the_cpu_nothing_is_waited_for(run: RunDir) -> None:
    with engine_choice.alone_on_the_gpu(run, {"CUDA_VISIBLE_DEVICES": ""}):
        assert list((run.root / "alive").iterdir()) == []
