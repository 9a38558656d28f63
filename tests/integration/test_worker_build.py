"""A user's trainer as a worker builds it: no reference model, nothing on the Hub, the arithmetic of all ranks."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import Qwen3ForSequenceClassification
from transformers.integrations import integration_utils
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from async_grpo.engines.policy import PolicyWeights, without_weights
from async_grpo.setup.accelerate_config import AccelerateConfig
from async_grpo.setup.generator_choice import engines_left_to_workers, wants_vllm
from async_grpo.setup.setup_file import load_trainer
from async_grpo.setup.worker_build import built_for_a_worker, built_to_describe
from async_grpo_ipc import RemoteWeights, WeightExporter, open_remote_memory
from kit.fake_cuda import Knobs, install
from kit.runs import ROOT, SETUP
from kit.tiny_trainer import build_model, build_tokenizer, build_trainer


def test_a_worker_loads_no_reference_model(tmp_path: Path, model_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    load = grpo_trainer.create_model_from_path
    monkeypatch.setattr(grpo_trainer, "create_model_from_path", lambda path, **_: loaded.append(path) or load(path))
    changes: dict[str, Any] = {"model": model_folder, "beta": 0.1, "sync_ref_model": True, "bf16": False}
    with built_for_a_worker(1):
        trainer = build_trainer(tmp_path, **changes)
    assert loaded == [model_folder], "the policy alone"
    assert trainer.ref_model is None and trainer.accelerator._models == []
    assert (trainer.args.beta, trainer.args.sync_ref_model) == (0.1, True), "what the user's code may read"
    assert trainer.beta == 0.1
    server = build_trainer(tmp_path, **changes)
    assert server.ref_model is not None and len(loaded) == 3


def test_an_adapter_keeps_its_own_reference(tmp_path: Path) -> None:
    """It is among the weights that the server publishes, so a worker's model needs it as well."""

    def get_trainer() -> Any:
        model = get_peft_model(build_model(build_tokenizer()), LoraConfig(target_modules="all-linear"))
        return build_trainer(tmp_path, model=model, beta=0.1)

    names = {name for name, _ in get_trainer().model.named_parameters()}
    with built_for_a_worker(1):
        assert {name for name, _ in get_trainer().model.named_parameters()} == names
    assert any(".ref." in name for name in names)


def test_a_worker_whose_engine_comes_later_is_built_likewise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both change how a trainer is built, and every worker does so in both ways."""
    monkeypatch.setenv("TEST_GRPO", '{"beta": 0.1, "use_vllm": true, "report_to": ["tensorboard"]}')
    monkeypatch.chdir(tmp_path)
    trainer: Any = load_trainer(SETUP, engine_here=False, worker_of=1)
    assert trainer.ref_model is None and trainer.args.report_to == []
    assert wants_vllm(trainer) and trainer.args.beta == 0.1


@pytest.mark.parametrize("block", [lambda: built_for_a_worker(1), built_to_describe], ids=["worker", "dry run"])
def test_the_hub_is_the_servers_alone(block: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(grpo_trainer, "create_repo", lambda repo, **_: made.append(repo))
    monkeypatch.setattr(grpo_trainer, "CommitScheduler", lambda **_: made.append("scheduler"))
    monkeypatch.setattr(grpo_trainer.DatasetCard, "push_to_hub", lambda *_: made.append("card"))
    monkeypatch.setattr(grpo_trainer.GRPOTrainer, "init_hf_repo", lambda *_: made.append("model"))
    changes = {"log_completions": True, "log_completions_hub_repo": "me/completions", "push_to_hub": True}
    with block():
        trainer = build_trainer(tmp_path, **changes)
    assert made == []
    assert trainer.args.push_to_hub and trainer.args.log_completions_hub_repo == "me/completions"
    build_trainer(tmp_path, **changes)
    assert made == ["model", "me/completions", "card", "scheduler"]


def test_a_worker_reports_to_no_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL times the reward functions and logs that to trackio, which refuses where no run was begun."""
    made: list[str] = []
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "tracker", lambda: made.append("a run"))
    with built_for_a_worker(1):
        trainer = build_trainer(tmp_path, report_to=["tracker"])
    assert made == [] and trainer.args.report_to == []


def test_trackers_of_the_command_line_are_the_servers_and_no_obstacle_to_a_worker() -> None:
    values = {"report_to": "tensorboard"}
    worker: Any = load_trainer(SETUP, engine_here=False, worker_of=1, config_values=values)
    server: Any = load_trainer(SETUP, engine_here=False, config_values=values)
    assert (worker.args.report_to, server.args.report_to) == ([], ["tensorboard"])


def test_a_batch_that_needs_several_ranks_is_built_in_one_worker(tmp_path: Path) -> None:
    changes = {"per_device_train_batch_size": 2, "num_generations": 8}
    with pytest.raises(ValueError, match="divisible"):
        build_trainer(tmp_path, **changes)
    with built_for_a_worker(4):
        trainer = build_trainer(tmp_path, **changes)
    assert trainer.args.generation_batch_size == 8
    assert trainer.args.world_size == trainer.accelerator.num_processes == 1, "afterwards as before"


@pytest.mark.parametrize("from_disk", [True, False], ids=["TRL loads it", "the user's code loads it"])
def test_a_policy_that_will_read_in_place_is_nowhere_on_the_gpu_before(
    from_disk: bool, tmp_path: Path, model_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's GPU would have it once more for each worker that loads, and a worker that starts again no room."""
    gpu_work: list[str] = []
    load = grpo_trainer.create_model_from_path

    def loaded(path: str, **kwargs: Any) -> Any:
        gpu_work.extend(["loaded"] if kwargs.get("device_map", "auto") is not None else [])
        return load(path, **kwargs)

    monkeypatch.setattr(grpo_trainer, "create_model_from_path", loaded)
    monkeypatch.setattr(GRPOTrainer, "_move_model_to_device", lambda *_: gpu_work.append("moved"))
    monkeypatch.setattr(Accelerator, "prepare_model", lambda self, model, **_: gpu_work.append("reward") or model)
    judge = Qwen3ForSequenceClassification(build_model(build_tokenizer()).config)
    given: dict[str, Any] = {"model": model_folder} if from_disk else {}
    reads_as = {"reward_processing_classes": [build_tokenizer()]}
    build = partial(build_trainer, tmp_path, reward_funcs=[judge], arguments=reads_as, **given)
    with built_for_a_worker(1, policy_on_cpu=True):
        trainer = build(bf16=False)
    assert gpu_work == ["reward"], "which is needed there"
    assert not trainer.args.model_init_kwargs, "what the user's code may read"
    without_weights(trainer.model, trainer.accelerator.device)
    assert all(parameter.is_meta for parameter in trainer.model.parameters())
    assert [buffer for buffer in trainer.model.buffers() if not buffer.is_meta], "those are not published"
    gpu_work.clear()
    build(bf16=False)
    assert "moved" in gpu_work, "and a server's does as ever"


def test_a_policy_without_weights_gets_the_published_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(Knobs(folder=str(tmp_path)), monkeypatch)
    server, worker = build_trainer(tmp_path), build_trainer(tmp_path, model=build_model(build_tokenizer(), seed=1))
    device, ids = worker.accelerator.device, torch.tensor([[1, 2, 3]])
    with WeightExporter.from_model(server.model, tmp_path / "handle.json") as exporter, torch.no_grad():
        exporter.publish(1)
        expected = server.model(ids).logits
        for reads_in_place in (True, False):
            without_weights(worker.model, device)
            monkeypatch.setattr(RemoteWeights, "can_alias", lambda *_, answer=reads_in_place: answer)
            with open_remote_memory(tmp_path / "handle.json") as remote:
                assert PolicyWeights(remote, worker.model, device).adopt() == 1
                assert torch.equal(worker.model(ids).logits, expected)
                assert worker.model.lm_head.weight is worker.model.model.embed_tokens.weight, "tied as before"


@pytest.mark.parametrize("why", ["quantised", "unsloth"])
def test_a_model_made_for_its_device_stays_as_loaded(why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[Any] = []
    monkeypatch.setattr(GRPOTrainer, "_move_model_to_device", lambda self, model, device: moved.append(model))
    model = build_model(build_tokenizer())
    if why == "quantised":
        model.hf_quantizer = SimpleNamespace(is_trainable=True, is_qat_trainable=True)
    else:
        monkeypatch.setitem(sys.modules, "unsloth", ModuleType("unsloth"))
    with built_for_a_worker(1, policy_on_cpu=True):
        trainer = build_trainer(tmp_path, model=model)
    assert moved == [model]
    without_weights(trainer.model, trainer.accelerator.device)
    assert not any(parameter.is_meta for parameter in trainer.model.parameters())


@pytest.mark.parametrize("name", ["ddp.yaml", "fsdp2.yaml", "zero3.yaml"])
def test_the_ranks_of_an_accelerate_configuration(name: str, tmp_path: Path) -> None:
    assert AccelerateConfig.read(ROOT / "examples" / "accelerate" / name).processes == 2
    (tmp_path / "default.json").write_text('{\n  "num_processes": 4,\n  "gpu_ids": "all"\n}')
    assert AccelerateConfig.read(tmp_path / "default.json").processes == 4


def test_a_patched_constructor_is_given_what_a_worker_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build, seen = grpo_trainer.GRPOTrainer.__init__, []

    def patched(self: Any, *args: Any, own_option: int = 0, **kwargs: Any) -> None:
        seen.append(own_option)
        build(self, *args, **kwargs)

    monkeypatch.setattr(grpo_trainer.GRPOTrainer, "__init__", patched)
    with engines_left_to_workers(), built_for_a_worker(1):
        trainer = build_trainer(tmp_path, arguments={"own_option": 3}, report_to=["tensorboard"])
    assert seen == [3] and trainer.args.report_to == []
