"""The trainer that rewards, tools and overrides read in a worker: what it says is TRL's, or it refuses to be used."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback, TrainerState
from trl import GRPOTrainer

from async_grpo.errors import RunRefused
from async_grpo.rollout.trl_view import NOT_HERE
from kit.compared_with_trl import TIMES, own_names, run_as_trl_would, settings
from kit.in_process import InProcessRun, InProcessWorker, jobs_of
from kit.tiny_trainer import QWEN3_CHAT_TEMPLATE, build_trainer, letters, plain_rows

pytestmark = pytest.mark.integration


def reading(tmp_path: Path, look: Callable[[Any], None], **changes: Any) -> Callable[..., GRPOTrainer]:
    """A `get_trainer()` whose reward function looks at the trainer that it has in its closure."""

    def get_trainer(arguments: dict[str, Any] | None = None) -> GRPOTrainer:
        def looks(completions: list[Any], **_: Any) -> list[float]:
            look(trainer)
            return letters(completions)

        both = {**changes.get("arguments", {}), **(arguments or {})}
        trainer = build_trainer(tmp_path, reward_funcs=looks, **{**changes, "arguments": both})
        return trainer

    return get_trainer


def in_trl_and_in_workers(seen: list[Any], groups: int) -> tuple[list[Any], list[Any]]:
    """What a reward has seen: once a batch in TRL, which came last, and once a group in workers, alike in a batch."""
    batches = len(seen) // (groups + 1)
    of_groups, in_trl = seen[:-batches], seen[-batches:]
    assert all(one == of_groups[index - index % groups] for index, one in enumerate(of_groups))
    return in_trl, of_groups[::groups]


def test_a_closure_reads_the_state_that_it_reads_in_trl(tmp_path: Path) -> None:
    seen: list[Any] = []

    def look(trainer: Any) -> None:
        state = trainer.state
        assert isinstance(state, TrainerState)
        seen.append((state.global_step, state.epoch, state.max_steps, trainer.is_in_train, trainer.model.training))

    run_as_trl_would(reading(tmp_path, look, max_steps=4))
    in_trl, in_workers = in_trl_and_in_workers(seen, 4)
    assert in_workers == in_trl and [step for step, *_ in in_trl] == [0, 1, 2, 3]


def test_threads_and_coroutines_of_a_reward_read_the_same(tmp_path: Path) -> None:
    seen: list[Any] = []
    kept = ThreadPoolExecutor(1)

    def in_threads(completions: list[Any], trainer_state: Any, **_: Any) -> list[float]:
        seen.append((trainer_state.global_step, kept.submit(lambda: trainer_state.global_step).result()))
        return letters(completions)

    async def in_coroutines(completions: list[Any], trainer_state: Any, **_: Any) -> list[float]:
        seen.append((trainer_state.global_step,) * 2)
        return letters(completions)

    InProcessRun(settings(tmp_path, reward_funcs=[in_threads, in_coroutines], max_steps=3), fresh_every=2).train()
    assert seen == [(step, step) for step in range(3) for _ in range(8)]


def plain_log(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: entry[name] for name in own_names(entry) - {*TIMES}} for entry in entries]


@pytest.mark.parametrize(
    "history",
    [
        lambda state: state.log_history,
        lambda state: copy.deepcopy(state).log_history,
        lambda state: dataclasses.asdict(state)["log_history"],
    ],
)
def test_the_log_is_the_one_that_a_reward_reads_in_trl(history: Callable[[Any], Any], tmp_path: Path) -> None:
    seen: list[Any] = []
    run_as_trl_would(reading(tmp_path, lambda trainer: seen.append(plain_log(history(trainer.state))), max_steps=3))
    in_trl, in_workers = in_trl_and_in_workers(seen, 4)
    assert [[entry["step"] for entry in log] for log in in_trl] == [[], [1], [1, 2]]
    for ours, theirs in zip(in_workers, in_trl, strict=True):
        assert [*map(dict, ours)] == [pytest.approx(entry, abs=1e-5) for entry in theirs]


class Levels(TrainerCallback):
    """A curriculum of the user's, in the state. It is called after the jobs of the next step were issued."""

    def on_step_end(self, args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
        state.level = state.global_step // 2

    def on_log(self, args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
        state.best_metric = float(state.global_step)


def test_what_callbacks_do_at_the_end_of_a_step_is_seen_in_the_next(tmp_path: Path) -> None:
    seen: list[Any] = []

    def look(trainer: Any) -> None:
        seen.append((getattr(trainer.state, "level", None), trainer.state.best_metric))

    run_as_trl_would(reading(tmp_path, look, arguments={"callbacks": [Levels()]}, max_steps=4))
    in_trl, in_workers = in_trl_and_in_workers(seen, 4)
    assert in_workers == in_trl == [(None, None), (0, 1.0), (1, 2.0), (1, 3.0)]


class AddsOfPrompts(GRPOTrainer):
    def _tokenize_prompts(self, prompts: Any) -> Any:
        self._metrics["train"]["prompts"].append(len(prompts))
        return super()._tokenize_prompts(prompts)


class Adds(GRPOTrainer):
    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, *args: Any) -> Any:
        for text in completions:
            self._metrics["train"]["rewards/characters"].append(len(text))
        self._metrics["train"].setdefault("reward_calls", []).extend([1.0])
        return super()._calculate_rewards(inputs, prompts, completions, *args)


def test_what_is_added_to_the_metrics_is_logged_as_in_trl(tmp_path: Path) -> None:
    """By a closure and by overrides, with another number of values in each batch, averaged over two of them."""

    def look(trainer: Any) -> None:
        trainer._metrics["train"]["steps"] += [float(trainer.state.global_step)] * (1 + trainer.state.global_step)

    run, _ = run_as_trl_would(reading(tmp_path, look, max_steps=4, logging_steps=2, trainer_class=Adds))
    assert [entry["steps"] for entry in run.logs] == [pytest.approx(2 / 3), pytest.approx(18 / 7)]
    assert all("rewards/characters" in entry for entry in run.logs)


def test_what_is_added_while_prompts_are_made_travels_with_the_next_group(tmp_path: Path) -> None:
    worker = InProcessWorker(build_trainer(tmp_path, trainer_class=AddsOfPrompts))
    groups = worker.generate(jobs_of(plain_rows(2)))
    assert [worker.trl.score([group])[0].added for group in groups] == [{"train/prompts": [2.0, 2.0]}, {}]


def test_a_value_counts_once(tmp_path: Path) -> None:
    def look(trainer: Any) -> None:
        trainer._metrics["train"]["calls"].append(1.0)
        trainer._metrics["eval"]["calls"].append(2.0)

    worker = InProcessWorker(reading(tmp_path, look)())
    groups = worker.generate(jobs_of(plain_rows(3)))
    together = worker.trl.score(groups)
    assert [scores.added for scores in together] == [{"train/calls": [1.0], "eval/calls": [2.0]}, {}, {}]
    assert worker.trl.score(groups[:1])[0].added["train/calls"] == [1.0]


WHY_AND_WAY = r"[a-z].+\. [A-Z].+, or train in one process \(without --distributed\)\.$"


def test_each_reason_has_a_way_out() -> None:
    assert not [name for name, why in NOT_HERE.items() if not re.match(r"[a-z].+\. [A-Z]", why)]


def swallowing(look: Callable[[Any], Any]) -> Callable[[Any], None]:
    def looks(trainer: Any) -> None:
        with suppress(Exception):
            look(trainer)

    return looks


@pytest.mark.parametrize("caught", [False, True])
@pytest.mark.parametrize(
    ("name", "look"),
    [
        ("optimizer", lambda trainer: trainer.optimizer.param_groups[0]["lr"]),
        ("optimizer", lambda trainer: hasattr(trainer.optimizer, "state")),
        ("lr_scheduler", lambda trainer: trainer._get_learning_rate()),
        ("ref_model", lambda trainer: trainer.ref_model(torch.zeros(1, 1).long())),
        ("control", lambda trainer: setattr(trainer.control, "should_training_stop", True)),
        ("callback_handler", lambda trainer: trainer.add_callback(Levels())),
        ("_logs", lambda trainer: trainer._logs["extra"]["mine"].append(1)),
        ("_step", lambda trainer: trainer._step % 2),
        ("_step", lambda trainer: trainer._step == 0),
        ("_buffered_inputs", lambda trainer: trainer._buffered_inputs[0]),
        ("log", lambda trainer: trainer.log({"mine": 1.0})),
        ("save_model", lambda trainer: trainer.save_model()),
        ("_metrics", lambda trainer: trainer._metrics["train"]["reward"][-1]),
        ("_metrics", lambda trainer: "reward" in trainer._metrics["train"]),
        ("_metrics", lambda trainer: [*trainer._metrics["train"].items()]),
        ("_metrics", lambda trainer: trainer._metrics["train"].__setitem__("mine", [1.0])),
        ("state.level", lambda trainer: setattr(trainer.state, "level", 1)),
    ],
)
def test_what_no_worker_has_ends_the_run_when_it_is_used(
    name: str, look: Callable[[Any], Any], caught: bool, model_folder: str, tmp_path: Path
) -> None:
    get_trainer = reading(tmp_path, swallowing(look) if caught else look, model=model_folder, beta=0.1)
    worker = InProcessWorker(worker_of(get_trainer))
    groups = worker.generate(jobs_of(plain_rows(1)))
    with pytest.raises(RunRefused, match=rf"^trainer\.{name}.* cannot be used in a worker: {WHY_AND_WAY}"):
        worker.trl.score(groups)


def worker_of(get_trainer: Callable[..., GRPOTrainer]) -> GRPOTrainer:
    from async_grpo.setup.worker_build import built_for_a_worker

    with built_for_a_worker(1):
        return get_trainer()


def test_what_no_worker_has_may_be_tested(model_folder: str, tmp_path: Path) -> None:
    seen: list[Any] = []

    def look(trainer: Any) -> None:
        there = [getattr(trainer, name) for name in ("optimizer", "lr_scheduler", "ref_model")]
        seen.append([(bool(one), one is None, one == None, one != None) for one in there])  # noqa: E711

    run_as_trl_would(reading(tmp_path, look, model=model_folder, beta=0.1))
    in_trl, in_workers = in_trl_and_in_workers(seen, 4)
    assert in_workers == in_trl == [[(True, False, False, True)] * 3] * 2


def test_a_reward_logs_in_threads_of_its_own(tmp_path: Path) -> None:
    """Also while other groups are generated, whose code runs at the same time."""
    kept = ThreadPoolExecutor(1)

    def logs(completions: list[Any], log_extra: Any, log_metric: Any, **_: Any) -> list[float]:
        kept.submit(log_extra, "mine", [1] * len(completions)).result()
        kept.submit(log_metric, "also", 2.0).result()
        return letters(completions)

    worker = InProcessWorker(build_trainer(tmp_path, reward_funcs=logs))
    [group] = worker.generate(jobs_of(plain_rows(1)))
    with worker.trl.view.during(group.job, group.version):  # a dialogue, say
        [scores] = worker.trl.score([group])
    assert scores.extra_columns == {"mine": [1] * len(group.rows)} and scores.metrics == {"also": [2.0]}


def test_the_policy_may_be_used_where_its_weights_stay(tmp_path: Path) -> None:
    def look(trainer: Any) -> None:
        with torch.no_grad():
            trainer.model(torch.zeros(1, 1).long())

    worker = InProcessWorker(reading(tmp_path, look)())
    [group] = worker.generate(jobs_of(plain_rows(1)))
    worker.trl.score([group])
    for stale in (replace(group.job, born_version=1), replace(group.job, purpose="eval")):
        with pytest.raises(RunRefused, match=r"trainer\.model in a reward function cannot be used"):
            worker.trl.score([replace(group, job=stale)])
    worker.trl.view.policy_is_here = False  # as with vLLM
    with pytest.raises(RunRefused, match=r"trainer\.model in a reward function cannot be used"):
        worker.trl.score([group])


def test_tools_and_environments_read_what_they_read_in_trl(tmp_path: Path) -> None:
    """The state of the job, and metrics that they add; the environments of another group are not in a closure."""
    seen: list[Any] = []
    held: list[Any] = []

    class Notes:
        def reset(self, **_: Any) -> str:
            seen.append(held[-1].state.global_step)
            held[-1]._metrics["train"]["resets"].append(1.0)
            return ""

        def note(self, text: str) -> str:
            """Note a text.

            Args:
                text: the text.
            """
            return text

    def get_trainer(arguments: Any = None) -> GRPOTrainer:
        def reward(completions: list[Any], environments: list[Any], **_: Any) -> list[float]:
            assert len(environments) == len(completions)
            return letters(completions)

        trainer = build_trainer(
            tmp_path,
            chat_template=QWEN3_CHAT_TEMPLATE,
            reward_funcs=reward,
            max_steps=3,
            arguments={**(arguments or {}), "environment_factory": Notes},
            max_completion_length=4,
        )
        held.append(trainer)
        return trainer

    run = InProcessRun(get_trainer).train()
    assert seen == [step for step in range(3) for _ in range(8)]
    assert all(entry["resets"] == 1.0 for entry in run.logs)
    with pytest.raises(RunRefused, match="Use the argument environments"):
        len(held[-1].environments)


def test_all_that_training_changes_has_a_stand_in(tmp_path: Path) -> None:
    """A name that a new TRL or transformers trains is here: let it be true in workers, or put it into `NOT_HERE`."""
    before: dict[str, Any] = {}
    found: set[str] = set()

    def look(trainer: Any) -> None:
        if before and trainer.state.global_step == 2:
            found.update(name for name in before if before[name] is not vars(trainer)[name])

    trainer = reading(tmp_path, look, max_steps=3)()
    before.update(vars(trainer))
    trainer.train()
    of_the_loop = {"_created_lr_scheduler", "_mixed_mesh_grads"}  # which no worker runs
    assert found - NOT_HERE.keys() - of_the_loop == {"state", "is_in_train"}, "they are true in workers"
