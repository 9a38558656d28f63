"""Before an engine is built: which model runner vLLM gets, what starts first; and an engine that is not one of ours."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from async_grpo.engines import PreparedGroup, SampledGroup, vllm_hooks
from async_grpo.engines.policy import Policy
from async_grpo.errors import UnsupportedError, WaitTimeoutError
from async_grpo.rollout import engine_choice, worker
from async_grpo.rollout.engine_choice import MAKERS, make_engine
from async_grpo.rundir.locks import KernelLock
from async_grpo.rundir.paths import RunDir
from async_grpo.settings import GENERATORS, WorkerSettings
from async_grpo.setup.generator_choice import ENGINES, Capabilities
from async_grpo.tokens import Tokens
from kit.plans import planned
from kit.worker_fakes import FakeEngine, Setting, job


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
    with pytest.raises(WaitTimeoutError):
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


# --- An engine that is not one of ours takes a file, here this one, a value among `ENGINES`, and a line in `MAKERS`

ECHO = Capabilities("echo", "an echo, in the workers", "echo", joins=True)
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}


class EchoEngine(Policy):
    """Repeats the first token of a prompt, as often as it says. Groups join one another."""

    capabilities, most_groups = ECHO, 2

    def __init__(self) -> None:
        self._open: dict[PreparedGroup, list[Tokens]] = {}
        self.joined: list[int] = []  # jobs that came while others were being sampled

    def sample(self, new: Sequence[PreparedGroup]) -> list[SampledGroup]:
        self.joined += [group.job.seq for group in new if self._open]
        self._open |= {group: [Tokens() for _ in group.prompt_ids] for group in new}
        for group, completions in self._open.items():
            for tokens, prompt in zip(completions, group.prompt_ids, strict=True):
                tokens.extend(Tokens(prompt[:1], [0.0]))
        ended = [group for group, completions in self._open.items() if len(completions[0]) == group.prompt_ids[0][0]]
        return [SampledGroup(prepared=group, tokens=self._open.pop(group)) for group in ended]

    def follow(self, weights: Any) -> Policy:
        self._weights = weights
        return self

    def adopt(self, in_use: Any = ()) -> int | None:
        return self._weights.version

    def close(self) -> None:
        self._open.clear()

    def end(self) -> None:
        self.close()


def made(monkeypatch: pytest.MonkeyPatch, regex: str | None = None, **options: Any) -> Any:
    monkeypatch.setitem(ENGINES, ECHO.name, ECHO)
    monkeypatch.setitem(MAKERS, ECHO, lambda *_: EchoEngine())
    args = SimpleNamespace(**SAMPLING, generation_kwargs=None, vllm_structured_outputs_regex=regex)
    trl: Any = SimpleNamespace(trainer=SimpleNamespace(args=args, model=None), sampled_by=lambda *_: None)
    run: Any = SimpleNamespace(plan=planned(workers=2))
    return make_engine(trl, WorkerSettings(generator="echo", **options), run, run, worker=run, on_gpu=False)


@pytest.mark.parametrize(("joins", "joined"), [(True, [2]), (False, [])])
def test_the_workers_loop_samples_with_it(
    joins: bool, joined: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "LOOK_S", 0.0)
    engine = made(monkeypatch)
    engine.capabilities = replace(ECHO, joins=joins)
    setting = Setting(tmp_path, [job(0, 9), job(1, 2), job(2, 3)], FakeEngine(), batch_engine=engine)
    sampled = {seq: group.completion_ids.tolist() for seq, group in setting.run().items()}
    assert sampled == {0: [9] * 9 * 2, 1: [2] * 2 * 2, 2: [3] * 3 * 2}
    assert engine.joined == joined


def test_what_it_can_and_cannot_is_known_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made(monkeypatch, in_flight_update="on")
    with pytest.raises(UnsupportedError, match="vllm_structured_outputs_regex needs vLLM"):
        made(monkeypatch, regex="a+")


def test_each_engine_can_be_made_and_asked_for() -> None:
    assert {*MAKERS} == {*ENGINES.values()}
    assert [engine.name for engine in ENGINES.values() if not engine.named] == [*GENERATORS]
