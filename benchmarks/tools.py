"""What waiting tools cost: a turn of 16 completions that call a tool of one second, and one tool of 30 seconds.

The model is a script, so that the time is that of the tools and of what is around them. In one process, no queue.

    python benchmarks/tools.py [--quick] [--json FILE]
    .venv-vllm/bin/python benchmarks/tools.py --vllm      a tool between two turns of a vLLM engine, against one turn
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.table import ROOT, Row, as_text, row, write_json

sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "integration")]

GROUP = 4
COMPLETIONS = 16
CALL = '<tool_call>\n{"name": "NAME", "arguments": {"number": 1}}\n</tool_call>'


def tool_of(seconds: float, kind: str) -> Callable[..., Any]:
    """A tool that waits: `async`, `thread_safe`, or one that is neither."""

    def waits(number: int) -> int:
        """Wait.

        Args:
            number: any.
        """
        time.sleep(seconds if number else 0)
        return number

    async def waits_async(number: int) -> int:
        """Wait.

        Args:
            number: any.
        """
        await asyncio.sleep(seconds)
        return number

    waits_async.__name__ = "waits"
    waits.thread_safe = kind == "thread_safe"  # type: ignore[attr-defined]
    return waits_async if kind == "async" else waits


def quick(number: int) -> int:
    """Return at once.

    Args:
        number: any.
    """
    return number


class Streaming:
    """Continues every prompt at once, as an engine does whose batch can be joined."""

    joins, most_groups = True, 64

    def __init__(self, script: Any) -> None:
        self._script = script

    def sample(self, new: Sequence[Any]) -> list[Any]:
        from async_grpo.rollout.engines import SampledGroup

        made = [(turn, *self._script.generate(turn.prompt_ids)) for turn in new]
        return [SampledGroup(prepared=turn, token_ids=ids, logprobs=logprobs) for turn, ids, logprobs in made]

    def follow(self, weights: Any) -> Any: ...

    def close(self) -> None: ...


def setting(folder: str, tools: list[Any], reply: Callable[[str, int], str], *, streaming: bool) -> tuple[Any, Any]:
    """A worker with these tools, and the trainer that it was made of."""
    from in_process import (
        QWEN3_CHAT_TEMPLATE,
        InProcessWorker,
        ScriptedEngine,
        ScriptedGenerator,
        build_tokenizer,
        build_trainer,
        length,
    )

    given = {"chat_template": QWEN3_CHAT_TEMPLATE, "reward_funcs": [length], "max_completion_length": 400}
    trainer = build_trainer(Path(folder), arguments={"tools": tools}, num_generations=GROUP, **given)
    script = ScriptedGenerator(build_tokenizer(QWEN3_CHAT_TEMPLATE), reply)
    return InProcessWorker(trainer, Streaming(script) if streaming else ScriptedEngine(script)), script


def calling(name: str) -> Callable[[str, int], str]:
    return lambda prompt, place: "done" if "<tool_response>" in prompt else CALL.replace("NAME", name)


def a_turn(kind: str, seconds: float, *, streaming: bool) -> float:
    """Seconds for 16 completions that call a tool once."""
    from in_process import chat_rows, jobs_of

    with tempfile.TemporaryDirectory() as folder:
        worker, _ = setting(folder, [tool_of(seconds, kind)], calling("waits"), streaming=streaming)
        jobs = jobs_of(chat_rows(COMPLETIONS // GROUP), group_size=GROUP)
        started = time.monotonic()
        groups = worker.generate(jobs)
        took = time.monotonic() - started
        assert all(len(completion) == 3 for group in groups for completion in group.completions)
        return took


def trl_turn(seconds: float) -> float:
    """The same in plain TRL."""
    from in_process import chat_rows

    with tempfile.TemporaryDirectory() as folder:
        tool = tool_of(seconds, "thread_safe")
        worker, script = setting(folder, [tool], calling("waits"), streaming=False)
        trainer: Any = worker.trl.trainer
        trainer._generate_single_turn = lambda prompt_ids, *_, **__: script.generate(prompt_ids)
        trainer._sync_tool_dicts, trainer._async_tool_dicts = [{"waits": tool}] * COMPLETIONS, [{}] * COMPLETIONS
        prompts = [row["prompt"] for row in chat_rows(COMPLETIONS // GROUP) for _ in range(GROUP)]
        started = time.monotonic()
        trainer._generate(prompts)
        return time.monotonic() - started


def others_beside(seconds: float, groups: int) -> float:
    """Seconds until all groups but one have ended, while a tool of that one waits so long; 0: it does not wait."""
    from in_process import chat_rows, jobs_of

    def reply(prompt: str, place: int) -> str:
        if "<tool_response>" in prompt:
            return "done"
        return CALL.replace("NAME", "waits" if "\na<|im_end|>" in prompt and seconds else "quick")

    rows = list(chat_rows())
    with tempfile.TemporaryDirectory() as folder:
        worker, _ = setting(folder, [tool_of(seconds, "plain"), quick], reply, streaming=True)
        started = time.monotonic()
        ended = worker.engine.sample(worker.calls.prepare(jobs_of(rows[:1], group_size=1), 0))
        for number in range(groups):  # one after the other, as a worker claims them
            (job,) = jobs_of(rows[1 + number % 10 : 2 + number % 10], group_size=GROUP)
            ended += worker.engine.sample(worker.calls.prepare([job], 0))
            while len(ended) <= number + (seconds == 0):
                ended += worker.engine.sample([])
        took = time.monotonic() - started
        worker.engine.close()
        return took


def measured(*, long_s: float, repeats: int) -> list[Row]:
    beside, alone = [], []
    others_beside(0, 4)  # loads what is loaded once
    for _ in range(repeats):
        alone.append(others_beside(0, 40))
        beside.append(others_beside(long_s, 40))
    delays = [100 * (slow / fast - 1) for slow, fast in zip(beside, alone, strict=True)]
    turn = f"a turn of {COMPLETIONS} completions that call a tool of 1 s"
    return [
        row(f"{turn}: async", [a_turn("async", 1, streaming=False) for _ in range(repeats)], "s", target="<= 1.6"),
        row(f"{turn}: thread_safe", [a_turn("thread_safe", 1, streaming=False)], "s", target="<= 1.6"),
        row(f"{turn}: thread_safe, streaming", [a_turn("thread_safe", 1, streaming=True)], "s", target="<= 1.6"),
        row(f"{turn}: plain TRL", [trl_turn(1)], "s"),
        row(f"delay of other groups by a tool of {long_s:g} s", delays, "%", target="<= 10"),
    ]


# --- A vLLM engine ----------------------------------------------------------------------------------------

TOKENS = 64  # that the model writes in a completion, in one turn or in two


def vllm_seconds(turns: int) -> Callable[[], float]:
    """Prompts, engine and tools of a worker, for completions of so many turns: seconds for 64 of them."""
    from async_grpo.rollout.engines.vllm import ENVIRONMENT

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from benchmarks.setups import facts
    from in_process import InProcessWorker, jobs_of

    from async_grpo.rollout.engines.continuous import ContinuousEngine
    from async_grpo.rollout.engines.vllm import VLLMEngine

    trainer = trainer_of(turns)
    engine = ContinuousEngine(VLLMEngine(trainer, seed=1), group_size=GROUP)
    trainer.max_completion_length = 4 * TOKENS  # the engine's limit is that of a turn
    worker = InProcessWorker(trainer, engine)
    jobs = jobs_of(list(facts.questions(held_out=False))[: 64 // GROUP], group_size=GROUP)

    def seconds() -> float:
        started = time.monotonic()
        groups = worker.generate(jobs)
        took = time.monotonic() - started
        masks = [mask for group in groups for mask in (group.tool_masks or [[1] * TOKENS] * GROUP)]
        assert [sum(mask) for mask in masks] == [TOKENS] * 64
        return took

    return seconds


def trainer_of(turns: int) -> Any:
    """With a random model of 1 M parameters, whose turns are all equally long."""
    from benchmarks.setups import facts
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = facts.build_tokenizer()
    shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "max_position_embeddings": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": len(tokenizer)}
    end = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    return GRPOTrainer(
        model=Qwen3ForCausalLM(Qwen3Config(**shape, **heads, **end)),
        processing_class=tokenizer,
        reward_funcs=[facts.called],
        tools=[quick] if turns > 1 else None,
        train_dataset=facts.questions(held_out=False),
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            num_generations=GROUP,
            per_device_train_batch_size=64,
            max_completion_length=TOKENS // turns,
            max_tool_calling_iterations=turns - 1 or None,
            generation_kwargs={"min_new_tokens": TOKENS // turns},
            report_to="none",
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
        ),
    )


def read_as_calls() -> None:
    """Have TRL read what is written before any result of a tool as a call of `quick`."""
    from benchmarks.setups import facts
    from trl.trainer import grpo_trainer

    def read(tokenizer: Any, ids: Any, prefix: Any = None) -> dict[str, Any]:
        answered = facts.TOOL in tokenizer.decode(prefix)
        call = {"type": "function", "function": {"name": "quick", "arguments": {"number": 1}}}
        return {"role": "assistant", "content": "", **({} if answered else {"tool_calls": [call]})}

    grpo_trainer.parse_response = read


def measured_on_vllm(repeats: int) -> list[Row]:
    read_as_calls()
    one, two = vllm_seconds(1), vllm_seconds(2)
    one(), two()  # warm-up
    pairs = [(one(), two()) for _ in range(repeats)]
    return [
        row("vLLM in a worker, one turn", [64 * TOKENS / alone for alone, _ in pairs], "tokens/s"),
        row("vLLM in a worker, a tool between two turns", [64 * TOKENS / tools for _, tools in pairs], "tokens/s"),
        row("with the tool against without", [alone / tools for alone, tools in pairs], "×", target=">= 0.9"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tool of 5 s in place of 30, fewer repeats")
    parser.add_argument("--vllm", action="store_true", help="tokens a second of a vLLM engine, and nothing else")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    load = os.getloadavg()
    if options.vllm:
        rows = measured_on_vllm(repeats=3 if options.quick else 9)
    else:
        rows = measured(long_s=5 if options.quick else 30, repeats=3 if options.quick else 5)
    print(as_text(rows))
    if options.json:
        write_json(options.json, rows, load_before=load)


if __name__ == "__main__":
    main()
