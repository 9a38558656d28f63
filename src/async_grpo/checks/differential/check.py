"""A setup file trained for two steps as a run and then in plain TRL, each in processes of its own, and compared."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from async_grpo.checks import probe
from async_grpo.checks.differential import called, scored
from async_grpo.checks.differential.checked_trainer import FACTS, OUTPUT, RUN, STEPS, CheckOptions, Facts, setup_file
from async_grpo.checks.differential.lines import Line
from async_grpo.checks.differential.notes import PLAIN, SERVER, WORKER, notes_of
from async_grpo.errors import UnsupportedError, UsageError
from async_grpo.launch.child_log import last_line
from async_grpo.rundir.paths import RunDir
from async_grpo.setup.process import has_ended, path_to_us, start_logged, within
from async_grpo.setup.setup_file import check_setup_file

DEADLINE_S = 3600.0  # of either training
_GRACE_S = 20.0
_POLL_S = 0.1
_LAST_LINES = 12
_NOTHING = "so there is nothing to compare:"


def check(options: CheckOptions, say: Callable[[str], None]) -> Iterator[Line]:
    """Run both trainings, then yield a line for each subject. `say` takes sentences about how far it is.

    Raises:
        AsyncGRPOError: the file cannot be checked, or one of the trainings has failed.
    """
    refuse_unsloth(Path(options.config))
    with tempfile.TemporaryDirectory(prefix="async-grpo-check-", ignore_cleanup_errors=True) as folder:
        scratch = Path(folder)
        options = replace(options, scratch=folder)
        _train_a_run(options, scratch, say)
        facts = Facts(**json.loads((scratch / FACTS).read_text()))
        say("plain TRL trains on the same completions")
        _train_in_plain_trl(options, say)
        yield from compared(scratch, facts)


def compared(scratch: Path, facts: Facts) -> Iterator[Line]:
    """A line for each subject, in the order in which a step goes through them."""
    from async_grpo.checks.differential.trained import trained_lines

    server, worker, plain = (notes_of(scratch, role) for role in (SERVER, WORKER, PLAIN))
    yield called.prompt_line(worker, plain)
    yield called.sampling_line(worker, plain)
    explained = {}
    for name in facts.rewards:
        lines = [*scored.reward_lines(name, worker, plain)]
        explained[name] = lines[-1].status
        yield from lines
    yield from called.tool_lines(worker, plain)
    yield from called.callback_lines(server, plain)
    yield from called.method_lines(server, worker, plain)
    yield scored.score_line(facts.rewards, plain, explained)
    yield from trained_lines(scratch, facts, server, plain)
    yield called.file_line(scratch / OUTPUT / RUN, scratch / OUTPUT / PLAIN)


def refuse_unsloth(config: Path) -> None:
    """Raise `UnsupportedError` where the file imports Unsloth, which replaces TRL's trainer by its own.

    Raises:
        SetupFileError: it cannot be a setup file.
    """
    check_setup_file(config)
    nodes = [*ast.walk(ast.parse(config.read_bytes()))]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    if any(name.partition(".")[0] == "unsloth" for name in names):
        raise UnsupportedError(
            f"{config} imports Unsloth, which replaces TRL's trainer by one of its own, so plain TRL cannot be "
            "compared with. Check the file without it."
        )


def _train_a_run(options: CheckOptions, scratch: Path, say: Callable[[str], None]) -> None:
    """The ordinary command, with one worker at staleness 0. Says what the rewards will cost before any is called."""
    command = [
        *(sys.executable, "-Pm", "async_grpo.cli", "train", str(setup_file(options)), "--run-dir", str(scratch / RUN)),
        *("--master-device-id", options.device, "--worker-device-ids", options.device, "--generator", "hf"),
        *("--max-staleness", "0", "--deterministic", "--eval-every", "0"),
        *("--steps", str(STEPS), "--seed", str(options.seed)),
    ]
    said, facts = scratch / "output.txt", scratch / FACTS
    process = start_logged(command, {**os.environ, "PYTHONPATH": path_to_us(os.environ)}, said)
    deadline, told = time.monotonic() + DEADLINE_S, False
    try:
        while process.poll() is None and time.monotonic() < deadline:
            if not told and facts.exists():
                told = True
                say(expected_calls(Facts(**json.loads(facts.read_text()))))
            time.sleep(_POLL_S)
        code = process.returncode
    finally:
        _end(process)
    words = said.read_text(errors="replace")
    if code == UsageError.exit_code:
        why = f"\n{words}".rpartition("\nerror: ")[2].strip()
        raise UnsupportedError(f"The file cannot be trained as a run, {_NOTHING} {why}")
    if code != 0:
        how = f"did not end in {DEADLINE_S:.0f} s" if code is None else probe.how_it_ended(code)
        state = RunDir(scratch / RUN).read_state()
        raise _failed(f"The run at staleness 0 {how}", words.splitlines(), say, "" if state is None else state.why)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask a run that still trains to stop; its launcher ends the others."""
    process.terminate()
    if not within(_GRACE_S, partial(has_ended, process)):
        process.kill()
    process.wait()


def _failed(what: str, said: Sequence[str], say: Callable[[str], None], why: str = "") -> UnsupportedError:
    """Say the last lines of a process; the error has the reason, which is the last of them where no other is known."""
    words = "\n".join(said[-_LAST_LINES:])
    say(words)
    return UnsupportedError(f"{what}, {_NOTHING} {why or last_line(words)}")


def expected_calls(facts: Facts) -> str:
    """Say how often the rewards will be called, on both sides."""
    count, calls = facts.completions, facts.completions // facts.group_size
    return (
        f"{facts.trainer} of {facts.model}, {facts.parameters:,} parameters. Each reward ({', '.join(facts.rewards)}) "
        f"will score {count} completions in a run ({calls} calls) and the same {count} in plain TRL ({facts.batches} "
        f"calls); one that differs then scores {facts.group_size} of them three times more."
    )


def _train_in_plain_trl(options: CheckOptions, say: Callable[[str], None]) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    try:
        probe.ask("async_grpo.checks.differential.plain", asdict(options), timeout_s=DEADLINE_S, env=env)
    except probe.ChildFailed as failure:
        raise _failed(f"Plain TRL {failure.how}", failure.said, say) from failure
