"""What a script writes in the place of a model, by us and by plain TRL, and the scripts of dialogues with tools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trl import GRPOTrainer

from kit.compared_with_trl import SamplerIsOld, largest_difference
from kit.in_process import InProcessRun, training_logs
from kit.scripted import ScriptedEngine, ScriptedGenerator, writing
from kit.tools import TOOL_CALL

Reply = Callable[[str, int], str]

BAD_CALL = '<tool_call>\n{"name": "divide", "arguments": {}}\n</tool_call>'


def scripted(get_trainer: Callable[..., GRPOTrainer], reply: Reply) -> InProcessRun:
    return InProcessRun(get_trainer, engine=ScriptedEngine(ScriptedGenerator(reply))).train()


def run_as_scripted_trl_would(
    get_trainer: Callable[..., GRPOTrainer], reply: Reply, trainer_class: type[GRPOTrainer] = GRPOTrainer
) -> tuple[InProcessRun, GRPOTrainer]:
    """Run with a script in the place of the model, then plain TRL with the same script: all that they log is equal."""
    run = scripted(get_trainer, reply)
    plain: Any = get_trainer(trainer_class=type("Scripted", (SamplerIsOld, writing(reply, trainer_class)), {}))
    plain.train()
    largest_difference(run.logs, training_logs(plain))
    return run, plain


def calls_multiply(prompt: str, index: int) -> str:
    """Calls the tool in every second completion, and uses its result."""
    if "<tool_response>" in prompt:
        return "twelve"
    return f"let me see{TOOL_CALL}" if index % 2 == 0 else "eleven"
