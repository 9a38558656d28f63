"""A dialogue whose model calls a tool in three of four completions, and its rewards."""

from __future__ import annotations

from typing import Any

from kit.scripted import ScriptedGenerator
from kit.tools import written


def reply(prompt: str, index: int) -> str:
    if "<tool_response>" in prompt:
        return "four" if index % 2 else "eight"
    return written(("double", {"number": index % 4 + 1})) if index % 4 else "no"


class Script(ScriptedGenerator):
    """Does not come to the end of "eight"."""

    def generate(self, prompt_ids: Any) -> Any:
        made, values = super().generate(prompt_ids)
        eos = self._tokenizer.eos_token_id
        at = [len(ids) - ("eight" in self._tokenizer.decode(ids)) * (ids[-1] == eos) for ids in made]
        return [ids[:n] for ids, n in zip(made, at, strict=True)], [row[:n] for row, n in zip(values, at, strict=True)]


def says_eight(completions: list[Any], **_: Any) -> list[float]:
    return [float(completion[-1]["content"] == "eight") for completion in completions]


def called(completions: list[Any], **_: Any) -> list[float]:
    return [0.2 * (len(completion) > 1) for completion in completions]
