"""Groups that are prepared, sampled and finished one by one are those of TRL; prompts come in its order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any, ClassVar

import pytest
from datasets import Dataset
from trl import GRPOTrainer
from trl.chat_template_utils import qwen3_chat_template

from async_grpo.engines import SampledGroup
from async_grpo.errors import UnsupportedError
from async_grpo.records import Timings
from async_grpo.rollout.trl_group import to_record
from async_grpo.rollout.trl_trainer import RolloutTrainer
from async_grpo.tokens import Tokens, ids_and_logprobs
from async_grpo.training.prompts import prompt_rows
from async_grpo.training.trl_trainer import refuse_unsupported
from kit.compared_with_trl import settings
from kit.in_process import InProcessRun, InProcessWorker, jobs_of
from kit.scripted import ScriptedEngine, ScriptedGenerator, writing
from kit.tiny_trainer import PROMPTS, QWEN3_CHAT_TEMPLATE, build_trainer, chat_rows, length, letters, plain_rows

GROUP_SIZE = 2
TOKENS = 200
FIELDS = ("rows", "prompts", "completions", "prompt_ids", "tokens", "metrics")


@pytest.mark.parametrize("chat_template", [None, qwen3_chat_template], ids=["text", "chat"])
def test_groups_are_those_that_trl_makes_of_the_same_tokens(chat_template: str | None, tmp_path: Path) -> None:
    rows = list(plain_rows() if chat_template is None else chat_rows())
    worker = InProcessWorker(build_trainer(tmp_path, chat_template=chat_template, max_completion_length=TOKENS))
    assert worker.trl.samples_whole
    jobs = jobs_of(rows, GROUP_SIZE)
    groups = worker.generate(jobs, 3)

    def sample(prompt_ids: list[list[int]], *_: Any) -> Any:
        assert prompt_ids == [ids for group in groups for ids in group.prompt_ids]
        return ids_and_logprobs(tokens for group in groups for tokens in group.tokens)

    in_trl = worker.trl.fork().generate(jobs, 3, sample)
    for expected, group in zip(in_trl, groups, strict=True):
        for field in FIELDS:
            assert getattr(group, field) == getattr(expected, field), field
        assert (group.job, group.version) == (expected.job, 3)
        ours, theirs = (worker.trl.score([one])[0] for one in (group, expected))
        assert ours.rewards.tolist() == theirs.rewards.tolist()


def test_groups_end_one_by_one(tmp_path: Path) -> None:
    worker = InProcessWorker(build_trainer(tmp_path, max_completion_length=TOKENS))
    jobs = jobs_of(plain_rows(), GROUP_SIZE)
    worker.calls.start(jobs, 0)
    done: list[int] = []
    steps, first = 0, 0
    while len(done) < len(jobs):
        steps += 1
        ended = worker.calls.step()
        for outcome in ended:
            assert outcome.group is not None
            assert max(map(len, outcome.group.tokens)) == steps, "with the last token of its last completion"
        first = first or (steps if ended else 0)
        done += [outcome.job.seq for outcome in ended]
    assert first < steps
    assert sorted(done) == [job.seq for job in jobs], "each of them once"


class Counting(GRPOTrainer):
    """Puts before each prompt how often it was asked to tokenize."""

    asked = 0

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        self.asked += 1
        ids, *others = super()._tokenize_prompts(prompts)
        return [[self.asked, *row] for row in ids], *others


def test_prompts_are_made_once(tmp_path: Path) -> None:
    """A template may ask for the time of day: what is handed back is what was sampled from."""
    trl = RolloutTrainer(build_trainer(tmp_path, trainer_class=Counting, max_completion_length=TOKENS))
    [job] = jobs_of([plain_rows()[0]], GROUP_SIZE)
    prepared = trl.prepare(job, 0)
    sampled = SampledGroup(prepared=prepared, tokens=[Tokens([5], [-1.0])] * GROUP_SIZE)
    group = trl.finish(sampled)
    assert trl.trainer.asked == 1
    assert [ids[0] for ids in group.prompt_ids] == [1] * GROUP_SIZE


@pytest.mark.parametrize("chat_template", [None, qwen3_chat_template], ids=["text", "chat"])
def test_a_completion_begins_with_the_tokens_of_its_job(chat_template: str | None, tmp_path: Path) -> None:
    rows = plain_rows() if chat_template is None else chat_rows()
    worker = InProcessWorker(build_trainer(tmp_path, chat_template=chat_template, max_completion_length=TOKENS))
    [job] = jobs_of([rows[0]], GROUP_SIZE)
    [plain] = worker.generate([job])
    prefix = tuple(plain.completion_ids[0][:3])
    job = replace(job, prefix_ids=prefix, purpose="generate", sampling={"max_tokens": 2})
    assert worker.trl.prepare(job, 0).prompt_ids[0] == [*plain.prompt_ids[0], *prefix]
    [group] = worker.generate([job])
    assert group.prompt_ids == plain.prompt_ids and group.prompts == plain.prompts
    for tokens, completion in zip(group.tokens, group.completions, strict=True):
        assert tuple(tokens.ids[:3]) == prefix and len(tokens) <= 5
        assert tokens.mask[:4] == [0, 0, 0, 1] and tokens.logprobs[:3] == [0.0] * 3 and tokens.logprobs[3] < 0
        text = completion if isinstance(completion, str) else completion[0]["content"]
        assert text == worker.trl.trainer.processing_class.decode(tokens.ids, skip_special_tokens=True)
    record = to_record(group, worker.trl.score([group])[0], attempt=0, worker="dev1", timings=Timings())
    assert record.tool_mask is not None and record.tool_mask.tolist() == [*group.tokens[0].mask, *group.tokens[1].mask]


def test_no_completion_of_several_turns_begins_with_given_tokens(tmp_path: Path) -> None:
    worker = InProcessWorker(build_trainer(tmp_path, trainer_class=OwnLoop, max_completion_length=TOKENS))
    [job] = jobs_of([plain_rows()[0]], GROUP_SIZE)
    worker.calls.start([replace(job, prefix_ids=(5,))], 0)
    while not (ended := worker.calls.step()):
        pass
    assert isinstance(ended[0].error, UnsupportedError) and "prefix_ids" in str(ended[0].error)


def test_a_prompt_that_a_method_changes_stays_the_datasets(tmp_path: Path) -> None:
    class Changing(GRPOTrainer):
        def _tokenize_prompts(self, prompts: list[Any]) -> Any:
            for prompt in prompts:
                prompt[0]["content"] = "changed"
            return super()._tokenize_prompts(prompts)

    trainer = build_trainer(tmp_path, trainer_class=Changing, chat_template=qwen3_chat_template)
    groups = InProcessWorker(trainer).generate(jobs_of(chat_rows(), GROUP_SIZE))
    assert groups[0].prompts[0][0]["content"] == chat_rows()[0]["prompt"][0]["content"]


def test_a_method_can_give_each_completion_a_prompt_of_its_own(tmp_path: Path) -> None:
    def numbered(self: Any, prompts: list[Any]) -> Any:
        ids, *others = GRPOTrainer._tokenize_prompts(self, prompts)
        return [[10 + number, *row] for number, row in enumerate(ids)], *others

    class Numbering(GRPOTrainer):
        _tokenize_prompts = numbered

    of_the_class = build_trainer(tmp_path, trainer_class=Numbering, max_completion_length=TOKENS)
    of_the_object = build_trainer(tmp_path, max_completion_length=TOKENS)
    of_the_object._tokenize_prompts = MethodType(numbered, of_the_object)
    for trainer in (of_the_class, of_the_object):
        [group] = InProcessWorker(trainer).generate(jobs_of([plain_rows()[0]], GROUP_SIZE))
        assert [ids[0] for ids in group.prompt_ids] == [10 + number for number in range(GROUP_SIZE)]


class OwnLoop(GRPOTrainer):
    """Asks for tokens twice, which nobody outside can know."""

    def _generate(self, prompts: list[Any]) -> Any:
        first = super()._generate(prompts)
        super()._generate(prompts)
        return first


class OwnBatch(GRPOTrainer):
    """Sees every batch, and may count them."""

    batches: ClassVar[list[int]] = []

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Any:
        self.batches.append(len(inputs))
        return super()._generate_and_score_completions(inputs)


@pytest.mark.parametrize("kind", [OwnLoop, OwnBatch])
def test_a_loop_of_the_users_own_runs_as_it_is(kind: type[GRPOTrainer], tmp_path: Path) -> None:
    worker = InProcessWorker(build_trainer(tmp_path, trainer_class=kind, max_completion_length=TOKENS))
    assert not worker.trl.samples_whole
    OwnBatch.batches.clear()
    jobs = jobs_of(plain_rows(), GROUP_SIZE)
    assert [group.job for group in worker.generate(jobs)] == jobs
    assert OwnBatch.batches == ([len(jobs) * GROUP_SIZE] if kind is OwnBatch else [])


class NoGeneration(GRPOTrainer):
    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Any:
        return {}


def test_a_trainer_that_generates_without_trl_is_refused(tmp_path: Path) -> None:
    worker = InProcessWorker(build_trainer(tmp_path, trainer_class=NoGeneration))
    with pytest.raises(UnsupportedError, match=r"without GRPOTrainer\._generate"):
        worker.generate(jobs_of(plain_rows(1), GROUP_SIZE))


# --- Which prompts a run takes, in the order of TRL's sampler; which each completion is trained on; what is refused

IN_FOUR = {"per_device_train_batch_size": 2, "steps_per_generation": 4, "gradient_accumulation_steps": 4}
ORDERS: dict[str, dict[str, Any]] = {
    "one batch a step": {"per_device_train_batch_size": 8, "max_steps": 8},
    "not shuffled": {"per_device_train_batch_size": 8, "max_steps": 8, "shuffle_dataset": False},
    "iterations and steps per generation": {**IN_FOUR, "num_iterations": 2, "max_steps": 14},
}


@pytest.mark.parametrize("streamed", [False, True], ids=["dataset", "iterable dataset"])
@pytest.mark.parametrize("name", ORDERS)
def test_prompts_come_in_the_order_of_trl(name: str, streamed: bool, tmp_path: Path) -> None:
    """More than two epochs of 14 rows, of which 3 batches of 4 prompts can be made."""
    drawn: list[str] = []

    def note(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        drawn.extend(prompts)
        return letters(completions)

    def get_trainer() -> GRPOTrainer:
        rows = plain_rows()
        rows = rows.to_iterable_dataset() if streamed else rows
        return build_trainer(tmp_path, train_dataset=rows, reward_funcs=note, max_completion_length=1, **ORDERS[name])

    plain = get_trainer()
    plain.train()
    expected = drawn[:: plain.num_generations]
    assert plain.state.epoch > 2
    assert set(expected) <= set(PROMPTS)

    rows = list(islice(prompt_rows(get_trainer()), len(expected)))
    assert [row["prompt"] for row in rows] == expected
    assert all(row["target"] == len(row["prompt"]) for row in rows)
    for start in (1, 5, 13, 20):
        later = islice(prompt_rows(get_trainer(), start=start), len(expected) - start)
        assert list(later) == rows[start:]


def test_too_few_rows_for_a_batch(tmp_path: Path) -> None:
    for rows in (plain_rows(3), plain_rows(3).to_iterable_dataset()):
        trainer = build_trainer(tmp_path, train_dataset=rows, per_device_train_batch_size=8)
        with pytest.raises(UnsupportedError, match="fewer than one generation batch"):
            next(prompt_rows(trainer))


def test_a_sampler_that_does_not_repeat_rows_is_refused(tmp_path: Path) -> None:
    """By the name of the user's class, though the trainer has another one by then."""

    class Unrepeated(GRPOTrainer):
        def _get_train_sampler(self, dataset: Any = None) -> Iterator[int]:
            return iter(range(100))

    run = InProcessRun(settings(tmp_path, trainer_class=Unrepeated))
    way_out = r"Change _get_train_sampler.*without --distributed"
    with pytest.raises(UnsupportedError, match=rf"^Unrepeated's.*num_generations=2.*{way_out}"):
        next(prompt_rows(run.trainer))


# --- Refusals ---------------------------------------------------------------------------------------------


def stand_in(**changes: Any) -> Any:
    """What `refuse_unsupported` looks at, of a trainer that needs no such hardware to be built."""
    values = {"use_vllm": False, "deepspeed": None, "fsdp": None, **changes}
    fsdp = values.pop("fsdp")
    return SimpleNamespace(
        args=SimpleNamespace(**values),
        is_deepspeed_enabled=False,
        is_fsdp_enabled=fsdp is not None,
        accelerator=SimpleNamespace(is_fsdp2=fsdp == 2),
    )


@pytest.mark.parametrize(
    ("changes", "setting", "way_out"),
    [
        ({"deepspeed": "zero3.json"}, "`deepspeed` of the GRPOConfig", "--accelerate-config"),
        ({"fsdp": 1}, "FSDP of version 1", "`fsdp_version: 2`"),
        ({"use_vllm": True}, "use_vllm=True", "give it to the GRPOConfig"),
    ],
)
def test_refusals_name_the_setting_and_the_way_out(changes: dict[str, Any], setting: str, way_out: str) -> None:
    with pytest.raises(UnsupportedError) as refusal:
        refuse_unsupported(stand_in(**changes))
    assert setting in str(refusal.value)
    assert way_out in str(refusal.value)


def test_a_worker_refuses_vllm_that_is_asked_for_too_late(tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path)
    trainer.args.use_vllm = True
    with pytest.raises(UnsupportedError, match=r"use_vllm=True.*give it to the GRPOConfig"):
        RolloutTrainer(trainer)


def test_a_rollout_func_without_logprobs_is_refused(tmp_path: Path) -> None:
    def rollout_func(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        ids = [[1, 2, 3] for _ in prompts]
        return {"prompt_ids": ids, "completion_ids": ids, "logprobs": None}

    run = InProcessRun(settings(tmp_path, {"rollout_func": rollout_func}))
    with pytest.raises(UnsupportedError, match=r"rollout_func.*'logprobs'"):
        run.train()


# --- Each completion is trained on with the prompt that it was sampled from --------------------------------------


def varying() -> Callable[[], Any]:
    """Environments of one trainer: no two starts are alike."""
    starts = iter(range(10_000))

    class Varying:
        def reset(self, **row: Any) -> str:
            return f" {next(starts)}!"

    return Varying


def repeats_digits(prompt: str, index: int) -> str:
    """So that the completion says what it was sampled from."""
    return digits(prompt)


def digits(text: str) -> str:
    return "".join(character for character in text if character.isdigit())


def prompts_and_completions(run: InProcessRun) -> list[tuple[str, str]]:
    """The prompt and completion of each row that was trained on."""
    decode = run.trainer.processing_class.decode
    return [
        (decode(prompt[prompt_mask.bool()]), decode(completion[mask.bool()]))
        for batch in run.inputs
        for prompt, prompt_mask, completion, mask in zip(
            *(batch[name] for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")), strict=True
        )
    ]


@pytest.mark.parametrize("with_prompt", [True, False], ids=["prompt in the dataset", "no prompt in the dataset"])
def test_environments_whose_reset_varies(with_prompt: bool, tmp_path: Path) -> None:
    own = {"prompt": [{"role": "user", "content": "Say"}]} if with_prompt else {"environment": "varying"}
    rows = Dataset.from_list([own] * 8)

    def get_trainer(**changes: Any) -> GRPOTrainer:
        factory = varying() if with_prompt else {"varying": varying()}
        given = {"chat_template": QWEN3_CHAT_TEMPLATE, "train_dataset": rows, "reward_funcs": [length], **changes}
        return settings(tmp_path, {"environment_factory": factory})(**given)

    run = InProcessRun(get_trainer, engine=ScriptedEngine(ScriptedGenerator(repeats_digits))).train()
    trained = prompts_and_completions(run)
    assert [digits(prompt) for prompt, _ in trained] == [digits(completion) for _, completion in trained]
    assert len({prompt for prompt, _ in trained}) == len(trained) == 16

    plain: Any = get_trainer(trainer_class=writing(repeats_digits))
    plain.train()
    assert list(run.trainer._logs["prompt"]) == list(plain._logs["prompt"]), "the observation is logged"
    assert list(run.trainer._logs["completion"]) == list(plain._logs["completion"])
    lengths = [[entry["completions/mean_length"] for entry in it.state.log_history[:2]] for it in (run.trainer, plain)]
    assert lengths[0] == lengths[1]


def test_a_rollout_func_with_a_prompt_for_each_completion(tmp_path: Path) -> None:
    def rollout_func(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        texts = [f"{prompt}{index}" for index, prompt in enumerate(prompts)]
        tokenizer = trainer.processing_class
        completion_ids = tokenizer([f"{index}" for index in range(len(prompts))])["input_ids"]
        logprobs = [[-1.0] * len(row) for row in completion_ids]
        return {"prompt_ids": tokenizer(texts)["input_ids"], "completion_ids": completion_ids, "logprobs": logprobs}

    data = Dataset.from_list([{"prompt": "p"}] * 8)
    run = InProcessRun(settings(tmp_path, {"rollout_func": rollout_func}, train_dataset=data)).train()
    trained = prompts_and_completions(run)
    assert [digits(prompt) for prompt, _ in trained] == [completion for _, completion in trained]
    assert [group.prompts for group in run.groups] == [[]] * len(run.groups), "the dataset's own"


class Shortening(GRPOTrainer):
    """Cuts the last token off each completion, and counts the batches in which it did."""

    def _generate(self, prompts: list[Any]) -> Any:
        prompt_ids, completion_ids, mask, _, logprobs, *others = super()._generate(prompts)
        completion_ids = [ids[:-1] for ids in completion_ids]
        completions = [f"<{text}>" for text in self.processing_class.batch_decode(completion_ids)]
        self._metrics["train" if self.model.training else "eval"]["shortened"].append(1.0)
        return prompt_ids, completion_ids, mask, completions, [row[:-1] for row in logprobs], *others


def test_an_override_of_generate_runs_once(tmp_path: Path) -> None:
    seen: list[tuple[str, list[int]]] = []

    def note(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        seen.extend(zip(completions, completion_ids, strict=True))
        return [float(len(ids)) for ids in completion_ids]

    run = InProcessRun(settings(tmp_path, trainer_class=Shortening, reward_funcs=note)).train()
    trained = [completion for _, completion in prompts_and_completions(run)]
    assert [f"<{text}>" for text in trained] == [text for text, _ in seen]
    assert [len(ids) for _, ids in seen] == [sum(mask) for batch in run.inputs for mask in batch["completion_mask"]]
    assert [entry["shortened"] for entry in run.logs] == [1.0, 1.0]


class Prefixing(GRPOTrainer):
    """Changes the prompts before TRL sees them."""

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Any:
        return super()._generate_and_score_completions([{**row, "prompt": f"7{row['prompt']}"} for row in inputs])


def test_an_override_that_changes_prompts_does_so_once(tmp_path: Path) -> None:
    rows = Dataset.from_list([{"prompt": f"{n}"} for n in range(8)])
    run = InProcessRun(settings(tmp_path, trainer_class=Prefixing, train_dataset=rows, max_steps=1)).train()
    sampled = [prompt for prompt, _ in prompts_and_completions(run)]
    assert {len(prompt) for prompt in sampled} == {2}
    assert list(run.trainer._logs["prompt"]) == sampled


def test_equal_prompts_are_stored_once(tmp_path: Path) -> None:
    run = InProcessRun(settings(tmp_path)).train()
    for group in run.groups:
        assert group.prompt_lengths is None
        assert group.prompts == []
        text = run.trainer.processing_class.decode(group.prompt_ids)
        assert text == group.job.row["prompt"] == group.prompt(0) == group.prompt(1)
