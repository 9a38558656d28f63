"""What a callback or an override changes of the sampling during the run: sent with the job, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from transformers import GenerationMixin, TrainerCallback
from trl import GRPOTrainer

from async_grpo.errors import RunRefused, UnsupportedError
from async_grpo.setup import sampling_changes
from async_grpo.setup.generator_choice import HF, VLLM
from async_grpo.setup.openai_harness import OpenAIHarness
from async_grpo.setup.sampling import check_generation, transformers_config
from async_grpo.training import watch
from async_grpo.training.watch import Watch
from kit.compared_with_trl import settings
from kit.in_process import InProcessRun, InProcessWorker, jobs_of
from kit.tiny_trainer import QWEN3_CHAT_TEMPLATE, build_trainer, plain_rows
from kit.tools import multiply


def setter(**values: Any) -> Callable[[Any], None]:
    """A change of `generation_config`."""

    def change(trainer: Any) -> None:
        for name, value in values.items():
            setattr(trainer.generation_config, name, value)

    return change


class AtStepEnd(TrainerCallback):
    """Calls `change(trainer, step)` after each step."""

    trainer: Any

    def __init__(self, change: Callable[[Any, int], None]) -> None:
        self._change = change

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        self._change(self.trainer, state.global_step)


def with_callback(output_dir: Path, change: Callable[[Any, int], None], **changes: Any) -> Callable[[], GRPOTrainer]:
    def get_trainer() -> GRPOTrainer:
        callback = AtStepEnd(change)
        trainer = settings(output_dir, {"callbacks": [callback]}, **{"max_steps": 3, **changes})()
        callback.trainer = trainer
        return trainer

    return get_trainer


def longest(run: InProcessRun) -> list[int]:
    """The longest completion of each batch, in tokens."""
    return [max(int(length) for group in batch for length in group.completion_lengths) for batch in run.batches]


# --- In the server ---


def test_a_callback_that_raises_the_length_is_followed_from_the_next_batch_on(tmp_path: Path) -> None:
    def longer(trainer: Any, step: int) -> None:
        trainer.generation_config.max_new_tokens = 4 + step

    run = InProcessRun(with_callback(tmp_path, longer, max_completion_length=4)).train()
    assert longest(run) == [4, 5, 6]
    assert [batch[0].job.sampling for batch in run.batches] == [{}, {"max_tokens": 5}, {"max_tokens": 6}]


class Annealed(GRPOTrainer):
    """Sets what is sampled with before each batch, in the server."""

    def _prepare_inputs(self, batch: Any) -> Any:
        self.generation_config.temperature = 1.0 + self.state.global_step
        self.generation_config.top_k = 3
        return super()._prepare_inputs(batch)


def test_an_override_of_the_server_decides_on_its_own_batch(tmp_path: Path) -> None:
    run = InProcessRun(settings(tmp_path, trainer_class=Annealed, max_steps=2)).train()
    assert [batch[0].job.sampling for batch in run.batches] == [{"top_k": 3}, {"temperature": 2.0, "top_k": 3}]


def watched(trainer: Any, change: Callable[[Any], None], *, engine: Any = HF, stale: int = 0) -> Any:
    """What jobs are sampled with once the trainer is changed, one step later."""
    watch = Watch(trainer, engine=engine, max_staleness=stale)
    assert watch.sampling() == {}
    change(trainer)
    trainer.state.global_step += 1
    return watch.sampling()


def another_config(trainer: Any) -> None:
    trainer.generation_config = copy.deepcopy(trainer.generation_config)
    trainer.generation_config.top_p = 0.5


OFF = {"top_p": None, "top_k": None, "min_p": None, "temperature": None}
SET = {"top_p": 0.9, "top_k": 5, "min_p": 0.1, "temperature": 0.7}


@pytest.mark.parametrize(
    ("change", "options", "sent"),
    [
        *((setter(max_new_tokens=3), {"engine": engine, "stale": 4}, {"max_tokens": 3}) for engine in (HF, VLLM, None)),
        (setter(temperature=0.5), {}, {"temperature": 0.5}),
        (another_config, {}, {"top_p": 0.5}),
    ],
)
def test_what_is_changed_is_sent(change: Any, options: dict[str, Any], sent: dict[str, Any], tmp_path: Path) -> None:
    assert watched(build_trainer(tmp_path), change, **options) == sent


def test_settings_that_are_turned_off_are_sent_as_off(tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path, **SET)
    watch = Watch(trainer, engine=HF, max_staleness=0)
    setter(**OFF)(trainer)
    assert watch.sampling() == {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "temperature": 1.0}
    setter(**SET)(trainer)
    assert watch.sampling() == {}, "as the workers have it"


def of_the_model(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    return lambda trainer: change(trainer.model)


def halve_the_scaling(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.scaling["default"] *= 0.5


def assigned(path: str, value: Any) -> Callable[[Any], None]:
    """`value` is in the place of an attribute."""
    holders, _, name = path.rpartition(".")
    return lambda trainer: setattr(attrgetter(holders)(trainer) if holders else trainer, name, value)


ADAPTER = {"arguments": {"peft_config": LoraConfig(target_modules=["q_proj"])}}
TOOLS = {"arguments": {"tools": [multiply]}, "chat_template": QWEN3_CHAT_TEMPLATE}
ALONE = r".* has changed.*without --distributed"
NOT_BY_TRL = " has changed during the run.*plain TRL would not follow it either"
CHANGES: list[tuple[dict[str, Any], Callable[[Any], Any], dict[str, Any], str]] = [
    # settings that jobs do not bring
    ({}, setter(repetition_penalty=1.5), {}, "repetition_penalty of generation_config" + ALONE),
    ({}, setter(do_sample=False), {}, "do_sample of generation_config" + ALONE),
    ({}, assigned("model.generation_config.typical_p", 0.5), {}, "typical_p of generation_config" + ALONE),
    # only transformers can draw from another distribution, and another temperature needs fresh rollouts
    *(
        ({}, setter(**{name: 0.5}), {"engine": engine}, f"{name} of generation_config.*--generator hf")
        for name in ("top_p", "temperature")
        for engine in (VLLM, None)
    ),
    ({}, setter(temperature=0.5), {"stale": 1}, "temperature of generation_config.*--max-staleness 0"),
    # adapters but their weights
    (ADAPTER, of_the_model(halve_the_scaling), {}, r"scaling of base_model\..*q_proj has changed during the run"),
    (ADAPTER, of_the_model(lambda it: it.base_model.disable_adapter_layers()), {}, r"disable_adapters of base_model\."),
    (ADAPTER, of_the_model(lambda it: it.base_model.merge_adapter()), {}, r"merged_adapters of base_model\."),
    # what workers have from the setup file
    ({}, assigned("num_generations", 4), {}, r"trainer\.num_generations" + ALONE),
    ({}, assigned("args.steps_per_generation", 2), {}, r"trainer\.args\.steps_per_generation" + ALONE),
    ({}, lambda it: it.chat_template_kwargs.update(a=1), {}, r"trainer\.chat_template_kwargs" + ALONE),
    ({}, lambda it: it.reward_funcs.append(len), {}, r"trainer\.reward_funcs" + ALONE),
    ({}, assigned("rollout_func", len), {}, r"trainer\.rollout_func" + ALONE),
    (TOOLS, assigned("tools", []), {}, r"trainer\.tools" + ALONE),
    ({}, assigned("processing_class.chat_template", "{{1}}"), {}, "chat_template of the tokenizer" + ALONE),
    # it would do no harm at staleness 0, but its author believes that it does something
    ({}, assigned("temperature", 0.5), {}, r"trainer\.temperature" + NOT_BY_TRL),
    ({}, assigned("args.max_completion_length", 4), {}, r"trainer\.args\.max_completion_length" + NOT_BY_TRL),
]


@pytest.mark.parametrize(("built", "change", "more", "says"), CHANGES, ids=[says[:40] for *_, says in CHANGES])
def test_what_workers_cannot_follow_is_refused(built: Any, change: Any, more: Any, says: str, tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path, **built)
    with pytest.raises(RunRefused, match="^" + says):
        watched(trainer, change, **more)


def adapter_off_and_on(trainer: Any) -> None:
    with trainer.model.disable_adapter():
        pass


def test_an_adapter_that_is_as_it_was_has_not_changed(tmp_path: Path) -> None:
    assert watched(build_trainer(tmp_path, **ADAPTER), adapter_off_and_on) == {}


@pytest.mark.parametrize(
    ("change", "persistent", "refused"),
    [
        (lambda model: model.scale.fill_(2.0), True, True),
        (lambda model: model.scale.data.fill_(2.0), True, True),
        (lambda model: setattr(model, "scale", torch.zeros(2)), True, True),
        (lambda model: setattr(model, "scale", torch.ones(2, dtype=torch.bfloat16)), True, False),  # only cast
        (lambda model: model.scale.fill_(2.0), False, False),  # forward passes compute it
    ],
)
def test_a_buffer_that_a_callback_changes_is_refused(
    change: Callable[[Any], None], persistent: bool, refused: bool, tmp_path: Path
) -> None:
    trainer = build_trainer(tmp_path)
    trainer.model.register_buffer("scale", torch.ones(2), persistent=persistent)
    says = r"^The buffer scale of the model has changed.*without --distributed"
    with pytest.raises(RunRefused, match=says) if refused else nullcontext():
        watched(trainer, of_the_model(change))


def test_what_is_compared_is_what_transformers_samples_with(tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path, top_k=-1, top_p=0.9)
    trainer.model.generation_config.typical_p = 0.5
    trainer.model.generation_config.temperature = 0.5  # TRL's own goes before it
    sampled_with, compared = vars(transformers_config(trainer)), sampling_changes._settings(trainer)
    draws = [name for name in sampled_with if not name.startswith(sampling_changes._DRAWS_NOTHING)]
    assert {name: compared[name] for name in draws} == {name: sampled_with[name] for name in draws}
    assert (compared["typical_p"], compared["temperature"], compared["top_k"]) == (0.5, 1.0, 0)


READ: list[str] = []  # attributes of the trainer, as often as TRL reads them


def noting(name: str) -> property:
    def read(trainer: Any) -> Any:
        READ.append(name)
        return vars(trainer)[name]

    return property(read, lambda trainer, value: vars(trainer).update({name: value}))


def test_trl_reads_its_sampling_settings_only_while_it_builds_the_trainer(tmp_path: Path) -> None:
    noted = type("Noted", (GRPOTrainer,), {name: noting(name) for name in watch._SAMPLING})
    READ.clear()
    trainer = build_trainer(tmp_path, trainer_class=noted, max_steps=1)
    assert set(READ) == set(watch._SAMPLING)
    READ.clear()
    trainer.train()
    assert READ == []


@pytest.mark.parametrize("rollout_func", [OpenAIHarness(print), partial(print, end="")], ids=["object", "partial"])
def test_what_stays_is_never_taken_for_a_change(rollout_func: Any, tmp_path: Path) -> None:
    """A function may be an object, which is not equal to a copy of itself."""
    trainer = build_trainer(tmp_path, arguments={"rollout_func": rollout_func})
    assert Watch(trainer, engine=HF, max_staleness=0).sampling() == {}


def test_a_change_that_is_refused_ends_the_training(tmp_path: Path) -> None:
    def fewer(trainer: Any, step: int) -> None:
        trainer.num_generations = 4

    run = InProcessRun(with_callback(tmp_path, fewer))
    with pytest.raises(RunRefused, match=r"trainer\.num_generations has changed"):
        run.train()
    assert len(run.batches) == 1


# --- In a worker ---


class PerStep(GRPOTrainer):
    """Sets what is sampled with where completions are made."""

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        self.generation_config.max_new_tokens = 3 + self.state.global_step
        return super()._generate_single_turn(*args, **kwargs)


class PerBatch(GRPOTrainer):
    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self.generation_config.max_new_tokens = 3 + self.state.global_step
        return super()._generate_and_score_completions(inputs)


class Lengthening(GRPOTrainer):
    """Counts from what it set before."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self.generation_config.max_new_tokens += 1
        return super()._generate_and_score_completions(inputs)


@pytest.mark.parametrize("trainer_class", [PerStep, PerBatch, Lengthening])
def test_an_override_that_sets_the_length_of_each_step(trainer_class: type[GRPOTrainer], tmp_path: Path) -> None:
    """It runs in the server as well, and workers begin with what it made there of the batches before."""
    run = InProcessRun(settings(tmp_path, trainer_class=trainer_class, max_steps=3, max_completion_length=2)).train()
    assert longest(run) == [3, 4, 5]


def worker(output_dir: Path, trainer_class: type[GRPOTrainer], **changes: Any) -> InProcessWorker:
    return InProcessWorker(build_trainer(output_dir, trainer_class=trainer_class, **changes))


class Cooler(GRPOTrainer):
    def _generate(self, prompts: Any) -> Any:
        self.generation_config.temperature = 0.5
        return super()._generate(prompts)


def test_a_worker_refuses_what_its_engine_or_the_bound_does_not_allow(tmp_path: Path) -> None:
    working, jobs = worker(tmp_path, Cooler), jobs_of(plain_rows(2))
    working.generate(jobs)
    working.trl.sampled_by(HF, 4)
    with pytest.raises(RunRefused, match=r"temperature of generation_config.*--max-staleness 0"):
        working.generate(jobs)
    working.trl.sampled_by(VLLM, 0)
    with pytest.raises(RunRefused, match=r"temperature of generation_config.*--generator hf"):
        working.generate(jobs)
    evaluated = [replace(job, purpose="eval", sampling={"temperature": 0.0}) for job in jobs]
    working.generate(evaluated)  # which has a temperature of its own


def test_groups_of_several_steps_are_not_generated_as_one(tmp_path: Path) -> None:
    """The user's code sees one step."""
    jobs = [replace(job, trainer_state={"global_step": job.seq // 2}) for job in jobs_of(plain_rows(4))]
    groups = worker(tmp_path, PerStep).generate(jobs)
    assert [max(map(len, group.completion_ids)) for group in groups] == [3, 3, 4, 4]


def test_the_engine_follows_what_a_job_brings(tmp_path: Path) -> None:
    """With min_p=1 only the most likely token is left, so all completions of a group are equal."""
    jobs = [replace(job, sampling={"min_p": 1.0, "max_tokens": 3}) for job in jobs_of(plain_rows(2))]
    for group in worker(tmp_path, GRPOTrainer).generate(jobs):
        assert len(group.completion_ids[0]) == 3 and group.completion_ids[0] == group.completion_ids[1]


class ByReward(GRPOTrainer):
    """Changes what the next completions are sampled with, in each worker by itself."""

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        self.generation_config.max_new_tokens += 1
        return super()._calculate_rewards(*args, **kwargs)


def test_scoring_that_changes_the_sampling_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunRefused, match=r"changed generation_config \({'max_tokens': 9}\).*in a callback"):
        worker(tmp_path, ByReward).rollouts(jobs_of(plain_rows(1)))


def test_a_reward_that_changes_the_sampling_of_its_worker_is_refused(tmp_path: Path) -> None:
    working = worker(tmp_path, GRPOTrainer)
    working.trl.trainer.generation_config.max_new_tokens = 3
    with pytest.raises(RunRefused):
        working.generate(jobs_of(plain_rows(1)))


# --- Before the run ---


def test_what_is_set_after_the_trainer_was_built_needs_transformers(tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path, top_p=0.9, generation_kwargs={"min_new_tokens": 2})
    check_generation(trainer, VLLM)
    trainer.generation_config.max_new_tokens = 3
    check_generation(trainer, HF)
    with pytest.raises(UnsupportedError, match=r"^max_new_tokens of trainer.generation_config.*--generator hf"):
        check_generation(trainer, VLLM)
    groups = InProcessWorker(trainer).generate(jobs_of(plain_rows(1)))
    assert max(map(len, groups[0].completion_ids)) == 3


def test_the_methods_of_generate_are_there() -> None:
    for name in ("generate", "_sample", "_get_logits_processor", "_get_stopping_criteria"):
        assert callable(getattr(GenerationMixin, name, None)), f"{name} has moved: async_grpo.setup.sampling"


def test_a_decoding_loop_of_the_models_own_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build_trainer(tmp_path)
    check_generation(trainer, HF)
    own = MethodType(lambda self, *args, **kwargs: None, trainer.model)
    with monkeypatch.context() as patch:
        patch.setattr(trainer.model, "_sample", own, raising=False)
        with pytest.raises(UnsupportedError, match=r"The model's _sample is not transformers' own"):
            check_generation(trainer, HF)
    monkeypatch.setattr(type(trainer.model), "generate", own)
    with pytest.raises(UnsupportedError, match=r"The model's generate.*--generator hf"):
        check_generation(trainer, VLLM)
