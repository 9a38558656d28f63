"""Images of prompts, tools and environments: the same training as with TRL alone, whatever holds them."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset, Features, Image, List, Value
from trl import GRPOTrainer
from trl.chat_template_utils import qwen3_vl_chat_template

from async_grpo.engines import SampledGroup
from async_grpo.errors import UnsupportedError
from async_grpo.images import encoded
from async_grpo.rollout.trl_trainer import RolloutTrainer
from async_grpo.tokens import Tokens
from async_grpo.training.checkpoints import load_batch, save_batch
from async_grpo.training.corrections.trl_loss import log_pi_old
from async_grpo.training.prompts import evaluation_rows
from kit.compared_with_trl import largest_difference
from kit.in_process import InProcessRun, jobs_of, training_logs
from kit.recorded_batches import Recorded
from kit.scripted import ScriptedEngine, ScriptedGenerator, writing
from kit.tiny_trainer import length, letters
from kit.tiny_vlm import Gallery, build_vlm_trainer, picture


def settings(output_dir: Path, **given: Any) -> Callable[..., GRPOTrainer]:
    return lambda **more: build_vlm_trainer(output_dir, **{**given, **more})


class WithEmptyLists(Recorded):
    """TRL 1.15 says None for a prompt without images, which its own image processor then refuses."""

    def _tokenize_prompts(self, prompts: Any) -> tuple[Any, ...]:
        prompt_ids, images, fields = super()._tokenize_prompts(prompts)
        return prompt_ids, None if images is None else [found or [] for found in images], fields


def trained_as_by_trl(
    get_trainer: Callable[..., GRPOTrainer], trainer_class: type[Recorded] = Recorded, **options: Any
) -> InProcessRun:
    run = InProcessRun(get_trainer, **options).train()
    plain: Any = get_trainer(trainer_class=trainer_class)
    plain.batches = iter(run.batches)
    plain.train()
    largest_difference(run.logs, training_logs(plain))
    assert abs(run.logs[0]["grad_norm"]) > 1e-3
    return run


def widths(completions: list[Any], image: list[Any], **_: Any) -> list[float]:
    """A reward that looks at the images."""
    return [shown.width / 100 + len(said[-1]["content"]) for shown, said in zip(image, completions, strict=True)]


def ask(index: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "what" + "?" * (index % 3)}]


def one_image(count: int = 12) -> Dataset:
    rows = [{"prompt": ask(i), "image": picture(i, 16 + 8 * (i % 3)), "target": i} for i in range(count)]
    return Dataset.from_list(rows)


def several(count: int = 12) -> Dataset:
    rows = [{"prompt": ask(i), "images": [picture(10 * i + k) for k in range(1 + i % 3)]} for i in range(count)]
    return Dataset.from_list(rows)


def in_messages(count: int = 12) -> Dataset:
    def content(index: int) -> list[dict[str, Any]]:
        shown = picture(index, 16, 8 * (2 + index % 3))
        return [{"type": "text", "text": "look "}, {"type": "image", "image": shown}, {"type": "text", "text": "what?"}]

    part = {"type": Value("string"), "text": Value("string"), "image": Image()}
    features = Features({"prompt": List({"role": Value("string"), "content": List(part)})})
    rows = [{"prompt": [{"role": "user", "content": content(i)}]} for i in range(count)]
    return Dataset.from_list(rows, features=features)


@pytest.mark.parametrize(("rows", "rewards"), [(one_image, [widths]), (several, [letters]), (in_messages, [letters])])
def test_a_prompt_with_images(rows: Any, rewards: Any, tmp_path: Path) -> None:
    run = trained_as_by_trl(settings(tmp_path, train_dataset=rows(), reward_funcs=rewards))
    mismatch = [entry["async/logprob_mismatch"] for entry in run.logs]
    assert max(mismatch) < 1e-5, "the worker has seen the images that the trainer sees"


def test_images_of_an_evaluation_travel_as_their_files_too() -> None:
    """A broken one costs its problem then, not the run its start."""
    file = BytesIO()
    picture(0).convert("RGB").save(file, "JPEG")
    files = [file.getvalue(), b"GIF89a, but broken"]
    rows = [{"prompt": "a", "image": {"bytes": data, "path": None}} for data in files]
    given = Dataset.from_list(rows, features=Features(prompt=Value("string"), image=Image()))
    trainer: Any = SimpleNamespace(eval_dataset={"maths": given}, _remove_unused_columns=lambda data, **_: data)
    assert [row["image"].data for row, _ in evaluation_rows(trainer)] == files


def test_a_model_that_writes_image_tokens_fails_its_group_alone(tmp_path: Path) -> None:
    trl = RolloutTrainer(settings(tmp_path, train_dataset=one_image())())
    mark = trl.trainer.model.config.image_token_id
    text, written = Tokens([5, 6], [-1.0] * 2), Tokens([5, mark, 5], [-1.0] * 3)
    first, second = (trl.prepare(job, 0) for job in jobs_of(map(encoded, one_image(2))))
    assert trl.finish(SampledGroup(prepared=first, tokens=[text, text])).job.seq == 0
    with pytest.raises(UnsupportedError, match="stands for an image"):
        trl.finish(SampledGroup(prepared=second, tokens=[text, written]))


def test_rows_without_images_among_others(tmp_path: Path) -> None:
    rows = [{"prompt": ask(i), "images": [picture(i)] if i % 3 else []} for i in range(12)]
    messages = List({"role": Value("string"), "content": Value("string")})
    features = Features(prompt=messages, images=List(Image()))
    get_trainer = settings(tmp_path, train_dataset=Dataset.from_list(rows, features=features))
    run = trained_as_by_trl(get_trainer, trainer_class=WithEmptyLists)
    assert max(entry["async/logprob_mismatch"] for entry in run.logs) < 1e-5


def test_corrections_see_the_images(tmp_path: Path) -> None:
    get_trainer = settings(tmp_path, train_dataset=one_image(), learning_rate=0.0)
    run = trained_as_by_trl(get_trainer, correction="decoupled")
    computed = log_pi_old(run.trainer, run.inputs[0])
    mask = run.inputs[0]["completion_mask"].bool()
    assert (computed - run.inputs[0]["sampling_per_token_logps"])[mask].abs().max() < 1e-4


def test_a_batch_in_several_steps(tmp_path: Path) -> None:
    changes = {"num_iterations": 2, "steps_per_generation": 2, "per_device_train_batch_size": 4, "max_steps": 3}
    run = trained_as_by_trl(settings(tmp_path, train_dataset=several(), **changes), correction="none")
    batch = run.trainer.batch_after_step
    assert batch is not None, "the last step was in the middle of a batch"
    save_batch(tmp_path, batch)  # as a checkpoint does
    for saved, inputs in zip(load_batch(tmp_path, torch.device("cpu")).inputs, batch.inputs, strict=True):
        assert saved.keys() == inputs.keys() >= {"pixel_values", "image_grid_thw", "num_images"}
        assert torch.equal(saved["pixel_values"], inputs["pixel_values"])
        assert saved["num_images"] == inputs["num_images"]


# --- Images that environments and tools bring --------------------------------------------------------------------


LOOK = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


def galleries(output_dir: Path, **given: Any) -> Callable[..., GRPOTrainer]:
    rows = [{"prompt": [{"role": "user", "content": "what?"}], "target": index} for index in range(12)]
    made = {
        "train_dataset": Dataset.from_list(rows),
        "reward_funcs": [length],
        "chat_template": qwen3_vl_chat_template,
        "arguments": {"environment_factory": Gallery},
        "max_completion_length": 256,
        **given,
    }
    return lambda **more: build_vlm_trainer(output_dir, **{**made, **more})


def test_an_image_from_reset_is_sampled_from_and_trained_on(tmp_path: Path) -> None:
    run = trained_as_by_trl(galleries(tmp_path, max_completion_length=8))
    assert max(entry["async/logprob_mismatch"] for entry in run.logs) < 1e-5
    assert len(run.inputs[0]["num_images"]) == 8
    assert set(run.inputs[0]["num_images"]) == {1}


def looks(prompt: str, index: int) -> str:
    if "here" in prompt:
        return "seen"
    return f"a{LOOK}" if index % 2 == 0 else "no thanks"


def test_images_of_tool_results(tmp_path: Path) -> None:
    get_trainer = galleries(tmp_path)
    run = InProcessRun(get_trainer, engine=ScriptedEngine(ScriptedGenerator(looks)), correction="none").train()
    plain = get_trainer(trainer_class=writing(looks))
    plain.train()
    largest_difference(run.logs, training_logs(plain))
    assert run.logs[0]["tools/call_frequency"] == 0.5
    assert sorted(run.inputs[0]["num_images"]) == [1] * 4 + [2] * 4
    [called] = [c for c in run.groups[0].completions if len(c) > 1]
    assert [message["role"] for message in called] == ["assistant", "tool", "assistant"]
    shown = called[1]["content"][0]["image"].open()
    assert shown.tobytes() == picture(100 + run.groups[0].job.row["target"]).tobytes()
