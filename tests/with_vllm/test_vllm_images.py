"""Prompts with images: the real vLLM against transformers on the same weights, images and tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_idefics
import torch
from datasets import Dataset
from peft import LoraConfig
from PIL import Image
from trl import GRPOTrainer
from trl.chat_template_utils import qwen3_vl_chat_template

from async_grpo.engines import PreparedGroup, SampledGroup
from async_grpo.engines.continuous import ContinuousEngine
from async_grpo.engines.vllm import VLLMEngine
from async_grpo.errors import UnsupportedError
from async_grpo.images import encoded
from async_grpo.rollout.trl_trainer import RolloutTrainer
from kit.in_process import InProcessRun, jobs_of
from kit.runs import ran, steps_logged, values_logged
from kit.tiny_trainer import build_tokenizer, config, length
from kit.tiny_vlm import Gallery, build_vlm_trainer, picture

SETUP = str(Path(__file__).parent / "setups" / "tiny_idefics.py")
CLOSE, PROMPT = 1e-4, [{"role": "user", "content": "what?"}]
IDEFICS, QWEN = "idefics3", "qwen2.5-vl"
LANGUAGE_MODEL = {IDEFICS: r".*text_model.*(q_proj|v_proj|down_proj)", QWEN: r".*language_model.*(q_proj|v_proj)"}


def pictures() -> list[list[Image.Image]]:
    """Rows of several sizes and numbers, none, the same as before, and two that vLLM would see otherwise."""
    transparent = picture(20).convert("RGBA")
    transparent.putalpha(90)
    turned = picture(21, 16, 32)
    turned.getexif()[0x0112] = 6  # to be shown turned by a quarter
    turned.info["exif"] = turned.getexif().tobytes()
    several = [picture(1, 24, 16), picture(2), picture(3, 16, 32)]
    return [[picture(0)], several, [], [picture(0)], [transparent], [turned]]


def rows() -> list[dict[str, Any]]:
    return [{"prompt": PROMPT, "images": images} for images in pictures()]


def build_trainer(family: str, output_dir: Path, **changes: Any) -> GRPOTrainer:
    if family == QWEN:
        pytest.importorskip("torchvision", reason="vLLM's module of Qwen2.5-VL imports it")
        return build_vlm_trainer(output_dir, **changes)
    arguments, data = changes.pop("arguments", {}), changes.pop("train_dataset")
    tokenizer = build_tokenizer()
    processor = tiny_idefics.build_processor(tokenizer)
    return GRPOTrainer(
        model=tiny_idefics.build_vlm(tokenizer),
        processing_class=processor,
        reward_funcs=[length],
        train_dataset=data,
        args=config(output_dir, **changes),
        **arguments,
    )


def rollout_trainer(family: str, output_dir: Path, **changes: Any) -> RolloutTrainer:
    data = Dataset.from_list([{"prompt": row["prompt"]} for row in rows()])
    given = {"train_dataset": data, "max_completion_length": 12, "temperature": 0.8, **changes}
    return RolloutTrainer(build_trainer(family, output_dir, **given))


Started = tuple[RolloutTrainer, VLLMEngine]


def started(trl: RolloutTrainer, **options: Any) -> Iterator[Started]:
    engine = VLLMEngine(trl.trainer, seed=0, **options)
    yield trl, engine
    engine.close()


@pytest.fixture(scope="module", params=[IDEFICS, QWEN])
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    yield from started(rollout_trainer(request.param, tmp_path_factory.mktemp("plain")), in_flight_update=True)


@pytest.fixture(scope="module", params=[IDEFICS, QWEN])
def adapter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    lora = LoraConfig(r=4, lora_alpha=16, target_modules=LANGUAGE_MODEL[request.param], task_type="CAUSAL_LM")
    folder = tmp_path_factory.mktemp("adapter")
    yield from started(rollout_trainer(request.param, folder, arguments={"peft_config": lora}))


def prepared(trl: RolloutTrainer) -> list[PreparedGroup]:
    return [trl.prepare(job, version=0) for job in jobs_of(map(encoded, rows()))]


def load(trl: RolloutTrainer, engine: VLLMEngine, version: int) -> None:
    engine.load({name: value.detach() for name, value in trl.trainer.model.named_parameters()}, version)


def change(trl: RolloutTrainer, seed: int) -> None:
    """As a training step would, but more: also what computes the images."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trl.trainer.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))


def sample(engine: VLLMEngine, groups: Sequence[PreparedGroup], between: Callable[[], None] | None = None) -> Any:
    """All groups together; `between` is called after four tokens."""
    continuous = ContinuousEngine(engine, group_size=2, in_flight_update=engine._in_flight_update)
    ended = continuous.sample(groups)
    for step in range(100):
        if len(ended) == len(groups):
            break
        if step == 3 and between is not None:
            between()
        ended += continuous.sample([])
    for group in ended:
        assert group.error is None, group.error
    return sorted(ended, key=lambda group: group.prepared.job.seq)


def expected(trl: RolloutTrainer, group: SampledGroup, index: int) -> torch.Tensor:
    """The log-probabilities that transformers computes for a completion, [tokens]."""
    prompt, ids = group.prepared.prompt_ids[index], group.tokens[index].ids
    fields = group.prepared.fields[index] if group.prepared.fields else {}
    inputs = {
        name: value if isinstance(value, torch.Tensor) else torch.tensor([[*value[0], *[0] * len(ids)]])
        for name, value in fields.items()
    }
    with torch.no_grad():
        logits = trl.trainer.model(input_ids=torch.tensor([prompt + ids]), **inputs).logits[0, len(prompt) - 1 : -1]
    temperature = trl.trainer.args.temperature
    return torch.log_softmax(logits / temperature, dim=-1).gather(1, torch.tensor(ids)[:, None])[:, 0]


def check(trl: RolloutTrainer, groups: Sequence[SampledGroup], tokens: slice = slice(None)) -> None:
    for group in groups:
        for index, sampled in enumerate(group.tokens):
            right = expected(trl, group, index)[tokens]
            torch.testing.assert_close(torch.tensor(sampled.logprobs)[tokens], right, atol=CLOSE, rtol=0)


def test_log_probabilities_are_those_of_transformers_through_three_updates(plain: Started) -> None:
    trl, engine = plain
    groups = prepared(trl)
    assert [len(images[0] or []) if (images := group.images) else 0 for group in groups] == [1, 3, 0, 1, 1, 1]
    for version in range(3):
        load(trl, engine, version)
        check(trl, sample(engine, groups))
        change(trl, seed=version)
    assert engine._copies is not None, "vLLM does more than to copy: updates are slower than they were"


def test_weights_that_change_while_images_are_looked_at(plain: Started) -> None:
    """The tokens after the update are of the new weights, also where those compute images."""
    trl, engine = plain
    load(trl, engine, 3)

    def update() -> None:
        change(trl, seed=7)
        load(trl, engine, 4)

    check(trl, sample(engine, prepared(trl), update), slice(4, None))


def test_the_completions_of_a_group_may_have_images_of_their_own(plain: Started) -> None:
    """As after a tool that has shown one."""
    trl, engine = plain
    load(trl, engine, 5)
    first, second = prepared(trl)[:2]
    assert first.images and second.images
    ids, images = [first.prompt_ids[0], second.prompt_ids[0]], [first.images[0], second.images[0]]
    mixed = replace(first, prompt_ids=ids, images=images, fields=(first.fields[0], second.fields[0]))
    check(trl, sample(engine, [mixed]))


def test_a_prompt_whose_tokens_do_not_fit_its_images_fails_its_group_alone(plain: Started) -> None:
    trl, engine = plain
    load(trl, engine, 6)
    good, more = prepared(trl)[:2]
    broken = replace(more, prompt_ids=good.prompt_ids)
    continuous = ContinuousEngine(engine, group_size=2)
    (failed,) = continuous.sample([broken])
    assert isinstance(failed.error, ValueError)
    assert "--generator hf" in str(failed.error)
    check(trl, sample(engine, [good]))


def test_adapters_of_the_language_model(adapter: Started) -> None:
    trl, engine = adapter
    for version in range(2):
        change(trl, seed=40 + version)
        load(trl, engine, version)
        check(trl, sample(engine, [replace(one, version=version) for one in prepared(trl)]))


@pytest.mark.parametrize(("family", "modules"), [(IDEFICS, ["q_proj"]), (QWEN, ["q_proj", "qkv"])])
def test_an_adapter_on_what_computes_images_is_refused(family: str, modules: list[str], tmp_path: Path) -> None:
    lora = LoraConfig(r=4, target_modules=modules, task_type="CAUSAL_LM")
    trl = rollout_trainer(family, tmp_path, arguments={"peft_config": lora})
    with pytest.raises(UnsupportedError, match=r"visi.*computes images.*exclude_modules"):
        VLLMEngine(trl.trainer, seed=0)


def mismatch_at_the_trainer(get_trainer: Callable[[], GRPOTrainer]) -> float:
    """The largest difference between the sampler's log-probabilities and those that TRL's own code computes."""
    trl = RolloutTrainer(get_trainer())
    vllm = VLLMEngine(trl.trainer, seed=0)
    load(trl, vllm, 0)
    run = InProcessRun(get_trainer, engine=ContinuousEngine(vllm, group_size=2)).train()
    vllm.close()
    return max(entry["async/logprob_mismatch"] for entry in run.logs)


def test_images_of_environments_are_those_that_the_trainer_sees(tmp_path: Path) -> None:
    rows = [{"prompt": PROMPT, "target": index} for index in range(12)]
    given: dict[str, Any] = {"train_dataset": Dataset.from_list(rows), "chat_template": qwen3_vl_chat_template}
    given |= {"arguments": {"environment_factory": Gallery}, "learning_rate": 0.0}
    assert mismatch_at_the_trainer(lambda: build_trainer(QWEN, tmp_path, **given)) < CLOSE


def test_two_workers_train_from_images(tmp_path: Path) -> None:
    run_dir = tmp_path / "worker"
    options = ("-n", "2", "--steps", "6", "--generator", "vllm")
    ran("train", SETUP, *options, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert steps_logged(run_dir) == list(range(1, 7))
    mismatch = values_logged(run_dir, "async/logprob_mismatch")
    assert mismatch
    assert max(mismatch) < CLOSE, "the workers saw the images that the trainer sees"
    assert "OK: all" in ran("audit", str(run_dir), cwd=tmp_path)
