"""What a callback or an override changes of the sampling during the run: sent with the job, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
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
from kit.tiny_trainer import build_trainer, plain_rows

pytestmark = pytest.mark.integration


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
    sent = [batch[0].job.sampling for batch in run.batches]
    assert sent == [{"top_k": 3}, {"temperature": 2.0, "top_k": 3}]


def watched(output_dir: Path, change: Callable[[Any], None], *, engine: Any = HF, stale: int = 0) -> Any:
    """What jobs are sampled with once the trainer is changed."""
    trainer = build_trainer(output_dir)
    watch = Watch(trainer, engine=engine, max_staleness=stale)
    assert watch.sampling() == {}
    change(trainer)
    return watch.sampling()


@pytest.mark.parametrize("engine", [HF, VLLM, None])
def test_the_length_can_be_changed_with_every_engine(engine: Any, tmp_path: Path) -> None:
    assert watched(tmp_path, setter(max_new_tokens=3), engine=engine, stale=4) == {"max_tokens": 3}


def test_settings_that_are_turned_off_are_sent_as_off(tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path, top_p=0.9, top_k=5, min_p=0.1, temperature=0.7)
    watch = Watch(trainer, engine=HF, max_staleness=0)
    setter(top_p=None, top_k=None, min_p=None, temperature=None)(trainer)
    assert watch.sampling() == {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "temperature": 1.0}
    setter(top_p=0.9, top_k=5, min_p=0.1, temperature=0.7)(trainer)
    assert watch.sampling() == {}, "as the workers have it"


def test_a_config_put_in_the_place_of_trls_is_compared_with_it(tmp_path: Path) -> None:
    def another(trainer: Any) -> None:
        trainer.generation_config = copy.deepcopy(trainer.generation_config)
        trainer.generation_config.top_p = 0.5

    assert watched(tmp_path, another) == {"top_p": 0.5}


@pytest.mark.parametrize("name", ["repetition_penalty", "do_sample", "suppress_tokens", "stop_strings"])
def test_a_setting_that_jobs_do_not_bring_is_refused(name: str, tmp_path: Path) -> None:
    values = {"repetition_penalty": 1.5, "do_sample": False, "suppress_tokens": [3], "stop_strings": ["a"]}
    with pytest.raises(RunRefused, match=rf"^{name} of generation_config has changed.*without --distributed"):
        watched(tmp_path, setter(**{name: values[name]}))


def test_a_setting_of_the_models_own_config_counts(tmp_path: Path) -> None:
    def change(trainer: Any) -> None:
        trainer.model.generation_config.typical_p = 0.5

    with pytest.raises(RunRefused, match=r"^typical_p of generation_config has changed"):
        watched(tmp_path, change)


def halve_the_scaling(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.scaling["default"] *= 0.5


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (halve_the_scaling, "scaling"),
        (lambda model: model.base_model.disable_adapter_layers(), "disable_adapters"),
        (lambda model: model.base_model.merge_adapter(), "merged_adapters"),
    ],
)
def test_what_a_callback_changes_of_adapters_but_their_weights_is_refused(
    change: Callable[[Any], None], name: str, tmp_path: Path
) -> None:
    trainer = build_trainer(tmp_path, arguments={"peft_config": LoraConfig(target_modules=["q_proj"])})
    watch = Watch(trainer, engine=HF, max_staleness=0)
    assert watch.sampling() == {}
    with trainer.model.disable_adapter():
        pass
    trainer.state.global_step += 1
    assert watch.sampling() == {}, "as it was"
    change(trainer.model)
    trainer.state.global_step += 1
    with pytest.raises(RunRefused, match=rf"^{name} of base_model\..*q_proj has changed during the run"):
        watch.sampling()


def with_buffer(output_dir: Path, value: torch.Tensor, *, persistent: bool) -> tuple[Any, Watch]:
    trainer = build_trainer(output_dir)
    trainer.model.register_buffer("scale", value, persistent=persistent)
    return trainer, Watch(trainer, engine=HF, max_staleness=0)


@pytest.mark.parametrize("change", [lambda model: model.scale.fill_(2.0), lambda model: model.scale.data.fill_(2.0)])
def test_a_buffer_that_a_callback_changes_is_refused(change: Callable[[Any], None], tmp_path: Path) -> None:
    trainer, watch = with_buffer(tmp_path, torch.ones(2), persistent=True)
    assert watch.sampling() == {}
    change(trainer.model)
    trainer.state.global_step += 1
    with pytest.raises(RunRefused, match=r"^The buffer scale of the model has changed.*without --distributed"):
        watch.sampling()


def test_a_buffer_in_the_place_of_another_is_compared_with_it(tmp_path: Path) -> None:
    trainer, watch = with_buffer(tmp_path, torch.ones(2), persistent=True)
    trainer.model.scale = torch.ones(2, dtype=torch.bfloat16)
    assert watch.sampling() == {}, "only cast"
    trainer.model.scale = torch.zeros(2)
    trainer.state.global_step += 1
    with pytest.raises(RunRefused, match=r"^The buffer scale"):
        watch.sampling()


def test_buffers_that_forward_passes_compute_may_change(tmp_path: Path) -> None:
    trainer, watch = with_buffer(tmp_path, torch.ones(2), persistent=False)
    assert watch.sampling() == {}
    trainer.model.scale.fill_(2.0)
    trainer.state.global_step += 1
    assert watch.sampling() == {}


def test_what_is_compared_is_what_transformers_samples_with(tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path, top_k=-1, top_p=0.9)
    trainer.model.generation_config.typical_p = 0.5
    trainer.model.generation_config.temperature = 0.5  # TRL's own goes before it
    sampled_with, compared = vars(transformers_config(trainer)), sampling_changes._settings(trainer)
    draws = [name for name in sampled_with if not name.startswith(sampling_changes._DRAWS_NOTHING)]
    assert {name: compared[name] for name in draws} == {name: sampled_with[name] for name in draws}
    assert (compared["typical_p"], compared["temperature"], compared["top_k"]) == (0.5, 1.0, 0)


@pytest.mark.parametrize("engine", [VLLM, None])
@pytest.mark.parametrize("name", ["top_p", "temperature"])
def test_only_transformers_can_draw_from_another_distribution(name: str, engine: Any, tmp_path: Path) -> None:
    with pytest.raises(RunRefused, match=rf"^{name} of generation_config.*--generator hf"):
        watched(tmp_path, setter(**{name: 0.5}), engine=engine)


def test_another_temperature_needs_fresh_rollouts(tmp_path: Path) -> None:
    assert watched(tmp_path, setter(temperature=0.5)) == {"temperature": 0.5}
    with pytest.raises(RunRefused, match=r"^temperature of generation_config.*--max-staleness 0"):
        watched(tmp_path, setter(temperature=0.5), stale=1)


CHANGES: dict[str, Callable[[Any], None]] = {
    "trainer.num_generations": lambda trainer: setattr(trainer, "num_generations", 4),
    "trainer.args.steps_per_generation": lambda trainer: setattr(trainer.args, "steps_per_generation", 2),
    "trainer.chat_template_kwargs": lambda trainer: trainer.chat_template_kwargs.update(enable_thinking=False),
    "trainer.reward_funcs": lambda trainer: trainer.reward_funcs.append(len),
    "trainer.rollout_func": lambda trainer: setattr(trainer, "rollout_func", len),
    "chat_template of the tokenizer": lambda trainer: setattr(trainer.processing_class, "chat_template", "{{1}}"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_workers_have_from_the_setup_file_stays(name: str, tmp_path: Path) -> None:
    with pytest.raises(RunRefused, match=rf"^{name} has changed during the run.*without --distributed"):
        watched(tmp_path, CHANGES[name])


READ_ONCE: dict[str, Callable[[Any], None]] = {
    "trainer.temperature": lambda trainer: setattr(trainer, "temperature", 0.5),
    "trainer.args.max_completion_length": lambda trainer: setattr(trainer.args, "max_completion_length", 4),
}


@pytest.mark.parametrize("name", READ_ONCE)
def test_a_change_that_plain_trl_does_not_follow_is_said_to_be_that(name: str, tmp_path: Path) -> None:
    """It would do no harm at staleness 0, but its author believes that it does something."""
    with pytest.raises(RunRefused, match=rf"^{name} has changed during the run.*plain TRL would not follow it either"):
        watched(tmp_path, READ_ONCE[name])


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


def test_tools_that_are_taken_away_are_a_change(tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path)
    trainer.tools = [len]
    watch = Watch(trainer, engine=HF, max_staleness=0)
    trainer.tools = []
    with pytest.raises(RunRefused, match=r"^trainer\.tools has changed"):
        watch.sampling()


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


@pytest.mark.parametrize(("trainer_class", "lengths"), [(PerStep, [3, 4, 5]), (PerBatch, [3, 4, 5])])
def test_an_override_that_sets_the_length_of_each_step(
    trainer_class: type[GRPOTrainer], lengths: list[int], tmp_path: Path
) -> None:
    run = InProcessRun(settings(tmp_path, trainer_class=trainer_class, max_steps=3)).train()
    assert longest(run) == lengths


def test_an_override_that_counts_from_what_it_set_before(tmp_path: Path) -> None:
    """It runs in the server as well, and workers begin with what it made there of the batches before."""
    run = InProcessRun(settings(tmp_path, trainer_class=Lengthening, max_steps=3, max_completion_length=2)).train()
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
    with pytest.raises(RunRefused, match=r"changed generation_config"):
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
