"""A taskset with a tool, a state, a setup and two rewards, as an author of verifiers environments writes it."""

from __future__ import annotations

import asyncio

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: int


class SumState(vf.State):
    added: int = 0


class Calculator(vf.Toolset[vf.ToolsetConfig, SumState]):
    @vf.tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        self.state.added += 1
        if a < 0:
            raise ValueError("no negative numbers")
        return a + b


class Library(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None
    started = 0

    async def setup(self) -> None:
        await asyncio.sleep(0.01)
        Library.started += 1

    @vf.tool
    def text(self, length: int) -> str:
        """Read a text."""
        return "x" * length + "\ud800"


class SumTask(vf.Task[SumData, SumState]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Calculator(vf.ToolsetConfig())]

    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(self.data.answer))

    @vf.reward(weight=0.5)
    async def used_the_tool(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages) > 0)

    @vf.metric
    async def additions(self, trace: vf.Trace) -> float:
        return trace.state.added


class SumsConfig(vf.TasksetConfig):
    count: int = 3


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    @classmethod
    def toolsets(cls, config: SumsConfig) -> list[vf.Toolset]:
        return [Library(vf.ToolsetConfig())]

    def load(self) -> list[SumTask]:
        return [
            SumTask(SumData(prompt=f"What is {n}+{n}?", system_prompt="Add.", answer=2 * n), self.config.task)
            for n in range(self.config.count)
        ]


__all__ = ["SumsTaskset"]

CALL = '<tool_call>\n{"name": "calculator_add", "arguments": {"a": %s, "b": %s}}\n</tool_call>'
