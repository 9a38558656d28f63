"""Every code block of README, quick start, recipes and examples: it parses, and a reader can type it.

The quick tests look at each block; the slow one executes all of them, page after page, as one reader would. Blocks that
need a GPU, vLLM or a browser are marked in the page, `<!-- not run: REASON -->`, and the test lists them.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import pytest

from async_grpo.cli import COMMANDS, command_module
from async_grpo.setup.setup_file import load_trainer
from kit.in_process import InProcessRun
from kit.tiny_trainer import build_model, build_tokenizer

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["docs/quick_start.md", "README.md", "docs/recipes.md"]
PAGES += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "examples").rglob("README.md"))

_BLOCK = re.compile(r"(?:<!-- (?P<mark>[^>]*) -->\n)?```(?P<language>\w+)\n(?P<text>.*?)\n```", re.DOTALL)
_NOT_RUN = "not run: "
STEPS = "2"


class Block(NamedTuple):
    page: str
    language: str
    text: str
    not_run: str  # why it is not executed; empty: it is

    @property
    def commands(self) -> list[str]:
        """The lines that a reader types, without comments."""
        lines = self.text.splitlines()
        if self.language == "console":  # the other lines are output
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        return [line for line in (re.sub(r"\s+#.*", "", line).strip() for line in lines) if line]


def blocks(page: str) -> Iterator[Block]:
    for found in _BLOCK.finditer((ROOT / page).read_text()):
        mark = found["mark"] or ""
        reason = mark.removeprefix(_NOT_RUN) if mark.startswith(_NOT_RUN) else ""
        yield Block(page, found["language"], found["text"], reason)


def setup_file_of_the_quick_start(model: str) -> str:
    """Its `my_trainer.py`, with a model of this disk in place of the hub's, and steps that take no time."""
    (text,) = (block.text for block in blocks("docs/quick_start.md") if block.language == "python")
    tiny = text.replace('"Qwen/Qwen3-0.6B"', repr(model)).replace("max_completion_length=32", "max_completion_length=3")
    assert text.count("Qwen/Qwen3-0.6B") == 1 and tiny.count("max_completion_length=3,") == 1
    return tiny


def shortened(command: str) -> str:
    """The command of a page with few steps, in place of those that the page has."""
    command = command.removeprefix(".venv/bin/")
    if command == "make demo":
        (line,) = re.findall(r"^demo: .*\n\t(.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
        command = "async-grpo train " + line.partition("src/cli/train.py ")[2]
    command = re.sub(r"checkpoint-\d+", f"checkpoint-{STEPS}", command)
    command = command.replace("workers=2)", f"workers=2, steps={STEPS})")
    trains = re.match(r"(async-grpo (train|server|sweep)|python examples)", command)
    if trains and "--steps" in command:
        return re.sub(r"--steps \d+", f"--steps {STEPS}", command)
    return f"{command} --steps {STEPS}" if trains and "--resume" not in command else command


def endless(command: str) -> bool:
    """Whether it shows something until Ctrl-C."""
    return command.startswith("watch ") or command.endswith(("--watch", "--serve"))


def by_hand(command: str) -> bool:
    """Whether it is one of several processes that are started at the same time."""
    return command.startswith(("async-grpo server", "async-grpo worker"))


ALL = [block for page in PAGES for block in blocks(page)]
RUN = [block for block in ALL if not block.not_run and block.language != "text"]
NOT_RUN = {
    ("docs/recipes.md", "needs vLLM"),
    ("README.md", "builds and installs the package"),
    ("docs/recipes.md", "needs GPUs"),
    ("docs/recipes.md", "needs the hub"),
    ("examples/accelerate/README.md", "needs GPUs"),
    ("examples/notebook/README.md", "needs a browser; tests/examples/test_examples_notebook.py executes the notebook"),
    ("examples/openai_agent/README.md", "needs the package openai; tests/examples/test_examples_agent.py runs it"),
    ("examples/sagemaker/README.md", "needs an account"),
    ("examples/trackers/README.md", "a part of a setup file"),
    ("examples/trackers/README.md", "needs W&B or trackio"),
    ("examples/triviaqa_search/README.md", "needs the hub"),
}
OF_THE_READER = ("my_trainer.py", "first_trainer.py", "grpo.yaml")
DEADLINE_S = 600.0
LOOK_S = 8.0  # at what shows something until Ctrl-C


def named(block: Block) -> str:
    return f"{block.page}:{block.text[:20]!r}"


def test_every_block_is_executed_or_listed_here() -> None:
    assert {(block.page, block.not_run) for block in ALL if block.not_run} == NOT_RUN
    assert {block.language for block in ALL} == {"console", "bash", "python"}
    assert len(RUN) >= 14, "the pattern finds too few"


@pytest.mark.parametrize("block", [block for block in RUN if block.language == "python"], ids=named)
def test_the_python_of_a_page_runs(block: Block) -> None:
    exec(compile(block.text, block.page, "exec"), {"__name__": "a page"})
    assert ast.parse(block.text).body


@pytest.mark.parametrize("block", [block for block in ALL if block.language != "python"], ids=named)
def test_every_command_has_the_options_that_it_is_given_and_the_files(block: Block) -> None:
    assert block.commands or block.language == "console"
    for line in block.commands:
        program, *arguments = shlex.split(line.removeprefix(".venv/bin/"))
        if program == "async-grpo":
            assert arguments[0] in COMMANDS
            command_module(arguments[0]).build_parser().parse_args(arguments[1:])
        for file in re.findall(r"[\w./-]+\.(?:py|yaml|ipynb)\b", line):
            assert file in OF_THE_READER or (ROOT / file).is_file(), f"{block.page}: there is no {file}"


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Weights and a tokenizer, as the hub has them."""
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder)
    build_model(tokenizer).save_pretrained(folder)
    return str(folder)


def test_the_setup_file_of_the_quick_start_trains_as_it_stands(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    Path("my_trainer.py").write_text(setup_file_of_the_quick_start(tiny_model))
    run = InProcessRun(lambda: load_trainer(Path("my_trainer.py").absolute(), engine_here=False, steps=1)).train()
    assert [entry["step"] for entry in run.logs] == [1]


@pytest.mark.slow
def test_a_reader_types_all_of_it(tiny_model: str, tmp_path: Path) -> None:
    for name in ("src", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "my_trainer.py").write_text(setup_file_of_the_quick_start(tiny_model))
    write_yaml_of_trl(tmp_path, tiny_model)
    for block in RUN:
        if block.language != "python":
            for together, lines in groupby(map(shortened, block.commands), by_hand):
                for typed in [[*lines]] if together else [[line] for line in lines]:
                    _type(typed, block, tmp_path)


def write_yaml_of_trl(folder: Path, model: str) -> None:
    """`grpo.yaml`, its dataset and its reward function."""
    (folder / "rows").mkdir()
    (folder / "rows" / "train.jsonl").write_text("".join(f'{{"prompt": "{n} plus 1 is "}}\n' for n in range(16)))
    (folder / "of_the_folder.py").write_text(
        "def length(completions, **_): return [float(len(x)) for x in completions]"
    )
    lines = {"model_name_or_path": model, "dtype": "float32", "dataset_name": "rows", "output_dir": "out_of_trl"}
    lines |= {"reward_funcs": "[of_the_folder.length]", "per_device_train_batch_size": 8, "num_generations": 2}
    lines |= {"max_completion_length": 8, "max_steps": 3, "report_to": "none", "bf16": "false"}
    (folder / "grpo.yaml").write_text("".join(f"{name}: {value}\n" for name, value in lines.items()))


def _type(lines: list[str], block: Block, folder: Path) -> None:
    """At the same time."""
    for line, process in [(line, _started(line, folder)) for line in lines]:
        _ends_well(line, process, block)


def _started(line: str, folder: Path) -> subprocess.Popen[str]:
    python, source = Path(sys.executable).parent, ROOT / "src"
    env = {
        **os.environ,
        "PATH": f"{python}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH")])),
    }
    program = re.sub(r"^async-grpo ", f"{sys.executable} -m async_grpo.cli ", line)
    program = re.sub(r"^python ", f"{sys.executable} ", program)
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(shlex.split(program), cwd=folder, env=env, text=True, **pipes)


def _ends_well(line: str, process: subprocess.Popen[str], block: Block) -> None:
    try:
        output, _ = process.communicate(timeout=LOOK_S if endless(line) else DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=DEADLINE_S)
        assert endless(line), f"{block.page}: {line} did not end in {DEADLINE_S:g} s:\n{output}"
        assert process.returncode in (0, 130, -signal.SIGINT), f"{block.page}: {line}:\n{output}"
        return
    assert process.returncode == 0, f"{block.page}: {line} ended with {process.returncode}:\n{output}"
