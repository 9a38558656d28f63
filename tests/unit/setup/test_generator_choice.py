"""Which engine the workers take, and a setup file that asks TRL for vLLM."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset, Features, Image, List, Value

from async_grpo.errors import UnsupportedError, UsageError
from async_grpo.settings import WorkerSettings
from async_grpo.setup.generator_choice import (
    ENGINES,
    HF,
    NAMED_SERVER,
    STARTED_SERVER,
    VLLM,
    Capabilities,
    check_generator_options,
    choose_generator,
    engines_left_to_workers,
    wants_vllm,
)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    def set_to(value: bool) -> None:
        spec = SimpleNamespace(origin="there") if value else None
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)

    return set_to


def trainer(wish: bool = False, mode: str = "colocate", train_dataset: Any = None) -> Any:
    args = SimpleNamespace(vllm_mode=mode)
    return SimpleNamespace(async_grpo_wants_vllm=wish, args=args, model=None, train_dataset=train_dataset)


@pytest.mark.parametrize(
    ("asked", "wish", "on_gpu", "there", "chosen"),
    [
        (None, False, False, True, "hf"),
        (None, False, True, True, "vllm"),
        (None, False, True, False, "hf"),
        (None, True, False, True, "vllm"),
        ("hf", True, True, True, "hf"),
        ("vllm", False, False, True, "vllm"),
        ("vllm-server", False, False, True, "vllm-server"),
    ],
)
def test_the_engine(asked: str | None, wish: bool, on_gpu: bool, there: bool, chosen: str, installed: Any) -> None:
    installed(there)
    assert choose_generator(asked, trainer(wish), on_gpu=on_gpu).name == chosen


@pytest.mark.parametrize(
    "features",
    [
        {"prompt": Value("string"), "image": Image()},
        {"prompt": Value("string"), "image": Value("string")},
        {"prompt": List({"role": Value("string"), "content": List({"type": Value("string"), "picture": Image()})})},
    ],
)
def test_images_are_for_engines_of_the_workers_and_for_vllm_where_it_is_asked(
    features: dict[str, Any], installed: Any
) -> None:
    installed(True)
    data = Dataset.from_dict({name: [] for name in features}, features=Features(features))
    assert choose_generator(None, trainer(train_dataset=data), on_gpu=True) == HF
    assert choose_generator("vllm", trainer(train_dataset=data), on_gpu=True) == VLLM
    assert choose_generator(None, trainer(wish=True, train_dataset=data), on_gpu=True) == VLLM
    assert choose_generator("hf", trainer(wish=True, mode="server", train_dataset=data), on_gpu=True) == HF
    of_unsloth = trainer(train_dataset=data)
    of_unsloth.model = SimpleNamespace(vllm_engine=object())
    in_server = trainer(wish=True, mode="server", train_dataset=data)
    for asked, given in ((None, in_server), ("vllm-server", trainer(train_dataset=data)), (None, of_unsloth)):
        with pytest.raises(UnsupportedError, match=r"has images.*--generator vllm.*--generator hf"):
            choose_generator(asked, given, on_gpu=True)


@pytest.mark.parametrize(
    ("asked", "who"),
    [("vllm", "--generator vllm"), ("vllm-server", "--generator vllm-server"), (None, "use_vllm=True")],
)
def test_a_missing_vllm_is_a_sentence_that_says_what_to_do(asked: str | None, who: str, installed: Any) -> None:
    installed(False)
    with pytest.raises(UsageError, match=rf"{who}.*not installed.*pip install"):
        choose_generator(asked, trainer(wish=True), on_gpu=True)


def test_a_server_generates_where_the_file_asks_for_vllm(installed: Any) -> None:
    installed(True)
    assert choose_generator(None, trainer(wish=True, mode="server"), on_gpu=True) == NAMED_SERVER
    assert choose_generator("vllm", trainer(wish=True, mode="server"), on_gpu=True) == NAMED_SERVER
    assert choose_generator("hf", trainer(wish=True, mode="server"), on_gpu=True) == HF
    assert choose_generator(None, trainer(wish=False, mode="server"), on_gpu=True) == VLLM


def test_a_server_of_the_setup_file_is_fed_by_one_worker() -> None:
    check_generator_options(NAMED_SERVER, WorkerSettings(), workers=1)
    check_generator_options(STARTED_SERVER, WorkerSettings(server_devices="1,2"), workers=2)
    with pytest.raises(UnsupportedError, match="--num-workers 1"):
        check_generator_options(NAMED_SERVER, WorkerSettings(), workers=2)


@pytest.mark.parametrize("server", [NAMED_SERVER, STARTED_SERVER])
def test_a_server_is_not_deterministic(server: Capabilities) -> None:
    with pytest.raises(UnsupportedError, match=rf'{server.words}: .* vllm \(with vllm_mode="colocate"\) or'):
        check_generator_options(server, WorkerSettings(), deterministic=True)


@pytest.mark.parametrize("engine", ENGINES.values())
def test_weights_change_in_flight_where_groups_join_in_flight(engine: Capabilities) -> None:
    check_generator_options(engine, WorkerSettings())
    refused = pytest.raises(UsageError, match=rf"{engine.words}: a batch .* weights that began it.* --generator vllm")
    with refused if engine != VLLM else nullcontext():
        check_generator_options(engine, WorkerSettings(in_flight_update="on"))


def test_an_engine_inside_the_model_generates() -> None:
    with_engine = trainer()
    with_engine.model = SimpleNamespace(vllm_engine=object())
    assert choose_generator(None, with_engine, on_gpu=True) == VLLM
    with pytest.raises(UsageError, match="fast_inference=False"):
        choose_generator("hf", with_engine, on_gpu=True)


def test_a_file_with_use_vllm_starts_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    import trl

    seen: list[bool] = []

    def build(self: Any, model: Any, reward_funcs: Any, args: Any = None) -> None:
        self.args = args
        seen.append(args is not None and args.use_vllm)

    monkeypatch.setattr(trl.GRPOTrainer, "__init__", build)

    class Users(trl.GRPOTrainer):
        def __init__(self, args: Any) -> None:
            super().__init__("model", None, args)

    with engines_left_to_workers():
        asked = Users(SimpleNamespace(use_vllm=True, vllm_mode="colocate"))
        other = trl.GRPOTrainer("model", None)
    assert seen == [False, False]
    assert (wants_vllm(asked), wants_vllm(other)) == (True, False)
    assert trl.GRPOTrainer.__init__ is build, "plain TRL is as it was"


def test_updates_in_flight_depend_on_timing() -> None:
    with pytest.raises(UsageError, match="cannot be combined with --deterministic"):
        check_generator_options(VLLM, WorkerSettings(in_flight_update="on"), deterministic=True)
