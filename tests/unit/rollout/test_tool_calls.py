"""The tools of dialogues: side by side, in their time, and whatever they do, a text."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from async_grpo.errors import GeneratorError
from async_grpo.rollout.threads import UserCode
from async_grpo.rollout.turns import tools as module
from async_grpo.rollout.turns.calls import Call, Outcome, Refused
from async_grpo.rollout.turns.dialogue import ToolResults
from async_grpo.rollout.turns.groups import ROUNDS
from async_grpo.rollout.turns.tools import MOST_TEXT, ToolFailed, Tools
from async_grpo.telemetry.activity import Activity
from kit.engines import DEADLINE_S


def made(**options: Any) -> Tools:
    settings: dict[str, Any] = {"timeout_s": DEADLINE_S, "at_once": 64, "users_loop": asyncio.get_running_loop}
    return Tools(defaultdict(lambda: UserCode("the tools")), **{**settings, **options})


def call(tool: Callable[..., Any], **arguments: Any) -> Call:
    return Call(tool.__name__, tool, arguments)


def thread_safe(tool: Callable[..., Any]) -> Callable[..., Any]:
    tool.thread_safe = True  # type: ignore[attr-defined]
    return tool


class Crowd:
    """A tool that counts how many of its calls run at a time."""

    def __init__(self) -> None:
        self._running, self.most = [], 0  # type: ignore[var-annotated]

    def busy(self) -> str:
        self._running.append("")
        self.most = max(self.most, len(self._running))
        threading.Event().wait(0.002)
        self._running.pop()
        return ""


def later(tool: Callable[..., Any], **arguments: Any) -> Call:
    return Call(tool.__name__, tool, arguments, coroutine=tool(**arguments))


def outcomes(dialogues: Sequence[Sequence[Callable[[], Call]]], **options: Any) -> list[list[Outcome]]:
    """What the calls of several dialogues came to, made at the same time."""

    async def run() -> list[list[Outcome]]:
        tools = made(**options)
        return await asyncio.gather(*(tools.run([make() for make in calls]) for calls in dialogues))

    return asyncio.run(run())


async def until(true: Callable[[], bool]) -> None:
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    while not true():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.005)


def outcome(tool: Callable[..., Any], **options: Any) -> Outcome:
    return outcomes([[lambda: call(tool)]], **options)[0][0]


@pytest.fixture
def hang() -> Iterator[Any]:
    """A tool that hangs until the end of the test, or until `released` is set."""
    event = threading.Event()

    def hang() -> None:
        event.wait(DEADLINE_S)

    hang.released = event  # type: ignore[attr-defined]
    yield hang
    event.set()


def test_what_is_thread_safe_runs_side_by_side() -> None:
    met = threading.Barrier(16)

    @thread_safe
    def meet() -> int:
        return met.wait(DEADLINE_S)

    results = outcomes([[lambda: call(meet)]] * 16)
    assert sorted(one.value for [one] in results) == sorted(map(str, range(16)))


def test_a_call_is_noted_before_it_is_made_and_until_it_ends_or_is_given_up(
    hang: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Activity()
    monkeypatch.setattr(module, "activity", noted)

    def names() -> list[str]:
        noted.flush()
        return [call.name for call in noted.record().calls]

    def look() -> str:
        return ",".join(names())

    async def look_later() -> str:
        return look()

    [[first, second]] = outcomes([[lambda: call(look), lambda: later(look_later)]])
    assert (first.value, second.value) == ("look", "look_later")
    assert isinstance(outcome(hang, timeout_s=0.05).error, ToolFailed)
    assert names() == []


def test_any_other_tool_runs_one_call_at_a_time_beside_other_tools() -> None:
    met, crowd = threading.Barrier(2), Crowd()

    def left() -> int:
        return met.wait(DEADLINE_S)

    def right() -> int:
        return met.wait(DEADLINE_S)

    outcomes([[lambda: call(crowd.busy)]] * 8 + [[lambda: call(left)], [lambda: call(right)]])
    assert crowd.most == 1


def test_the_methods_of_two_environments_are_one_tool_unless_their_class_is_thread_safe() -> None:
    class Environment:
        thread_safe = False

        def step(self) -> int:
            return met.wait(0.05 if not self.thread_safe else DEADLINE_S)

    for thread_safe, right in ((True, None), (False, threading.BrokenBarrierError)):
        met, Environment.thread_safe = threading.Barrier(2), thread_safe
        results = outcomes([[lambda: call(Environment().step)]] * 2)
        assert all((one.error is None) if right is None else isinstance(one.error, right) for [one] in results)


def test_the_calls_of_a_tool_are_made_within_one_step_of_the_engine() -> None:
    """The event loop stands still meanwhile."""
    calls = threading.Semaphore(0)

    def count() -> None:
        calls.release()

    async def run() -> None:
        tools = made()
        dialogues = [asyncio.create_task(tools.run([call(count)])) for _ in range(16)]
        for _ in range(ROUNDS):
            await asyncio.sleep(0)
        assert all(calls.acquire(timeout=DEADLINE_S) for _ in dialogues)
        await asyncio.gather(*dialogues)

    asyncio.run(run())


@pytest.mark.parametrize("thread_safe", [False, True])
def test_a_tool_whose_thread_cannot_be_started_costs_its_groups(
    thread_safe: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise RuntimeError("can't start new thread")

    refuses.thread_safe = thread_safe  # type: ignore[attr-defined]

    async def run() -> None:
        tools = made()
        with pytest.raises(RuntimeError, match="can't start new thread"):
            await tools.run([call(refuses), behind := later(asyncio.sleep, delay=0)])
        assert not tools.in_time and behind.coroutine.cr_frame is None, "it is closed"
        monkeypatch.undo()
        assert [one.value for one in await tools.run([call(lambda: "a")])] == ["a"]

    monkeypatch.setattr(module.KeptThreads, "run", refuses)
    asyncio.run(run())


def test_async_tools_of_all_dialogues_are_awaited_together() -> None:
    met = asyncio.Barrier(4)

    async def meet() -> str:
        await met.wait()
        return "met"

    dialogues = outcomes([[lambda: later(meet)] * 2] * 2)
    assert [one.value for results in dialogues for one in results] == ["met"] * 4


def test_no_more_calls_than_the_limit_run_at_a_time() -> None:
    crowd = Crowd()
    busy = thread_safe(lambda: crowd.busy())
    outcomes([[lambda: call(busy)]] * 12, at_once=3)
    assert crowd.most <= 3


def test_calls_of_one_message_run_in_their_order() -> None:
    order: list[int] = []
    note = thread_safe(lambda n: order.append(n))
    outcomes([[lambda n=n: call(note, n=n) for n in range(5)]])  # type: ignore[misc]
    assert order == list(range(5))


def raising(error: BaseException) -> Callable[[], Any]:
    def tool() -> Any:
        raise error

    return tool


class Textless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("tool", "text"),
    [
        (raising(ValueError("no such page")), "no such page"),
        (raising(SystemExit(3)), "Error: SystemExit: 3"),
        (raising(KeyboardInterrupt()), "Error: KeyboardInterrupt: "),
        (raising(Textless()), "Error: Textless"),
        (raising(ValueError("\ud800")), "?"),
        (lambda: "x" * 1_000_000, "Error: the result has 1,000,000 characters, and at most"),
        (lambda: [{"type": "text", "text": "x" * 500_000}] * 2, "Error: the result has 1,000,000 characters, and at"),
    ],
)
def test_what_a_tool_raises_is_a_text(tool: Callable[[], Any], text: str) -> None:
    error = outcome(tool).error
    assert str(error).startswith(text)
    assert len(str(error)) < MOST_TEXT


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (b"\xff", "b'\\xff'"),
        ("a\ud800b", "a?b"),
        (None, "None"),
        ({"a": 1}, "{'a': 1}"),
        ([{"type": "text"}], None),
        ([{"type": "text", "text": "a\ud800"}, 7], [{"type": "text", "text": "a?"}, 7]),
    ],
)
def test_what_a_tool_returns_is_a_text_or_blocks(result: Any, text: Any) -> None:
    assert outcome(lambda: result).value == (result if text is None else text)


def test_a_result_without_a_text_is_an_error() -> None:
    assert str(outcome(Textless).error) == "no text"


def test_an_async_tool_that_exits_or_took_no_arguments() -> None:
    async def leave() -> None:
        raise SystemExit

    refused = Call("leave", leave, {"a": 1}, error=TypeError("unexpected"))
    [[left, wrong]] = outcomes([[lambda: later(leave), lambda: refused]])
    assert str(left.error) == "Error: SystemExit: "
    assert isinstance(wrong.error, Refused)


def test_a_search_process_that_is_killed_costs_its_calls_a_text() -> None:
    """One call waits for its answer, the next finds nobody; the worker goes on."""

    def search(query: str) -> str:
        process.stdin.write(f"{query}\n".encode())
        found = process.stdout.readline()
        if not found:
            raise EOFError("the search process has ended")
        return found.decode()

    async def run() -> list[Outcome]:
        tools = made()
        waiting = asyncio.create_task(tools.run([call(search, query="a")]))
        await until(lambda: tools.in_time == 1)
        process.kill()
        await asyncio.to_thread(process.wait, DEADLINE_S)
        (first,), (second,) = await waiting, await tools.run([call(search, query="b")])
        tools.check()
        return [first, second]

    with subprocess.Popen(["wc"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        first, second = asyncio.run(run())
        assert isinstance(first.error, (EOFError, BrokenPipeError))
        assert isinstance(second.error, BrokenPipeError)


def test_a_tool_may_call_its_arguments_as_we_call_ours() -> None:
    def plot(function: str, self: int, name: str, args: str) -> str:
        return f"{function} {self} {name} {args}"

    given = {"function": "x**2", "self": 1, "name": "n", "args": "a"}
    [[plotted]] = outcomes([[lambda: call(plot, **given)]])
    assert (plotted.error, plotted.value) == (None, "x**2 1 n a")


def test_an_async_tool_that_is_cancelled_from_within_is_an_error() -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError("by a library")

    async def closed() -> None:
        raise GeneratorExit

    [[one, two]] = outcomes([[lambda: later(cancelled), lambda: later(closed)]])
    assert str(one.error) == "Error: CancelledError: by a library"
    assert str(two.error) == "Error: GeneratorExit: "


def test_an_async_tool_that_never_began_is_not_left_behind(hang: Any) -> None:
    """Something blocks the loop of async tools, and the time of a call ends before it begins."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    given = later(asyncio.sleep, delay=0)

    async def run() -> None:
        tools, owner = made(users_loop=lambda: loop, timeout_s=0.05), set[int]()
        loop.call_soon_threadsafe(hang)
        await tools.run([given], owner)
        hang.released.set()
        await until(lambda: not tools.still_running(owner))

    asyncio.run(run())
    loop.call_soon_threadsafe(loop.stop)
    thread.join(DEADLINE_S)
    loop.close()
    assert inspect.getcoroutinestate(given.coroutine) == inspect.CORO_CLOSED


def test_async_tools_that_nobody_waits_for_any_more_are_not_begun(hang: Any) -> None:
    async def run() -> None:
        tools = made()
        dialogue = asyncio.create_task(tools.run([call(hang), waits]))
        await until(lambda: tools.in_time == 1)
        dialogue.cancel()
        await asyncio.wait([dialogue])

    waits = later(asyncio.sleep, delay=0)
    asyncio.run(run())
    assert inspect.getcoroutinestate(waits.coroutine) == inspect.CORO_CLOSED


def test_a_tool_that_hangs_is_given_up_and_others_of_its_name_go_on(hang: Any) -> None:
    begun = iter([hang])

    def hangs_once() -> str:
        next(begun, lambda: None)()
        return "done"

    async def waits() -> None:
        await asyncio.sleep(DEADLINE_S)

    results = outcomes([[lambda: call(hangs_once)]] * 2 + [[lambda: later(waits)]], timeout_s=1.0)
    assert "Error: hangs_once did not return within 1 s" in str(results[0][0].error)
    assert results[1][0].value == "done"
    assert "waits did not return" in str(results[2][0].error)


def test_too_many_threads_that_are_left_behind_end_the_worker(hang: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_LEFT_BEHIND", 2)

    async def run() -> None:
        tools, owner = made(timeout_s=0.02), set[int]()
        await tools.run([call(hang)] * 2, owner)
        assert tools.still_running(owner)
        tools.check()
        await tools.run([call(hang)])
        with pytest.raises(GeneratorError, match=r"3 tool calls still run after their 0\.02 s .*hang \(3\)"):
            tools.check()
        hang.released.set()
        await until(lambda: not tools.still_running(owner))
        tools.check()

    asyncio.run(run())


# --- Tool results as the chat template writes them: --------------------------------------------------------------

Messages = list[dict[str, str]]


class Template:
    """Writes a message as its text's characters, after what `now` says."""

    def __init__(self) -> None:
        self.now = "12:00"
        self.rendered: list[str] = []

    def apply_chat_template(self, conversation: Sequence[Any], add_generation_prompt: bool = False) -> list[int]:
        text = self.now + "".join(message["content"] for message in conversation) + ">" * add_generation_prompt
        self.rendered.append(text)
        return list(map(ord, text))


class Trainer:
    def __init__(self) -> None:
        self.processing_class = Template()

    def _get_tool_suffix_ids(self, tool_messages: Messages) -> list[int]:
        """As TRL's: with a call before them, less what is written without them."""
        asked = [{"content": f"{tool_messages[0]['name']}?"}]
        before = self.processing_class.apply_chat_template(asked)
        whole = self.processing_class.apply_chat_template(asked + tool_messages, add_generation_prompt=True)
        if whole[: len(before)] != before:
            raise ValueError("not a prefix")
        return whole[len(before) :]


def result(name: str, content: str) -> Messages:
    return [{"name": name, "content": content}]


def text(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def test_what_stands_before_results_is_rendered_once_for_each_tool() -> None:
    trainer = Trainer()
    results = ToolResults(trainer)
    calls = [("add", "1"), ("add", "2"), ("find", "x"), ("add", "3")]
    assert [text(results.written(result(*call))) for call in calls] == ["1>", "2>", "x>", "3>"]
    rendered = trainer.processing_class.rendered
    assert [line for line in rendered if not line.endswith(">")] == ["12:00add?", "12:00find?"]
    assert len(rendered) == 2 + len(calls)


def test_a_template_may_write_the_time() -> None:
    trainer = Trainer()
    results = ToolResults(trainer)
    results.written(result("add", "1"))
    trainer.processing_class.now = "12:01"
    assert text(results.written(result("add", "2"))) == "2>"


class Extending(Trainer):
    """A user's method: it goes on writing in the list that it got, and names no argument."""

    def _get_tool_suffix_ids(self, tool_messages: Messages) -> list[int]:
        written = self.processing_class.apply_chat_template([])
        written += self.processing_class.apply_chat_template(tool_messages, *[True])
        return written


def test_a_users_method_gets_a_list_of_its_own_and_any_arguments() -> None:
    results = ToolResults(Extending())
    assert [text(results.written(result("add", content))) for content in "12"] == ["12:0012:001>", "12:0012:002>"]


def test_what_trl_refuses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer()
    monkeypatch.setattr(
        trainer.processing_class, "apply_chat_template", lambda messages, **options: [len(messages), len(options)]
    )
    with pytest.raises(ValueError, match="not a prefix"):
        ToolResults(trainer).written(result("add", "1"))


def test_the_users_tokenizer_stays_as_it_is() -> None:
    trainer = Trainer()
    ToolResults(trainer).written(result("add", "1"))
    assert "apply_chat_template" not in vars(trainer.processing_class)
