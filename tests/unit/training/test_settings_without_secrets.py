"""Settings with secrets in them, in each file that shows settings: no secret is left, and the rest is."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import TrainerControl, TrainerState

from async_grpo.reports.series import hyperparameter_table
from async_grpo.settings import TrainingSettings
from async_grpo.training.hyperparameters import hyperparameters
from async_grpo.training.reporting import CurvesCallback

SETTINGS = {
    "learning_rate": 1e-06,
    "vllm_server_base_url": "http://me:swordfish1@host.example:8000",
    "model_init_kwargs": {"token": "swordfish2", "revision": "main"},
    "chat_template_kwargs": {"url": "https://me:p@swordfish3@host.example", "style": "short"},
    "run_name": "grpo-hf_swordfishABCDEFGHIJKLMNOPQR-v2",
    "generation_kwargs": {"extra_headers": ["Authorization: Bearer swordfish5"]},
    "judge": '{"api_key": "swordfish6", "model": "small"}',
    "eos_token": "<|im_end|>",
}
KEPT = ("host.example", "main", "short", "grpo-", "-v2", "small", "<|im_end|>", "1e-06")


def test_hyperparameters() -> None:
    parameter = SimpleNamespace(shape=(7,), requires_grad=True)
    config = SimpleNamespace(_name_or_path="https://me:swordfish4@host.example/model")
    trainer: Any = SimpleNamespace(
        model=SimpleNamespace(config=config, parameters=lambda: [parameter]),
        reward_func_names=["accuracy"],
        reward_weights=[1.0],
        scale_rewards="group",
        multi_objective_aggregation="sum",
        num_generations=8,
        args=SimpleNamespace(to_dict=lambda: SETTINGS),
    )
    written = hyperparameters(trainer, TrainingSettings())
    _check(json.dumps(written))
    _check(hyperparameter_table(written))


def test_the_board_of_a_run_of_an_earlier_version() -> None:
    _check(hyperparameter_table({"trainer": SETTINGS}))


def test_event_files(tmp_path: Path) -> None:
    curves = CurvesCallback(tmp_path)
    arguments: Any = SimpleNamespace(output_dir="", to_json_string=lambda: json.dumps(SETTINGS, indent=2))
    curves.on_train_begin(arguments, TrainerState(), TrainerControl(), model=SimpleNamespace(config=arguments))
    curves.on_train_end(arguments, TrainerState(), TrainerControl())
    (events,) = tmp_path.glob("events.out.tfevents.*")
    _check(events.read_bytes().decode(errors="replace"))


def _check(text: str) -> None:
    assert "swordfish" not in text
    assert not [kept for kept in KEPT if kept not in text.replace("\\|", "|")]  # as Markdown has it
