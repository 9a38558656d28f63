"""Groups that are prepared, sampled and finished one by one are the groups that TRL makes in one go."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any, ClassVar

import pytest
from trl import GRPOTrainer
from trl.chat_template_utils import qwen3_chat_template

from async_grpo.engines import SampledGroup
from async_grpo.errors import UnsupportedError
from async_grpo.records import Timings
from async_grpo.rollout.trl_group import to_record
from async_grpo.rollout.trl_trainer import RolloutTrainer
from async_grpo.tokens import Tokens, ids_and_logprobs
from kit.in_process import InProcessWorker, jobs_of
from kit.tiny_trainer import build_trainer, chat_rows, plain_rows

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
    scores = worker.trl.score([group])[0]
    record = to_record(group, scores, attempt=0, worker="dev1", timings=Timings())
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
    jobs = jobs_of(chat_rows(), GROUP_SIZE)
    groups = InProcessWorker(trainer).generate(jobs)
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
