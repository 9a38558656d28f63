"""Print the functions and files of our code that one rollout passes, with the transformers engine.

    python scripts/route.py           print them, with counts
    python scripts/route.py --write   put the list of files into docs/design.md
    python scripts/route.py --check   fail when the way is longer than its budget in house.toml

The script runs a parameter server and one worker on the CPU (a random model, a real queue directory, real shared
weights, default settings except `--max-staleness 0`), records every call with `sys.setprofile`, and follows the groups
of some rounds in the middle, each the only group under way. Functions that all of these groups pass count, in the order
of the group that passes fewest. Periodic work does not count, such as the check whether the run has ended, and looks at
the whole queue: here it is done every two seconds, and a group takes less time even on a busy machine.

The first part, "the rollout", has
* the function that creates the `Job`, and every call that it makes (to submit the job, for example);
* the worker's loop, and every call from the one that claims the job to the rename that publishes the finished group:
  those of the worker's thread, and those of the thread that calls the reward functions.
The second part, "the trainer", has the call that issues the job and the call that takes the group, each with every call
that it makes: the outermost ones, directly beneath the function that runs the whole training.

A function counts once, with its name and file, if a `def` of it is in `async_grpo` or `async_grpo_ipc`: methods,
constructors and generators count. Properties, which read like attributes, lambdas, comprehensions, module bodies and
what `dataclass` generates do not.
A change of file is a function whose file differs from that of the function before it, in the order of the first calls.

This file is also the setup file of the run.
"""

from __future__ import annotations

import argparse
import io
import json
import linecache
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from house import BUDGETS, budgets_of, wrong

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src"
PAGE = ROOT / "docs" / "design.md"
AIM_FUNCTIONS, AIM_FILES = 115, 27
STEPS = 14
FOLLOWED = range(2, 12)  # sequence numbers: one group a round
DEADLINE_S = 240.0
PERIOD_S = 2.0
REWARD_S = 0.01  # longer than the worker's loop takes to come round

CREATED, SUBMITTED, CLAIMED, REWARDED, PUBLISHED, TAKEN = (
    "created", "submitted", "claimed", "rewarded", "published", "taken"
)  # fmt: skip
RENAMES = (
    (re.compile(r"queue/(\d+)\.a\d+_pending"), SUBMITTED),
    (re.compile(r"queue/(\d+)\.a\d+_processing_by"), CLAIMED),
    (re.compile(r"queue/(\d+)\.a\d+_complete_from"), PUBLISHED),
    (re.compile(r"done/.*?(\d{6,})\.a\d+"), TAKEN),
)


class Function(NamedTuple):
    """A function of ours: `queue/server.py`, `ServerQueue.submit`."""

    file: str
    name: str


# --- The run ----------------------------------------------------------------------------------------------


def reward(completions: list[str], **_: Any) -> list[float]:
    recorder.mark(REWARDED, 0)
    time.sleep(REWARD_S)
    return [float(len(completion)) for completion in completions]


def get_trainer() -> Any:
    sys.path.insert(0, str(ROOT / "examples"))
    from datasets import Dataset
    from tiny_model import build_model, build_tokenizer, small_config
    from trl import GRPOTrainer

    tokenizer = build_tokenizer()
    return GRPOTrainer(
        model=build_model(tokenizer),
        processing_class=tokenizer,
        reward_funcs=sys.modules["__main__"].reward,  # of the program, not of its copy that is the setup file
        train_dataset=Dataset.from_dict({"prompt": ["one plus one is", "the sky is", "a cat says"]}),
        args=small_config(
            "checkpoints",
            max_steps=STEPS,
            per_device_train_batch_size=2,
            num_generations=2,
            max_completion_length=4,
            save_strategy="no",
        ),
    )


class Recorder:
    """The calls of our functions in this process, and the moments that matter, in the order in which they happened."""

    def __init__(self) -> None:
        self._functions: dict[CodeType, Function | None] = {}
        self.events: list[tuple[int, str, Any]] = []  # thread, "call" or "return" or a mark, function or number

    def start(self) -> None:
        sys.addaudithook(self._on_audit)
        threading.setprofile(self._on_profile)
        sys.setprofile(self._on_profile)

    def stop(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def mark(self, name: str, seq: int) -> None:
        self.events.append((threading.get_ident(), name, seq))

    def _on_profile(self, frame: FrameType, event: str, _: object) -> None:
        if event not in ("call", "return"):
            return
        code = frame.f_code
        try:
            function = self._functions[code]
        except KeyError:
            function = self._functions[code] = function_of(code)
        if function is not None:
            self.events.append((threading.get_ident(), event, function))
        elif event == "call" and code.co_filename == "<string>" and code.co_name == "__init__":
            made = frame.f_locals
            if type(made["self"]).__qualname__ == "Job":
                self.mark(CREATED, made["seq"])

    def _on_audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "os.rename":
            return
        for pattern, name in RENAMES:
            if match := pattern.search(str(arguments[1])):
                self.mark(name, int(match[1]))


recorder = Recorder()


def function_of(code: CodeType) -> Function | None:
    path = Path(code.co_filename)
    if code.co_name.startswith("<") or not path.is_relative_to(SRC):
        return None
    if linecache.getline(code.co_filename, code.co_firstlineno).strip() == "@property":
        return None
    file = str(path.relative_to(SRC)).removeprefix("async_grpo/")
    return Function(file, code.co_qualname.replace(".<locals>", ""))


def run_and_record(folder: Path) -> tuple[list[Any], list[Any]]:
    """The events of the parameter server and of the worker, two processes of which one is this."""
    sys.path.insert(0, str(SRC))
    os.environ.update(OMP_NUM_THREADS="1", LOG_LEVEL="ERROR", TRL_EXPERIMENTAL_SILENCE="1")
    # A thread that sends telemetry may hold a lock of OpenSSL at the fork; the child would wait for it for ever.
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    os.chdir(folder)
    from async_grpo.cli import main as async_grpo
    from async_grpo.queue import worker as worker_queue
    from async_grpo.rollout import worker as worker_loop

    get_trainer()  # imports what both processes need, and its calls are not recorded

    worker_loop.RUN_LOOK_S = worker_queue._PIPE_TRUST_S = PERIOD_S
    worker = os.fork()
    recorder.start()
    signal.signal(signal.SIGALRM, _too_late)
    signal.setitimer(signal.ITIMER_REAL, DEADLINE_S)
    if worker == 0:
        code = 1
        try:
            code = async_grpo(["worker", "--device", "cpu", "--run-dir", "run"])
            recorder.stop()
            Path("worker.json").write_text(json.dumps(recorder.events))
        finally:
            os._exit(code)
    try:
        with redirect_stdout(io.StringIO()):
            code = async_grpo(
                ["server", "--config", __file__, "--device", "cpu", "--run-dir", "run", "--max-staleness", "0"]
            )
        recorder.stop()
        ended = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    except BaseException:
        os.kill(worker, signal.SIGKILL)
        raise
    if code or ended:
        sys.exit(f"The run failed: exit code {code} of the parameter server, {ended} of the worker.")
    events = [
        (thread, event, Function(*about) if isinstance(about, list) else about)
        for thread, event, about in json.loads(Path("worker.json").read_text())
    ]
    return recorder.events, events


def _too_late(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"The run did not end in {DEADLINE_S:.0f} s.")


# --- The way through it -----------------------------------------------------------------------------------


@dataclass(eq=False)
class Call:
    """One call of a function of ours, with the calls of ours beneath it, in order."""

    function: Function
    thread: int
    parent: Call | None
    begin: int  # positions in the list of events
    end: int = sys.maxsize
    calls: list[Call] = field(default_factory=list)

    def tree(self) -> Iterator[Call]:
        yield self
        for call in self.calls:
            yield from call.tree()

    def has(self, moment: Moment) -> bool:
        return self.thread == moment.thread and self.begin < moment.at < self.end


class Moment(NamedTuple):
    """When and where something happened to a job."""

    at: int
    thread: int
    within: Call


class Process:
    """The calls and moments of one process."""

    def __init__(self, events: Iterable[tuple[int, str, Any]]) -> None:
        self.calls: list[Call] = []
        self._moments: dict[tuple[str, int], list[Moment]] = {}
        current: dict[int, Call | None] = {}
        for at, (thread, event, about) in enumerate(events):
            innermost = current.get(thread)
            if event == "call":
                call = Call(about, thread, innermost, at)
                if innermost is not None:
                    innermost.calls.append(call)
                self.calls.append(call)
                current[thread] = call
            elif innermost is None:
                continue  # the return of a call from before the recording
            elif event == "return":
                innermost.end = at
                current[thread] = innermost.parent
            else:
                self._moments.setdefault((event, about), []).append(Moment(at, thread, innermost))

    def first(self, name: str, seq: int, after: int = 0) -> Moment:
        """Raises `SystemExit`: it did not happen."""
        for moment in self._moments.get((name, seq), []):
            if moment.at >= after:
                return moment
        sys.exit(f"Group {seq} was not {name}: does `RENAMES` fit the names of the queue's files?")


def around(moment: Moment, still_open_at: int) -> Call:
    """The innermost call around `moment` that was not over at a later one."""
    call = moment.within
    while call.end < still_open_at:
        assert call.parent is not None
        call = call.parent
    return call


def rollout(server: Process, worker: Process, seq: int) -> list[Function]:
    creation = server.first(CREATED, seq).within
    return in_order([*creation.tree(), *in_worker(worker, seq)])


def in_worker(worker: Process, seq: int) -> list[Call]:
    """The calls of the worker from the claim to the publication."""
    claimed, published = worker.first(CLAIMED, seq), worker.first(PUBLISHED, seq)
    loop = around(claimed, published.at)
    threads = (loop.thread, worker.first(REWARDED, 0, after=claimed.at).thread)
    first = next(call for call in loop.calls if call.has(claimed))
    return [
        loop,
        *(call for call in worker.calls if call.thread in threads and first.begin <= call.begin < published.at),
    ]


def trainer(server: Process, seq: int) -> list[Function]:
    created = server.first(CREATED, seq)
    taken = server.first(TAKEN, seq)
    training = around(created, taken.at)
    return in_order(whole(call for call in training.calls if call.has(created) or call.has(taken)))


def common(ways: list[list[Function]]) -> list[Function]:
    """The functions that are in all ways, in the order of the shortest."""
    return [function for function in min(ways, key=len) if all(function in way for way in ways)]


def whole(calls: Iterable[Call]) -> list[Call]:
    return [inner for call in calls for inner in call.tree()]


def in_order(calls: Iterable[Call]) -> list[Function]:
    return list(dict.fromkeys(call.function for call in calls))


# --- What is printed --------------------------------------------------------------------------------------


def by_file(functions: list[Function]) -> dict[str, list[str]]:
    files: dict[str, list[str]] = {}
    for function in functions:
        files.setdefault(function.file, []).append(function.name)
    return files


def counts(functions: list[Function]) -> str:
    changes = sum(one.file != other.file for one, other in pairwise(functions))
    return f"{len(functions)} functions in {len(by_file(functions))} files, {changes} changes of file"


def report(title: str, functions: list[Function]) -> str:
    lines = [f"{title}: {counts(functions)}"]
    for file, names in by_file(functions).items():
        lines += [f"  {file}", *(f"      {name}" for name in names)]
    return "\n".join(lines)


def listing(functions: list[Function]) -> str:
    """The files in the order of the first visit, each with the first function of it that is called."""
    files = by_file(functions)
    width = max(map(len, files))
    return "\n".join(f"{file:<{width}}  {names[0]}" for file, names in files.items())


def written(page: str, functions: list[Function]) -> str:
    block = f"<!-- route: scripts/route.py --write -->\n```text\n{listing(functions)}\n```"
    new, found = re.subn(r"<!-- route: .*? -->\n```text\n.*?\n```", lambda _: block, page, flags=re.DOTALL)
    if found != 1:
        sys.exit(f"{PAGE} has {found} places for the route; there must be one.")
    return new


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the functions and files that one rollout passes.")
    parser.add_argument("--write", action="store_true", help=f"put the list of files into {PAGE.name}")
    parser.add_argument(
        "--check", action="store_true", help=f"fail when the way is longer than its budget in {BUDGETS}"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server, worker = map(Process, run_and_record(Path(folder)))
    way = common([rollout(server, worker, seq) for seq in FOLLOWED])
    print(report("The rollout", way))
    print(report("The trainer", common([trainer(server, seq) for seq in FOLLOWED])))
    if args.write:
        PAGE.write_text(written(PAGE.read_text(), way))
    found = {"way.functions": len(way), "way.files": len(by_file(way))}
    budgets = budgets_of((ROOT / BUDGETS).read_text())
    if args.check and (errors := wrong(found, {name: budgets[name] for name in found})):
        sys.exit("\n".join([*errors, f"The aim is {AIM_FUNCTIONS} functions in {AIM_FILES} files."]))


if __name__ == "__main__":
    main()
