"""What each source pays, that no row is paid by another's reward, and what is refused before a run."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parquet_files import RULE, parquet, row

from async_grpo.errors import UsageError
from async_grpo.rewards.sandbox import SWITCH, SandboxError
from async_grpo.setup.needs import check_needs
from async_grpo.tasks import load, score
from async_grpo.tasks import rules as built_in
from async_grpo.tasks.scores import BUILT_IN, URL, JudgeError, judged
from kit.waiting import DEADLINE_S

DONE = SimpleNamespace(exit_code=0, stdout="")
ZEBRA = {"header": ["house", "name", "pet"], "rows": [["1", "Ann", "cat"], ["2", "Bob", "dog"]]}
RIGHT_JSON = '<answer>{"header": [], "rows": [["1", "ann", "cat"], ["2", " Bob", "dog"]]}</answer>'


def paid(source: str, truth: Any, *completions: Any, **columns: Any) -> list[Any]:
    count = len(completions)
    return score([*completions], data_source=[source] * count, ground_truth=[json.dumps(truth)] * count, **columns)


@pytest.mark.parametrize(
    ("source", "truth", "reward", "completions"),
    [
        ("math__deepscaler", "4", 1, [r"so it is \boxed{4}"]),
        ("math__deepscaler", r"\frac{1}{2}", 1, ["it is #### 0.5"]),
        ("math__deepscaler", 4, 1, ["first 3, then 4."]),
        ("math__deepscaler", "4", 0, ["first 4, then 3.", "no idea", r"\boxed{" + "9" * 5000 + "}"]),
        ("logic__zebra_puzzle", ZEBRA, 1, [RIGHT_JSON]),
        ("logic__zebra_puzzle", ZEBRA, 2 / 6, ["```json\n" + json.dumps({"rows": [["1", "Bob", "cat"]]}) + "\n```"]),
        ("logic__zebra_puzzle", ZEBRA, 0, ["<answer>[1, 2]</answer>", ""]),
        ("logic__ordering_puzzle", ["a", "b"], 1, ["<answer>['A', 'b']</answer>"]),
        ("logic__ordering_puzzle", ["a", "b"], 0, ["<answer>['b', 'a']</answer>", "<answer>['a', 'b', 'c']</answer>"]),
        ("logic__graph_logical", "Alpha", 1, ["<answer>beta</answer> no: <answer> alpha </answer>"]),
        ("logic__graph_logical", "Alpha", 0, ["alpha"]),
        ("simulation__codeio", '{"out": [1, true]}', 1, ['```json\n{"out": [1.0, true]}\n```']),
        ("simulation__codeio", {"out": [1, True]}, 0, ["<answer>{'out': [1, 1]}</answer>"]),
        ("simulation__codeio", "plain", 0, ["<answer>plain</answer>"]),
        ("table__hitab", "1,200", 1, [r"\boxed{1200}"]),
        ("table__hitab", "Paris", 1, [r"\boxed{paris}"]),
        ("table__hitab", "Paris", 0, [r"\boxed{spari}"]),
        ("stem__gpqa", "B", 1, [r"\boxed{B}"]),
        ("stem__gpqa", "B", 0, ["B"]),
    ],
)
def test_what_a_source_pays(source: str, truth: Any, reward: float, completions: list[str]) -> None:
    conversations = [[{"role": "assistant", "content": completion}] for completion in completions]
    assert paid(source, truth, *completions, *conversations) == pytest.approx([reward] * 2 * len(completions))


@pytest.mark.parametrize(
    ("source", "truth", "right"),
    [
        ("simulation", {"a": 1}, "<answer>{'a': 1}</answer>"),
        ("logic__zebra", ZEBRA, RIGHT_JSON),
        ("logic__ordering", ["a", "b"], "<answer>['a', 'b']</answer>"),
        ("stem", "x", "<answer>x</answer>"),
        ("math", "3", "<answer>3</answer>"),
    ],
)
def test_a_hostile_answer_costs_only_itself(source: str, truth: Any, right: str) -> None:
    """Nesting, length and repetition that a reader could choke on."""
    number, long = "0x" + "f" * 5000, "<answer>" + "9" * 5000 + "</answer>"
    hostile = [f"<answer>{{'rows': [[{number}]]}}</answer>", f"<answer>[{number}]</answer>", long]
    hostile += ["<answer>" * 50_000, "[" * 90_000, "```\n" * 30_000, "\\boxed{" * 9]
    assert paid(source, truth, *hostile, right) == [*[0.0] * len(hostile), 1.0]


def test_the_longest_prefix_pays_and_gets_its_own_rows_only() -> None:
    seen: list[Any] = []

    def mine(completions: Any, ground_truth: Any, extra_info: Any, level: Any, note: str, **_: Any) -> list[float]:
        seen.append((completions, ground_truth, extra_info, level, note))
        return [7.0] * len(completions)

    scoring = score.using({"math__mine": mine})
    rewards = scoring(
        [r"\boxed{1}", "x", r"\boxed{2}", "y"],
        data_source=["math__a", "math__mine_2", "math__a", "math__mine"],
        ground_truth=['"1"', '["g"]', '"1"', "3"],
        extra_info=["null", '{"index": 1}', "null", "null"],
        level=[1, 2, 3, 4],
        note="one text",
    )
    assert rewards == [1.0, 7.0, 0.0, 7.0]
    assert seen == [(["x", "y"], [["g"], 3], [{"index": 1}, None], [2, 4], "one text")]
    assert paid("math__mine", "1", r"\boxed{1}") == [1.0], "the one that everybody has is as it was"


@pytest.mark.parametrize("source", ["foo__bar", "mat", "logic__arc", ""])
def test_there_is_no_fallback(source: str) -> None:
    with pytest.raises(UsageError, match=f"No reward for data_source '{source}'"):
        paid(source, "x", "x")


def trainer_of(train: Any = None, evaluation: Any = None, function: Any = score) -> Any:
    return SimpleNamespace(reward_funcs=[function], train_dataset=train, eval_dataset=evaluation)


def test_a_run_is_refused_for_a_source_without_a_reward(tmp_path: Path) -> None:
    rows = load(parquet(tmp_path / "a.parquet", row(), row(data_source="foo__bar")))
    says = r"\(a\.parquet, row 2\)\. There are: codegen, logic__graph, .*; add one with score\.using\(\{\"foo\": f\}\)"
    for trainer in (trainer_of(rows), trainer_of(evaluation=rows), trainer_of(evaluation={"a": rows})):
        with pytest.raises(UsageError, match=says):
            check_needs(trainer)
    check_needs(trainer_of(rows, function=score.using({"foo": lambda completions, **_: [0.0] * len(completions)})))


async def later(completions: Any, **_: Any) -> list[float]:
    return [0.0] * len(completions)


@pytest.mark.parametrize("given", [later, 3])
def test_what_cannot_be_called_is_refused(given: Any) -> None:
    with pytest.raises(UsageError, match="must be a function that is not asynchronous"):
        score.using({"mine": given})


def test_programs_need_the_switch_before_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    rows = load(parquet(tmp_path / "a.parquet", row(data_source="codegen__leetcode")))
    with pytest.raises(SandboxError):
        check_needs(trainer_of(rows))
    check_needs(trainer_of(load(parquet(tmp_path / "b.parquet"))))  # no programs: no sandbox


@pytest.mark.parametrize(
    ("source", "truth", "says"),
    [
        ("logic__zebra_puzzle", {"header": ["a"], "rows": []}, r"a table with rows, got \{'header': \['a'\], 'rows'"),
        ("logic__zebra_puzzle", {"rows": [[], 3]}, "a table with rows"),
        ("logic__ordering_puzzle", "Ann, Bob", "a list of names, got 'Ann, Bob'"),
        ("table__hitab", " ", "a text or a number, got ' '"),
        ("math__sums", ["4"], r"a text or a number, got \['4'\]"),
    ],
)
def test_a_row_that_no_answer_fits_is_refused_before_a_run(tmp_path: Path, source: str, truth: Any, says: str) -> None:
    good = row(reward_model=json.dumps(RULE))
    bad = row(data_source=source, reward_model=json.dumps({"ground_truth": truth}))
    where = rf"Row 2 of a dataset cannot be rewarded: ground_truth must be {says}.*'{source}', which begins"
    with pytest.raises(UsageError, match=where):
        check_needs(trainer_of(load(parquet(tmp_path / "a.parquet", good, bad))))
    with pytest.raises(ValueError, match="ground_truth must be"):
        paid(source, truth, "x")


ODD = ["", "[]", "{}", "NaN", "9" * 5000, "1e999", '{"rows": [["1"]]}', "['Ann']", "assert f() == 1"]
KEYS = st.text(max_size=2) | st.sampled_from(["rows", "inputs", "outputs", "fn_name", "functional"])
NUMBERS = st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
DATA = st.recursive(
    st.none() | NUMBERS | st.text(max_size=5) | st.sampled_from(ODD),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
RULES = [(one.rule, one.reads) for one in BUILT_IN.values() if hasattr(one, "rule")]


FORMS = st.sampled_from(["{}", "<answer>{}</answer>", "```python\n{}\n```", "\\boxed{{{}}}"])


@settings(deadline=None, max_examples=150)
@given(form=FORMS, truth=DATA, answer=DATA, write=st.sampled_from([json.dumps, repr, str]))
def test_any_truth_and_any_answer_have_a_reward_or_a_sentence(form: str, truth: Any, answer: Any, write: Any) -> None:
    """A truth fails with a sentence or not at all, an answer never, and one that is not there is paid nothing."""
    text = form.format(write(answer))
    for rule, reads in RULES:
        try:
            read = reads(truth)
        except ValueError as error:
            assert str(error).startswith("ground_truth must be")
            continue
        assert 0 <= rule(text, read) <= 1
        assert rule("", read) == 0
    with (
        patch.object(built_in, "share_passed", lambda *_: 1.0),
        patch.object(built_in, "run_code", lambda *_, **__: DONE),
    ):
        try:
            assert built_in.codegen([text], [truth])[0] in (0, 1)
        except ValueError as error:
            assert "test" in str(error) or "ground_truth must be" in str(error)


# Programs, with a sandbox that the test plays: it runs nothing

ADD = "```python\ndef add(a, b):\n    return a + b\n```"
CALLED = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(0, 1) == 1\n\ncheck(add)"


@pytest.mark.parametrize(
    ("truth", "asked"),
    [
        ({"functional": "assert add(1, 2) == 3\nassert add(0, 1) == 1"}, ["add(1, 2)", "add(0, 1)"]),
        (json.dumps({"functional": CALLED}), ["candidate(1, 2)", "candidate(0, 1)"]),
        (["assert add(1, 2) == 3", "assert add(0, 1) == 1"], ["add(1, 2)", "add(0, 1)"]),
        (json.dumps(["assert add(1, 2) == 3"]), ["add(1, 2)"]),
        ("assert add(1, 2) == 3", ["add(1, 2)"]),
        ({"inputs": [[1, 2], ["a", "b"]], "outputs": [3, "ab"], "fn_name": "add"}, ["add(1, 2)", "add('a', 'b')"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_all_tests_are_asked(truth: Any, asked: list[str], share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    def share_passed(program: str, checks: Any) -> float:
        exec(program, names := {})
        assert eval("candidate" if "check(add)" in str(truth) else "add", names)(1, 2) == 3
        found.extend(question for one in checks for question in one.questions)
        return share

    monkeypatch.setattr(built_in, "share_passed", share_passed)
    assert paid("codegen__x", truth, "I write\n" + ADD) == [float(share == 1.0)]
    assert found == asked


def test_more_tests_than_one_sandbox_takes_are_all_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(built_in, "share_passed", lambda program, checks: sizes.append(len(checks)) or 1.0)
    assert paid("codegen", ["assert f() == 1"] * 120, ADD) == [1.0]
    assert sizes == [50, 50, 20]


@pytest.mark.parametrize(
    ("outputs", "code", "reward"), [(["3\n", "7"], 0, 1.0), (["3", "8"], 0, 0.0), (["3", "7"], 1, 0.0)]
)
def test_inputs_and_outputs_of_a_program(
    outputs: list[str], code: int, reward: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_code(source: str, *, stdin: str, limits: Any) -> Any:
        return SimpleNamespace(exit_code=code, stdout=f"{sum(map(int, stdin.split()))} \n")

    monkeypatch.setattr(built_in, "run_code", run_code)
    truth = {"inputs": ["1 2\n", "3\n4\n" + "0 " * 60_000], "outputs": outputs}
    assert paid("codegen", truth, ADD) == paid("codegen", json.dumps(truth), ADD) == [reward]


@pytest.mark.parametrize(
    "truth",
    [
        *({"functional": ""}, {"pytest": "x"}, {"functional": "import os"}, {"functional": "f("}, 3, "check(add)"),
        *([], [None], "\0", {"inputs": [1], "outputs": [1, 2]}, {"inputs": None, "outputs": 3}),
    ],
)
def test_tests_of_another_form_are_no_reward_of_0(truth: Any) -> None:
    with pytest.raises(ValueError, match="test"):
        paid("codegen", truth, ADD)
    assert paid("codegen", truth, "no program") == [0.0]


# The judge


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A server of OpenAI's API that answers what the test says, and notes what it is asked."""
    server = SimpleNamespace(says="Yes", asked=[], may_answer=threading.Event())
    server.may_answer.set()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({"data": [{"id": "verifier"}]})

        def do_POST(self) -> None:
            server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            server.may_answer.wait(timeout=DEADLINE_S)
            self._answer({"choices": [{"message": {"content": server.says}}]} if server.says is not None else {})

        def _answer(self, body: Any) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: Any) -> None: ...

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv(URL, f"http://127.0.0.1:{http.server_port}/v1")
    yield server
    server.may_answer.set()
    http.shutdown()
    http.server_close()
    thread.join(timeout=DEADLINE_S)


def test_a_judge_decides(judge: SimpleNamespace) -> None:
    question = [{"role": "user", "content": "What is water?"}]
    assert paid("stem_web", "H2O", r"It is \boxed{dihydrogen oxide}", prompts=[question]) == [1.0]
    asked = judge.asked[0]["messages"][0]["content"]
    assert judge.asked[0]["model"] == "verifier"
    assert all(part in asked for part in ("What is water?", "H2O", "dihydrogen oxide"))
    judge.says = "They differ, so the verdict is: No."
    assert paid("stem_web", "H2O", "salt") == [0.0]


@pytest.mark.parametrize("says", ["perhaps", None])
def test_an_answer_that_is_no_verdict_is_no_reward_of_0(judge: SimpleNamespace, says: str | None) -> None:
    judge.says = says
    with pytest.raises(JudgeError, match="judge at STEM_LLM_JUDGE_URL"):
        paid("stem_web", "H2O", "water")


def test_a_slow_judge_is_no_reward_of_0(judge: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("async_grpo.tasks.scores.TIMEOUT_S", 0.2)
    judge.may_answer.clear()
    with pytest.raises(JudgeError, match=r"cannot be asked: timed out\. The group is tried again\."):
        paid("stem_web", "H2O", "water")


def test_a_dead_judge_is_no_reward_of_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(URL, "http://127.0.0.1:9")
    with pytest.raises(JudgeError):
        paid("stem_web", "H2O", "water")
    monkeypatch.delenv(URL)
    with pytest.raises(UsageError, match=f"set {URL}"):
        judged.require()
