"""Environments of verifiers, by the real package: a taskset with tools, a game of TextArena, and what is refused."""

from __future__ import annotations

import os
import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verifiers", reason="it is not installed here: `make test-envs` makes an environment that has it")

import verifiers.v1 as vf
from sums_taskset import CALL, Library, SumData, SumsTaskset, SumTask
from trl import GRPOTrainer

from async_grpo.envs.verifiers import VerifiersEnvironment, load_environment
from async_grpo.envs.verifiers.refusals import refuse_task
from async_grpo.errors import AsyncGRPOError, UnsupportedError, UsageError
from kit.in_process import InProcessWorker, jobs_of
from kit.runs import finish
from kit.scripted import ScriptedEngine, ScriptedGenerator
from kit.tiny_trainer import QWEN3_CHAT_TEMPLATE, build_tokenizer, build_trainer

HERE = Path(__file__).parent
TURN = "<|im_start|>assistant\n"


def trainer_of(
    environment: VerifiersEnvironment, folder: Path, trainer_class: type[GRPOTrainer] = GRPOTrainer, tokens: int = 400
) -> Any:
    trainer = build_trainer(
        folder,
        chat_template=QWEN3_CHAT_TEMPLATE,
        train_dataset=environment.dataset,
        reward_funcs=environment.reward,
        arguments={"rollout_func": environment.rollout},
        trainer_class=trainer_class,
        max_completion_length=tokens,
    )
    trainer.model.config.max_position_embeddings = 32_768
    return trainer


def worker_of(environment: VerifiersEnvironment, folder: Path, reply: Any, **settings: Any) -> InProcessWorker:
    script = ScriptedGenerator(reply)
    return InProcessWorker(trainer_of(environment, folder, **settings), ScriptedEngine(script))


def adds(prompt: str, index: int) -> str:
    """One episode calls the tool and answers; another calls it wrongly, and then a tool that there is not."""
    turn = prompt.count(TURN)
    if turn == 1:
        return [CALL % (1, 1), CALL % (-1, 1)][index % 2]
    if CALL % (1, 1) in prompt:
        return "2"
    return ["", "", CALL.replace("add", "divide") % (2, 1), "3"][turn]


def test_rewards_and_tools_are_the_tasksets_own(tmp_path: Path) -> None:
    environment = load_environment({"taskset": {"id": "sums_taskset", "count": 2}})
    assert [row["prompt"][1]["content"] for row in environment.dataset] == ["What is 0+0?", "What is 1+1?"]
    worker = worker_of(environment, tmp_path, adds)
    (group,) = worker.rollouts(jobs_of([environment.dataset[1]]))
    assert group.rewards[:, 0].tolist() == [2.5, 0.5]
    assert group.metrics["verifiers/rewards/right"] == [1.0], "the mean, weighted"
    assert group.metrics["verifiers/metrics/additions"] == [1.0], "the state is the episode's own"
    tokenizer = build_tokenizer(QWEN3_CHAT_TEMPLATE)
    (generated,) = worker.generate(jobs_of([environment.dataset[1]]))
    text = tokenizer.decode(generated.completion_ids[0])
    result = f"\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n{TURN}"
    assert text == CALL % (1, 1) + "<|im_end|>" + result + "2<|im_end|>"
    assert generated.has_masks
    first = generated.tokens[0]
    own = [token for token, mask in zip(first.ids, first.mask, strict=True) if mask]
    assert tokenizer.decode(own) == CALL % (1, 1) + "<|im_end|>2<|im_end|>"
    other = tokenizer.decode(generated.completion_ids[1])
    assert "no negative numbers" in other
    assert "Error: there is no tool 'calculator_divide'" in other


def test_tools_of_the_taskset_are_shared_and_their_texts_are_readable(tmp_path: Path) -> None:
    def reads(prompt: str, index: int) -> str:
        if "<tool_response>" in prompt:
            return "2"
        return f'<tool_call>\n{{"name": "text", "arguments": {{"length": {70_000 if index % 2 else 3}}}}}\n</tool_call>'

    Library.started = 0
    environment = load_environment("sums_taskset")
    (group,) = worker_of(environment, tmp_path, reads, tokens=4000).generate(jobs_of([environment.dataset[1]]))
    short, long = map(build_tokenizer(QWEN3_CHAT_TEMPLATE).decode, group.completion_ids)
    assert "xxx?" in short
    assert "Error: the result has 70,001 characters" in long
    assert Library.started == 1


def test_an_environment_that_asks_the_model_for_nothing_fails(tmp_path: Path) -> None:
    class Silent(type(load_environment("sums_taskset")._environment)):  # type: ignore[misc]
        async def run(self, task: Any, agents: Any) -> None:
            async with agents.agent.interaction(task):
                pass

    environment = load_environment("sums_taskset")
    environment._environment.__class__ = Silent
    with pytest.raises(UnsupportedError, match="without asking the agent"):
        worker_of(environment, tmp_path, adds).generate(jobs_of([environment.dataset[1]]))


def test_it_is_the_same_in_plain_trl(tmp_path: Path) -> None:
    class ByScript(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            return ScriptedGenerator(adds, self._tokenizer).generate(prompt_ids)

    environment = load_environment("sums_taskset")
    rows = [environment.dataset[1]]
    (group,) = worker_of(environment, tmp_path, adds).rollouts(jobs_of(rows))
    plain = trainer_of(environment, tmp_path, trainer_class=ByScript)
    _, ids, masks, _, logprobs, extra, *_ = plain._generate([rows[0]["prompt"]] * 2)
    assert group.completion_ids.tolist() == [*chain.from_iterable(ids)]
    assert group.tool_mask.tolist() == [*chain.from_iterable(masks)]  # type: ignore[union-attr]
    assert group.sampling_logprobs.tolist() == [*chain.from_iterable(logprobs)]
    assert [sum(one["rewards"].values()) for one in extra["verifiers"]] == group.rewards[:, 0].tolist()


WORDS = "apple table chair river stone bread light night house mouse plant water cloud train green brown sugar paper"


def finds(prompt: str, index: int) -> str:
    """One player finds each word on the board, one a turn; the other guesses."""
    turn = prompt.count(TURN)
    if index if turn == 1 else "It is there" not in prompt:
        return "Perhaps [0 0 0 1]"
    board = {int(row): re.findall(r"\w", cells) for row, cells in re.findall(r"R(\d\d)((?:\s+\[?\w\]?)+)\s*\n", prompt)}
    words = prompt.rsplit("Placed Words: ", 1)[1].split("\n")[0].split(", ")
    word = words[turn - 1]
    lines = [("row", row, "".join(cells)) for row, cells in board.items()]
    lines += [("column", at, "".join(cells)) for at, cells in enumerate(zip(*board.values(), strict=True))]
    (kind, line, at) = next((kind, line, text.index(word)) for kind, line, text in lines if word in text)
    end = at + len(word) - 1
    return f"It is there: [{line} {at} {line} {end}]" if kind == "row" else f"It is there: [{at} {line} {end} {line}]"


def test_a_game_of_textarena_is_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """verifiers' own environment: the game's engine answers each message, and says how it ended."""
    pytest.importorskip("textarena")
    corpus = tmp_path / "nltk" / "corpora" / "words"
    corpus.mkdir(parents=True)
    for name in ("en", "en-basic", "README"):  # which the game would download
        (corpus / name).write_text("\n".join(WORDS.split()))
    import nltk

    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "nltk")])
    monkeypatch.setattr(nltk, "download", lambda *_, **__: True)
    environment = load_environment({"taskset": {"id": "textarena", "game": "WordSearch-v0"}}, limit=3)
    assert len(environment.dataset) == 3
    (group,) = worker_of(environment, tmp_path, finds, tokens=8000).rollouts(jobs_of([environment.dataset[2]]))
    won, lost = group.rewards[:, 0].tolist()
    assert won == 1.0
    assert lost < 1.0


def test_a_run_trains_on_it(tmp_path: Path) -> None:
    printed = finish(
        tmp_path,
        *("--distributed", "-n", "1"),
        setup=HERE / "sums_by_heart.py",
        PYTHONPATH=os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
    )
    assert "6/6" in printed
    metrics = (tmp_path / "worker" / "metrics.jsonl").read_text()
    assert "verifiers/rewards/right" in metrics


def test_what_does_not_map_is_refused_with_its_name() -> None:
    with pytest.raises(UsageError, match=r"never ends.*limit"):
        VerifiersEnvironment(Endless.environment())
    with pytest.raises(UnsupportedError, match="has 2 agents"):
        load_environment({"id": "user-sim", "taskset": {"id": "sums_taskset"}})
    with pytest.raises(UnsupportedError, match="the program 'codex'"):
        load_environment({"taskset": {"id": "sums_taskset"}, "agent": {"harness": {"id": "codex"}}})
    with pytest.raises(UnsupportedError, match="sets sampling"):
        load_environment({"taskset": {"id": "sums_taskset"}, "agent": {"sampling": {"temperature": 0.1}}})
    with pytest.raises(UnsupportedError, match="sets timeout"):
        load_environment({"taskset": {"id": "sums_taskset"}, "timeout": {"episode": 3.0}})
    load_environment({"taskset": {"id": "sums_taskset"}, "agent": {"harness": {"id": "null"}, "max_turns": 2}})


class Endless(SumsTaskset):
    INFINITE = True

    @classmethod
    def environment(cls) -> Any:
        environment = load_environment("sums_taskset")._environment
        environment.taskset = cls(environment.taskset.config)
        return environment


class Prepared(SumTask):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None: ...


class ScoredInARuntime(SumTask):
    @vf.reward
    async def files(self, runtime: vf.Runtime) -> float:
        return 1.0


class Stopped(SumTask):
    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        return True


class InAContainer(SumTask):
    NEEDS_CONTAINER = True


@pytest.mark.parametrize(
    ("task_class", "sentence"),
    [
        (Prepared, "Prepared.setup works in a runtime"),
        (ScoredInARuntime, "scores by files in a runtime"),
        (Stopped, "has enough, which looks at requests"),
        (InAContainer, "runs in a container"),
    ],
)
def test_tasks_that_need_a_runtime_are_refused(task_class: type[SumTask], sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        refuse_task(task_class(SumData(prompt="x", answer=1)))
    refuse_task(SumTask(SumData(prompt="x", answer=1)))


def test_a_prompt_of_another_dataset_is_refused(tmp_path: Path) -> None:
    environment = load_environment("sums_taskset")
    worker = worker_of(environment, tmp_path, adds)
    with pytest.raises(AsyncGRPOError, match="names the task None, which this environment does not have"):
        worker.generate(jobs_of([{"prompt": [{"role": "user", "content": "What?"}]}]))
