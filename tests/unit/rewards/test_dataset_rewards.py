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
GOOD = "def add(a, b):\n    return a + b"


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (RIGHT_FORM.format("18"), 1.0),
        (RIGHT_FORM.format(" 18.0\n") + "<|im_end|>", 1.0),
        ("<start_working_out>" + RIGHT_FORM.format("1800%"), 1.0),
        (RIGHT_FORM.format("19"), 0.4),
        (RIGHT_FORM.format("18") + " because", 0.8),
        ("<SOLUTION>18</SOLUTION>", 0.75),
        ("<end_working_out><SOLUTION>18</SOLUTION>", 0.75),
        ("a<end_working_out><SOLUTION>18</SOLUTION><SOLUTION>18</SOLUTION>", 0.75),
        ("a<end_working_out><SOLUTION>18", 0.1),
        ("18", 0.0),
        ("", 0.0),
        (RIGHT_FORM.format("9" * 5000), 0.4),
    ],
)
def test_gsm8k(completion: str, reward: float) -> None:
    conversation = [{"role": "assistant", "content": completion}]
    assert gsm8k([completion, conversation], answer=["18", "so she has\n#### 18"]) == pytest.approx([reward] * 2)


@pytest.mark.parametrize(
    ("completion", "gold", "reward"),
    [
        (r"3 and \boxed{1,800 \text{ dollars}}, not #### 5", "so it is\n#### 1800", 1),
        ("9 * 2 #### 18.0<|im_end|>", "18", 1),
        (r"\boxed{} #### \boxed{17}", "17", 1),
        ("first 3, then 1,234.", "1234", 1),
        ("18 apples, of which 3 are left", "18", 0),
        (r"\boxed{3} and then 18", "18", 0),
        (r"\boxed{\frac{1}{2}}", r"Half of it: $\boxed{0.5}$.", 1),
        ("-7", "7", 0),
        ("none", "7", 0),
        ("9" * 5000, "7", 0),
    ],
)
def test_the_final_number_is_right_or_wrong(completion: str, gold: str, reward: float) -> None:
    conversation = [{"role": "assistant", "content": completion}]
    assert final_number([completion, conversation], answer=[gold] * 2) == [reward] * 2


def wordings() -> list[tuple[str, float]]:
    """The table of docs/recipes.md: answers to a problem whose answer is 18."""
    rows = re.findall(r"^\| (right|wrong)[^|]*\| (.*) \|$", (ROOT / "docs/recipes.md").read_text(), re.MULTILINE)
    return [(answer, float(verdict == "right")) for verdict, row in rows for answer in re.findall("`([^`]+)`", row)]


def test_the_wordings_of_a_right_answer_are_those_of_the_docs() -> None:
    answers, verdicts = zip(*wordings(), strict=True)
    assert len(answers) > 70
    found = gsm8k([RIGHT_FORM.format(answer) for answer in answers], answer=["18"] * len(answers))
    assert dict(zip(answers, (round(one - 0.4, 6) for one in found))) == dict(zip(answers, (0.6 * v for v in verdicts)))


@pytest.mark.parametrize(
    ("text", "number"),
    {
        "1,800": 1800,
        "1{,}800 m": 1800,
        "one thousand eight hundred": 1800,
        "1.8 thousand": 1800,
        "two dozen eggs": 24,
        "twenty-one": 21,
        "one hundred five": 105,
        "-$1,000.50": -1000.5,
        ".5": 0.5,
        "1,80": None,
        "1 800": None,
        "2**4": None,
        "one two": None,
        "٣": None,
        "1" * 200: None,
        "a" * 90 + "!": None,  # by a pattern that reads a word in many ways: never
        "": None,
    }.items(),
)
def test_one_number(text: str, number: float | None) -> None:
    assert one_number(text) == number


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{17}, no: \\boxed{18}", "18"),
        ("\\boxed{\\frac{36}{2}} it is", "\\frac{36}{2}"),
        ("#### 17\n#### 18<|im_end|>", "18"),
        ("\\boxed{1} #### 2 <SOLUTION> 3 </SOLUTION>", "3"),
        ("\\boxed{18", None),
        ("it is 18", None),
    ],
)
def test_the_answer_that_counts(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


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


def test_success_and_votes_are_declared() -> None:
    assert (gsm8k.success_threshold, math.success_threshold, mbpp.success_threshold) == (0.6, 0.6, 0.6)  # type: ignore[attr-defined]
    assert final_answer(RIGHT_FORM.format(" 7 ")) == "7"
    assert final_answer("7") is None
    assert parse([]).solution is None


def score(program: str, monkeypatch: pytest.MonkeyPatch, tests: list[str] = TESTS) -> float:
    monkeypatch.setenv(SWITCH, "1")
    [reward] = mbpp([RIGHT_FORM.format(program)], test_list=[tests])
    return reward


@isolated
@pytest.mark.parametrize("program", [GOOD, f"```python\n{GOOD}\n```", f"print('x' * 10**6)\n{GOOD}"])
def test_a_right_program(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert score(program, monkeypatch) == 1.0


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
@pytest.mark.parametrize("tests", [TESTS, COMPARED], ids=["as it is", "compared inside"])
def test_a_hostile_program_earns_nothing_by_it(program: str, tests: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert score(program, monkeypatch, tests) == pytest.approx(0.3)


@isolated
def test_a_right_program_passes_what_compares_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    assert score(GOOD, monkeypatch, COMPARED) == 1.0


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
    tests = [
        "assert f(0) == (1, [2.0, 'x'], {'k': {3}})",
        "assert f(1) == 1",
        "assert f(2) == None",
        "assert f(3) == [1]",
    ]
    program = "def f(n):\n  return [(1, [2.0, 'x'], {'k': {3}}), 1.0, None, (1,)][n]"
    assert score(program, monkeypatch, tests) == pytest.approx(0.7 * 3 / 4 + 0.3)


@pytest.mark.parametrize(
    "test",
    [
        "assert add(1, 2)",
        "add(1, 2) == 3",
        "assert add(1, 2) == x",
        "assert 1 < 2",
        "def",
        "assert int(add(1, 2) == 3) == 1",
        "assert all(add(a, 1) == 3 for a in [2]) == True",
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
