"""Images that environments and tools bring: sampled from, trained on, logged and stored as with TRL alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from PIL import Image
from trl import GRPOTrainer
from trl.chat_template_utils import qwen3_vl_chat_template

from kit.compared_with_trl import largest_difference
from kit.in_process import InProcessRun, training_logs
from kit.recorded_batches import Recorded
from kit.scripted import ScriptedEngine, ScriptedGenerator, writing
from kit.tiny_trainer import length
from kit.tiny_vlm import Gallery, build_vlm_trainer, picture

pytestmark = pytest.mark.integration

LOOK = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


def galleries(output_dir: Path, **given: Any) -> Callable[..., GRPOTrainer]:
    rows = [{"prompt": [{"role": "user", "content": "what?"}], "target": index} for index in range(12)]
    settings = {
        "train_dataset": Dataset.from_list(rows),
        "reward_funcs": [length],
        "chat_template": qwen3_vl_chat_template,
        "arguments": {"environment_factory": Gallery},
        "max_completion_length": 256,
        **given,
    }
    return lambda **more: build_vlm_trainer(output_dir, **{**settings, **more})


def test_an_image_from_reset_is_sampled_from_and_trained_on(tmp_path: Path) -> None:
    get_trainer = galleries(tmp_path, max_completion_length=8)
    run = InProcessRun(get_trainer).train()
    plain: Any = get_trainer(trainer_class=Recorded)
    plain.batches = iter(run.batches)
    plain.train()
    largest_difference(run.logs, training_logs(plain))
    assert max(entry["async/logprob_mismatch"] for entry in run.logs) < 1e-5
    assert len(run.inputs[0]["num_images"]) == 8
    assert set(run.inputs[0]["num_images"]) == {1}


def looks(prompt: str, index: int) -> str:
    if "here" in prompt:
        return "seen"
    return f"a{LOOK}" if index % 2 == 0 else "no thanks"


def test_images_of_tool_results(tmp_path: Path) -> None:
    get_trainer = galleries(tmp_path)
    engine = ScriptedEngine(ScriptedGenerator(looks))
    run = InProcessRun(get_trainer, engine=engine, correction="none").train()
    plain = get_trainer(trainer_class=writing(looks))
    plain.train()
    largest_difference(run.logs, training_logs(plain))
    assert run.logs[0]["tools/call_frequency"] == 0.5
    assert sorted(run.inputs[0]["num_images"]) == [1] * 4 + [2] * 4
    [called] = [c for c in run.groups[0].completions if len(c) > 1]
    assert [message["role"] for message in called] == ["assistant", "tool", "assistant"]
    shown: Image.Image = called[1]["content"][0]["image"].open()
    assert shown.tobytes() == picture(100 + run.groups[0].job.row["target"]).tobytes()
