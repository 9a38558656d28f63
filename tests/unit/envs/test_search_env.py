"""The search environment: its facts, its index, its tools, and the rewards for what is asked of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from async_grpo.envs import Passages, SearchEnv, generated_facts
from async_grpo.envs.search import calculated
from async_grpo.errors import UsageError
from async_grpo.rewards import questions
from async_grpo.rewards.questions import normalised
from async_grpo.rewards.sandbox import SandboxError


def test_facts_are_those_of_their_seed_and_none_occurs_twice() -> None:
    facts = generated_facts(seed=3)
    assert facts == generated_facts(seed=3)
    assert facts != generated_facts(seed=4)
    assert len(facts) == 200
    passages = " ".join(fact.passage for fact in facts)
    for fact in facts:
        assert fact.answer in fact.passage
        assert passages.count(f" {fact.answer} ") + passages.count(f" {fact.answer}.") == 1
    assert max(Counter(fact.question for fact in facts).values()) == 1


class TestIndex:
    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("bm25s", reason="the extra `search` is not installed")

    def test_every_fact_is_found_by_its_question(self) -> None:
        environment = SearchEnv()
        assert all(environment.search(fact.question) == fact.passage for fact in generated_facts())
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(environment.search, [fact.question for fact in generated_facts()]))
        assert found == [fact.passage for fact in generated_facts()]

    def test_nothing_is_found_and_k_is_limited(self) -> None:
        environment = SearchEnv()
        assert environment.search("xyzzy") == "Nothing was found."
        assert len(environment.search("capital", k=3).split("\n")) == 3
        for query, k in (("", 1), ("capital", 0), ("capital", 11), ("capital", True), ("capital", "2"), (7, 1)):
            with pytest.raises(ValueError, match=r"query is empty|whole number"):
                environment.search(query, k)  # type: ignore[arg-type]

    def test_searching_leaves_jax_alone(self, tmp_path: Path) -> None:
        """bm25s computes with JAX where that can be imported, and JAX reserves three quarters of the GPU for it."""
        (tmp_path / "jax").mkdir()
        (tmp_path / "jax" / "__init__.py").touch()
        (tmp_path / "jax" / "lax.py").write_text("def top_k(*_):\n    raise SystemExit('JAX took the GPU')\n")
        code = "from async_grpo.envs import Passages\n"
        code += "assert Passages.of(['grass is green', 'the sky is blue']).search('sky', 1) == ['the sky is blue']\n"
        code += "import jax.lax  # a reward function may still\n"
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
        ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, timeout=120)
        assert ran.returncode == 0, ran.stderr.decode()

    def test_an_index_on_disk(self, tmp_path: Path) -> None:
        Passages.of(["the sky is blue", "grass is green"]).save(tmp_path / "index")

        class Own(SearchEnv):
            index = tmp_path / "index"

        assert Own().search("grass") == "grass is green"
        assert Passages.load(tmp_path / "index").search("sky grass", 5) == ["grass is green", "the sky is blue"]
        with pytest.raises(UsageError, match=r"holds no index of bm25s: .*are not there"):
            Passages.load(tmp_path)
        for broken in ("params.index.json", "data.csc.index.npy", "corpus.jsonl"):
            whole = (tmp_path / "index" / broken).read_bytes()
            (tmp_path / "index" / broken).write_bytes(b"\x80\x04garbage")
            with pytest.raises(UsageError, match="cannot be read"):
                Passages.load(tmp_path / "index")
            (tmp_path / "index" / broken).write_bytes(whole)

    def test_an_index_on_disk_is_searched_by_several_threads(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from bm25s.utils.corpus import JsonlCorpus

        reading = JsonlCorpus.__getitem__
        inside: list[int] = []

        def alone(corpus: JsonlCorpus, index: int) -> object:  # bm25s seeks, and then reads
            inside.append(index)
            sleep(0.0002)
            assert inside == [index]
            inside.clear()
            return reading(corpus, index)

        facts = generated_facts()
        Passages.of([fact.passage for fact in facts]).save(tmp_path)
        passages = Passages.load(tmp_path)
        monkeypatch.setattr(JsonlCorpus, "__getitem__", alone)
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(lambda fact: passages.search(fact.question, 1)[0], facts))
        assert found == [fact.passage for fact in facts]

    def test_an_environment_without_its_index_is_refused_when_it_is_made(self, tmp_path: Path) -> None:
        class Missing(SearchEnv):
            index = tmp_path / "nothing"

        with pytest.raises(UsageError):
            Missing()  # TRL makes one when the trainer is built; a call that fails is only a text for the model

    def test_passages_of_another_index_are_refused(self, tmp_path: Path) -> None:
        Passages.of(["the sky is blue", "grass is green"]).save(tmp_path / "two")
        Passages.of(["the sky is blue"]).save(tmp_path / "one")
        for name in ("corpus.jsonl", "corpus.mmindex.json"):
            (tmp_path / "one" / name).write_bytes((tmp_path / "two" / name).read_bytes())
        with pytest.raises(UsageError, match=r"2 passages in corpus\.jsonl and 1 in its index"):
            Passages.load(tmp_path / "one")


@pytest.mark.parametrize(
    ("expression", "value"), [("2 + 3 * 4", 14), (" (1.5 - 3) / 2", -0.75), ("2**10 % 7", 2), ("-7 // 2", -4)]
)
def test_calculating(expression: str, value: float) -> None:
    assert calculated(expression) == value
    assert object.__new__(SearchEnv).calculate(expression) == str(value)


@pytest.mark.parametrize(
    "expression",
    [
        *("__import__('os')", "1/0", "9**9**9", "(10**299)**299", "10**299*10**299", "(-1)**0.5"),
        *("", "a", "'a'*9", "(" * 999, 5),
    ],
)
def test_what_cannot_be_calculated_is_a_sentence(expression: str) -> None:
    with pytest.raises(ValueError, match=r"calculated|large|number"):
        calculated(expression)


def test_programs_run_in_the_sandbox_where_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASYNC_GRPO_RUN_MODEL_CODE", raising=False)
    with pytest.raises(SandboxError):
        object.__new__(SearchEnv).python("print(1)")


def called(text: str = "<reasoning>I look.</reasoning>") -> dict[str, Any]:
    return {"role": "assistant", "content": text, "tool_calls": [{"type": "function", "function": {"name": "search"}}]}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "name": "search", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


GOOD = [called(), result("The capital of Zor is Quim."), said("<reasoning>So.</reasoning>\n<answer>Quim</answer>")]
ALIASES = ["Quim", "Quimtown"]


def rewarded(completion: list[dict[str, Any]], aliases: list[str] | None = None) -> dict[str, float]:
    functions = (*questions.TURN_REWARDS, *questions.OUTCOME_REWARDS)
    return {f.__name__: f(completions=[completion], aliases=[aliases or ALIASES])[0] for f in functions}  # type: ignore[operator]


def test_a_perfect_dialogue_earns_the_most() -> None:
    outcome = {"exact_match": 1.0, "contained": 0.5, "format_of_messages": 0.2, "tags": 0.2}
    assert rewarded(GOOD) == pytest.approx({**outcome, "tool_execution": 0.2, "answer_in_results": 0.5})


@pytest.mark.parametrize("completion", [[], [said("")], [said("  ")], [result("Quim")]])
def test_an_empty_text_earns_nothing_of_the_outcome(completion: list[dict[str, Any]]) -> None:
    earned = rewarded(completion)
    assert sum(earned[f.__name__] for f in questions.OUTCOME_REWARDS) == 0  # type: ignore[attr-defined]


def test_a_passage_may_begin_with_the_word_error() -> None:
    assert questions.tool_execution([[result("Errors of Quim")]]) == [0.2]


@pytest.mark.parametrize("text", ["Error: Quim is not there", "{'error': 'Quim'}"])
def test_what_a_failed_call_returned_is_no_result(text: str) -> None:
    earned = rewarded([called(), result(text), called(), result("Nothing"), said("<answer>Quim</answer>")])
    assert (earned["tool_execution"], earned["answer_in_results"]) == (0.1, 0)


@pytest.mark.parametrize(
    ("answer", "aliases", "exact", "part"),
    [
        ("the QUIM!", ["Quim"], 1, 0.5),
        ("in Quim", ["Quim"], 0, 0.5),
        ("it is surely in Quim", ["Quim"], 0, 0),  # longer than twice the alias
        ("a", ["a"], 0, 0),  # an article alone is nothing
        ("of it", ["of"], 0, 0),  # an alias of two characters
        ("quimper", ["Quim"], 0, 0),  # no whole word
        ("New York City", ["New York"], 0, 0.5),
        ("Jay_Z", ["Jay-Z"], 1, 0.5),
    ],
)
def test_answers(answer: str, aliases: list[str], exact: float, part: float) -> None:
    earned = rewarded([said(f"<answer>{answer}</answer>")], aliases)
    assert (earned["exact_match"], earned["contained"]) == (exact, part)


@pytest.mark.parametrize(
    ("text", "form", "tag"),
    [
        ("<reasoning>a</reasoning><answer>b</answer>", 1.0, 1.0),
        ("<answer>b</answer>", 0.2 + 0.2 + 0.2, 0.5),
        ("well <reasoning>a</reasoning><answer>b</answer>", 0.4 + 0.2, 1.0),
        ("<reasoning>a</reasoning><answer>b", 0.2 + 0.2, 0.75),  # unclosed
        ("<reasoning></reasoning><answer></answer>", 0.0, 1.0),
        ("just text", 0.0, 0.0),
    ],
)
def test_format_and_tags_of_a_message(text: str, form: float, tag: float) -> None:
    earned = rewarded([said(text)])
    assert earned["format_of_messages"] == pytest.approx(0.2 * form)
    assert earned["tags"] == pytest.approx(0.2 * tag)


def test_a_long_message_is_read_in_time_with_its_length() -> None:
    """With the square of it this would take an hour."""
    message = {"role": "assistant", "content": "<answer></reasoning><reasoning>" * 50_000 + "</reasoning>x"}
    assert questions.format_of_messages([[message]]) == pytest.approx([0.2 * 0.2])


def test_normalised_as_in_the_evaluation_of_triviaqa() -> None:
    assert normalised("  The_Who’s  “Tommy”, an Opera ") == "who s “tommy” opera"
