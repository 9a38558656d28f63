"""The rewards for GSM8K, MATH and MBPP: their parts, and that hostile answers earn nothing by it."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from isolated_sandbox import isolated

from async_grpo.rewards import final_number, gsm8k, math, mbpp
from async_grpo.rewards.answers import final_answer, parse
from async_grpo.rewards.programs import check
from async_grpo.rewards.sandbox import SWITCH
from async_grpo.rewards.wording import one_number

ROOT = Path(__file__).parents[3]
RIGHT_FORM = "16 - 3 is it <end_working_out><SOLUTION>{}</SOLUTION>"
TESTS = ["assert add(1, 2) == 3", "assert add(0, 1) == 1", "assert add(-1, 1) == 0"]
COMPARED = [
    "assert (add(1, 2) == 3) == True",
    "assert (abs(add(1, 2) - 3) < 0.1) == True",
    "assert (add(-1, 1) != 0 or not add(2, 2) >= 4) == False",
    "assert math.isclose(add(1, 2), 3, rel_tol=0.1) == True",
]
FORMS = [TESTS, COMPARED]
GOOD = "def add(a, b):\n    return a + b"


def conversation(completion: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": completion}]


@pytest.mark.parametrize(
    ("reward", "completions"),
    [
        (1.0, [RIGHT_FORM.format("18"), RIGHT_FORM.format(" 18.0\n") + "<|im_end|>"]),
        (1.0, ["<start_working_out>" + RIGHT_FORM.format("1800%")]),
        (0.8, [RIGHT_FORM.format("18") + " because"]),
        (0.75, ["<SOLUTION>18</SOLUTION>", "<end_working_out><SOLUTION>18</SOLUTION>"]),
        (0.75, ["a<end_working_out><SOLUTION>18</SOLUTION><SOLUTION>18</SOLUTION>"]),
        (0.4, [RIGHT_FORM.format("19"), RIGHT_FORM.format("9" * 5000)]),
        (0.1, ["a<end_working_out><SOLUTION>18"]),
        (0.0, ["18", ""]),
    ],
)
def test_gsm8k(reward: float, completions: list[str]) -> None:
    for answer in ("18", "so she has\n#### 18"):
        given = [*completions, *map(conversation, completions)]
        assert gsm8k(given, answer=[answer] * len(given)) == pytest.approx([reward] * len(given))


@pytest.mark.parametrize(
    ("gold", "reward", "completions"),
    [
        ("so it is\n#### 1800", 1, [r"3 and \boxed{1,800 \text{ dollars}}, not #### 5"]),
        ("18", 1, ["9 * 2 #### 18.0<|im_end|>"]),
        ("17", 1, [r"\boxed{} #### \boxed{17}"]),
        ("1234", 1, ["first 3, then 1,234."]),
        (r"Half of it: $\boxed{0.5}$.", 1, [r"\boxed{\frac{1}{2}}"]),
        ("18", 0, ["18 apples, of which 3 are left", r"\boxed{3} and then 18"]),
        ("7", 0, ["-7", "none", "9" * 5000]),
    ],
)
def test_the_final_number_is_right_or_wrong(gold: str, reward: float, completions: list[str]) -> None:
    given = [*completions, *map(conversation, completions)]
    assert final_number(given, answer=[gold] * len(given)) == [reward] * len(given)


def test_the_wordings_of_a_right_answer_are_those_of_the_docs() -> None:
    """The table of docs/recipes.md: answers to a problem whose answer is 18."""
    rows = re.findall(r"^\| (right|wrong)[^|]*\| (.*) \|$", (ROOT / "docs/recipes.md").read_text(), re.MULTILINE)
    paid = {answer: 0.6 * (verdict == "right") for verdict, row in rows for answer in re.findall("`([^`]+)`", row)}
    assert len(paid) > 70
    found = gsm8k([RIGHT_FORM.format(answer) for answer in paid], answer=["18"] * len(paid))
    assert dict(zip(paid, (round(one - 0.4, 6) for one in found))) == paid


def test_one_number() -> None:
    numbers = {"1,800": 1800, "1{,}800 m": 1800, "one thousand eight hundred": 1800, "1.8 thousand": 1800}
    numbers |= {"two dozen eggs": 24, "twenty-one": 21, "one hundred five": 105, "-$1,000.50": -1000.5, ".5": 0.5}
    none = ["1,80", "1 800", "2**4", "one two", "٣", "1" * 200, ""]
    none += ["a" * 90 + "!"]  # by a pattern that reads a word in many ways: never
    expected = {**numbers, **dict.fromkeys(none)}
    assert {text: one_number(text) for text in expected} == expected


def test_the_answer_that_counts() -> None:
    answers = {
        "so \\boxed{17}, no: \\boxed{18}": "18",
        "\\boxed{\\frac{36}{2}} it is": "\\frac{36}{2}",
        "#### 17\n#### 18<|im_end|>": "18",
        "\\boxed{1} #### 2 <SOLUTION> 3 </SOLUTION>": "3",
        RIGHT_FORM.format(" 7 "): "7",
        **dict.fromkeys(["\\boxed{18", "it is 18", "7"]),
    }
    assert {text: final_answer(text) for text in answers} == answers


@pytest.mark.integration
def test_equal_formulas_are_equal_and_hostile_ones_cost_themselves_only() -> None:
    answers = ["\\frac{1}{2}", "0.5", "2/4", "\\frac{1}{3}", "\\frac{1}{0}", "{" * 900, "{" * 100_000, "10^{10^{10}}"]
    found = math([RIGHT_FORM.format(answer) for answer in answers], answer=["so it is \\boxed{\\frac{1}{2}}"] * 8)
    assert found == pytest.approx([1.0] * 3 + [0.3] * 5)


def test_a_comparison_imports_nothing_within_its_time() -> None:
    """On a busy machine an import may take all of it."""
    program = """
        import sys
        from async_grpo.rewards import mathematics

        mathematics._load_math_verify()
        before = set(sys.modules)
        for one in ("1800%", "(1,2)", r"\\{1,2\\}", "x<3", "x=3", r"\\frac{1}{2}", r"\\pi", r"5\\text{ cm}"):
            for other in ("18", "x<3", r"\\{1,2\\}", "(1,2)", r"\\pi/2"):
                mathematics._equal(one, other)
        print(sorted(set(sys.modules) - before))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_math_allows_a_short_end() -> None:
    text = RIGHT_FORM.format("x")
    assert math([text + "." * 49, text + "." * 50], answer=["x", "x"]) == pytest.approx([1.0, 0.95])


@pytest.mark.parametrize(
    "end", ["", "<end_working_out>", "<end_working_out><SOLUTION>18</SOLUTION>" + " " * 200_000 + "x"]
)
def test_a_long_text_is_read_in_time_with_its_length(end: str) -> None:
    """With the square of it this would take minutes, in which nothing else runs in the worker."""
    assert not parse("{" * 200_000 + end).strict


@pytest.mark.parametrize(
    "text",
    ["a<start_working_out>b<end_working_out><SOLUTION>7</SOLUTION>", "a<end_working_out>" + RIGHT_FORM.format("7")],
)
def test_a_second_working_out_is_not_the_exact_form(text: str) -> None:
    assert not parse(text).strict


def test_success_is_declared() -> None:
    assert {reward.success_threshold for reward in (gsm8k, math, mbpp)} == {0.6}
    assert parse([]).solution is None


def score(program: str, monkeypatch: pytest.MonkeyPatch, tests: list[str] = TESTS) -> float:
    monkeypatch.setenv(SWITCH, "1")
    [reward] = mbpp([RIGHT_FORM.format(program)], test_list=[tests])
    return reward


@isolated
@pytest.mark.parametrize("program", [GOOD, f"```python\n{GOOD}\n```", f"print('x' * 10**6)\n{GOOD}"])
@pytest.mark.parametrize("tests", FORMS, ids=["as it is", "compared inside"])
def test_a_right_program(program: str, tests: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert score(program, monkeypatch, tests) == 1.0


@isolated
@pytest.mark.parametrize(
    "program",
    {
        "exits early": "import sys\nsys.exit(0)",
        "ends the process": "import os\nos._exit(0)",
        "equals everything": "class Any:\n  def __eq__(self, other): return True\ndef add(a, b): return Any()",
        "is an int that equals everything": (
            "class Any(int):\n  def __eq__(self, other): return True\ndef add(a, b): return Any()"
        ),
        "patches what it can": "import builtins\nbuiltins.AssertionError = None\nbuiltins.repr = lambda x: '3'",
        "reads what it can": "def add(a, b):\n  return open('/proc/self/cmdline').read()",
        "prints without end": "def add(a, b):\n  while True: print('x' * 1000)",
        "has every operator": (
            "class Any:\n  def __bool__(self): return True\n  def __getattr__(self, name): return self\n"
            "  __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __ne__ = lambda self, other: True\n"
            "  __sub__ = __rsub__ = __add__ = __abs__ = lambda self, *_: 0\n  __float__ = lambda self: 3.0\n"
            "def add(a, b): return Any()"
        ),
        "says True": "def add(a, b):\n  return True",
        "kills the parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    }.values(),
)
@pytest.mark.parametrize("tests", FORMS, ids=["as it is", "compared inside"])
def test_a_hostile_program_earns_nothing_by_it(program: str, tests: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert score(program, monkeypatch, tests) == pytest.approx(0.3)


@isolated
def test_a_child_that_is_left_behind_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    program = f"import os, time\nif os.fork() == 0:\n  os.setsid()\n  time.sleep(1000)\n{GOOD}"
    assert score(program, monkeypatch) == 1.0


@isolated
def test_a_test_that_hangs_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("async_grpo.rewards.programs.SECONDS", 1.0)
    program = "def add(a, b):\n  while a == 0: pass\n  return a + b"
    assert score(program, monkeypatch) == pytest.approx(0.7 * 2 / 3 + 0.3)


@isolated
def test_values_are_compared_as_in_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    values = ["(1, [2.0, 'x'], {'k': {3}})", "1", "None", "[1]"]
    tests = [f"assert f({number}) == {value}" for number, value in enumerate(values)]
    program = "def f(n):\n  return [(1, [2.0, 'x'], {'k': {3}}), 1.0, None, (1,)][n]"
    assert score(program, monkeypatch, tests) == pytest.approx(0.7 * 3 / 4 + 0.3)


@pytest.mark.parametrize(
    "test",
    [
        *("assert add(1, 2)", "add(1, 2) == 3", "assert add(1, 2) == x", "assert 1 < 2", "def"),
        *("assert int(add(1, 2) == 3) == 1", "assert all(add(a, 1) == 3 for a in [2]) == True"),
        "assert [f(1) == 3] == [True]",
    ],
)
def test_a_test_of_another_form_is_refused(test: str) -> None:
    with pytest.raises(ValueError, match="is not of the form"):
        check(test)


@pytest.mark.parametrize(
    "test", ["assert pick([1, 2], lambda n: n > 1) == [2]", "assert (1 in f(lambda n: n == 1)) == True"]
)
def test_the_inputs_of_a_program_may_compare(test: str) -> None:
    assert len(check(test).questions) == 1
