"""What waiting tools cost: a turn of 16 completions that call a tool of one second, and one tool of 30 seconds.

The model is a script, so that the time is that of the tools and of what is around them. In one process, no queue.

    python benchmarks/tools.py [--quick] [--json FILE]
    .venv-vllm/bin/python benchmarks/tools.py --vllm      turns with a tool between them against one turn, with vLLM
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.table import ROOT, Row, as_text, row, write_json

sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

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

    most_groups = 64

    def __init__(self, script: Any) -> None:
        from async_grpo.setup.generator_choice import VLLM

        self._script, self.capabilities = script, VLLM

    def sample(self, new: Sequence[Any]) -> list[Any]:
        from async_grpo.engines import SampledGroup
        from async_grpo.tokens import as_tokens

        return [SampledGroup(prepared=turn, tokens=as_tokens(*self._script.generate(turn.prompt_ids))) for turn in new]

    def follow(self, weights: Any) -> Any: ...

    def close(self) -> None: ...


def setting(folder: str, tools: list[Any], reply: Callable[[str, int], str], *, streaming: bool) -> tuple[Any, Any]:
    """A worker with these tools, and the trainer that it was made of."""
    from kit.in_process import InProcessWorker
    from kit.scripted import ScriptedEngine, ScriptedGenerator
    from kit.tiny_trainer import QWEN3_CHAT_TEMPLATE, build_trainer, length

    given = {"chat_template": QWEN3_CHAT_TEMPLATE, "reward_funcs": [length], "max_completion_length": 400}
    trainer = build_trainer(Path(folder), arguments={"tools": tools}, num_generations=GROUP, **given)
    script = ScriptedGenerator(reply)
    return InProcessWorker(trainer, Streaming(script) if streaming else ScriptedEngine(script)), script


def calling(name: str) -> Callable[[str, int], str]:
    return lambda prompt, index: "done" if "<tool_response>" in prompt else CALL.replace("NAME", name)


def a_turn(kind: str, seconds: float, *, streaming: bool) -> float:
    """Seconds for 16 completions that call a tool once."""
    from kit.in_process import jobs_of
    from kit.tiny_trainer import chat_rows

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
    from kit.tiny_trainer import chat_rows

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


class Others:
    """A worker that makes groups, while a tool of one more group waits so many seconds; 0: it has no such group."""

    def __init__(self, folder: str, seconds: float) -> None:
        from kit.in_process import jobs_of
        from kit.tiny_trainer import chat_rows

        def reply(prompt: str, index: int) -> str:
            if "<tool_response>" in prompt:
                return "done"
            return CALL.replace("NAME", "waits" if "\na<|im_end|>" in prompt else "quick")

        self._rows = list(chat_rows())
        self._worker, _ = setting(folder, [tool_of(seconds, "plain"), quick], reply, streaming=True)
        if seconds:
            self._worker.calls.start(jobs_of(self._rows[:1], group_size=1), 0)
            self._worker.calls.step()

    def group(self, number: int) -> float:
        """Seconds of one group."""
        from kit.in_process import jobs_of

        started = time.monotonic()
        (job,) = jobs_of(self._rows[1 + number % 10 : 2 + number % 10], group_size=GROUP)
        self._worker.calls.start([job], 0)
        while not self._worker.calls.step():
            pass
        return time.monotonic() - started

    def close(self) -> None:
        self._worker.calls.close()


def delay_of_others(seconds: float, groups: int) -> float:
    """Percent by which groups take longer beside the tool; each beside it is followed by one without it."""
    took: dict[float, list[float]] = {seconds: [], 0: []}
    with tempfile.TemporaryDirectory() as folder:
        workers = {side: Others(f"{folder}/{side}", side) for side in took}
        started = time.monotonic()
        for number in range(-2, groups):
            for side in list(took)[:: 1 if number % 2 else -1]:
                one = workers[side].group(number)
                took[side] += [one] if number >= 0 else []  # the first ones load what is loaded once
        assert time.monotonic() - started < seconds, "the tool has to wait until the last group has ended"
        for worker in workers.values():
            worker.close()
    return 100 * (statistics.median(took[seconds]) / statistics.median(took[0]) - 1)


def measured(*, long_s: float, repeats: int) -> list[Row]:
    groups = int(4 * long_s)
    delays = [delay_of_others(long_s, groups) for _ in range(repeats)]
    turn = f"a turn of {COMPLETIONS} completions that call a tool of 1 s"
    return [
        row(f"{turn}: async", [a_turn("async", 1, streaming=False) for _ in range(repeats)], "s", target="<= 1.6"),
        row(f"{turn}: thread_safe", [a_turn("thread_safe", 1, streaming=False)], "s", target="<= 1.6"),
        row(f"{turn}: thread_safe, streaming", [a_turn("thread_safe", 1, streaming=True)], "s", target="<= 1.6"),
        row(f"{turn}: plain TRL", [trl_turn(1)], "s"),
        row(
            f"delay of other groups by a tool of {long_s:g} s",
            delays,
            "%",
            target="<= 10",
            note=f"the median of {groups} groups beside it against that of {groups} without it, in turn",
        ),
    ]


# --- A vLLM engine ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A random model of Qwen3's shape, and what it writes: so many completions, of so many turns or of one."""

    layers: int
    hidden: int
    heads: int
    completions: int
    turns: int
    tokens: int  # of a completion

    @property
    def all_tokens(self) -> int:
        return self.completions * self.tokens


SIZES = (
    Size(layers=4, hidden=128, heads=4, completions=64, turns=2, tokens=64),  # 1 M parameters
    Size(layers=12, hidden=768, heads=12, completions=16, turns=3, tokens=96),  # 86 M
    Size(layers=12, hidden=768, heads=12, completions=16, turns=3, tokens=384),
)


class OnVLLM:
    """Prompts, engine and tools of a worker, for completions of so many turns.

    Args:
        engine: of the other side. Two engines differ by some percent, by where their memory happens to lie.
    """

    def __init__(self, size: Size, turns: int, engine: Any = None) -> None:
        from benchmarks.setups import facts

        from async_grpo.engines.continuous import ContinuousEngine
        from async_grpo.engines.vllm import VLLMEngine
        from async_grpo.engines.vllm_options import sampling_options
        from async_grpo.engines.vllm_sampling import parameters
        from kit.in_process import InProcessWorker, jobs_of

        self._size = size
        trainer = trainer_of(size, turns)
        self.engine = engine or VLLMEngine(trainer, seed=1)
        self._sampling = parameters(sampling_options(trainer), every_token=False)
        trainer.max_completion_length = 4 * size.tokens  # the engine's limit is that of a turn
        self._worker = InProcessWorker(trainer, ContinuousEngine(self.engine, group_size=GROUP))
        self._jobs = jobs_of(list(facts.questions(held_out=False))[: size.completions // GROUP], group_size=GROUP)
        self.parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
        self.read = 0  # tokens that the tools wrote into a completion
        self.computed = 0  # tokens of prompts that were not in vLLM's cache

    def seconds(self) -> tuple[float, float]:
        """Those of the clock, and of the process on its core: other work on the machine does not count in them."""
        self.engine._sampling = self._sampling
        started, began = time.monotonic(), time.process_time()
        with self._counting():
            groups = self._worker.generate(self._jobs)
        took = time.monotonic() - started, time.process_time() - began
        masks = [tokens.mask for group in groups for tokens in group.tokens]
        assert [sum(mask) for mask in masks] == [self._size.tokens] * self._size.completions
        self.read = round(statistics.mean(len(mask) for mask in masks)) - self._size.tokens
        return took

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Count the prompt tokens that vLLM has to compute."""
        vllm, self.computed = self.engine._engine, 0
        step = vllm.step

        def counting() -> list[Any]:
            outputs: list[Any] = step()
            self.computed += sum(len(one.prompt_token_ids) - one.num_cached_tokens for one in outputs if one.finished)
            return outputs

        vllm.step = counting
        yield
        vllm.step = step


def trainer_of(size: Size, turns: int) -> Any:
    """With a random model, whose turns are all equally long."""
    import torch
    from benchmarks.setups import facts
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = facts.build_tokenizer()
    shape = {"hidden_size": size.hidden, "intermediate_size": 3 * size.hidden, "num_hidden_layers": size.layers}
    heads = {"num_attention_heads": size.heads, "num_key_value_heads": size.heads // 2, "vocab_size": len(tokenizer)}
    length = {"head_dim": size.hidden // size.heads, "max_position_embeddings": 1024}
    end = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    torch.manual_seed(0)
    return GRPOTrainer(
        model=Qwen3ForCausalLM(Qwen3Config(**shape, **heads, **length, **end)),
        processing_class=tokenizer,
        reward_funcs=[facts.called],
        tools=[quick] if turns > 1 else None,
        train_dataset=facts.questions(held_out=False),
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            num_generations=GROUP,
            per_device_train_batch_size=size.completions,
            max_completion_length=size.tokens // turns,
            max_tool_calling_iterations=turns - 1 or None,
            generation_kwargs={"min_new_tokens": size.tokens // turns},
            report_to="none",
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
        ),
    )


def read_as_calls() -> None:
    """Have TRL find a call of `quick` in every message; a completion's last one is left by the limit of turns."""
    from trl.trainer import grpo_trainer

    really = grpo_trainer.parse_response
    call = {"type": "function", "function": {"name": "quick", "arguments": {"number": 1}}}

    def read(tokenizer: Any, ids: Any, prefix: Any = None) -> dict[str, Any]:
        return {**really(tokenizer, ids, prefix=prefix), "tool_calls": [call]}

    grpo_trainer.parse_response = read


def measured_on_vllm(size: Size, repeats: int) -> list[Row]:
    one_turn = OnVLLM(size, 1)
    sides = one_turn, OnVLLM(size, size.turns, one_turn.engine)
    rounds = []
    for number in range(repeats + 1):
        order = sides if number % 2 else sides[::-1]
        took = {side: side.seconds() for side in order}
        rounds.append((took[sides[0]], took[sides[1]]))
    rounds = rounds[1:]  # the first one is the warm-up
    name = f"vLLM in a worker, {sides[0].parameters / 1e6:.0f} M parameters, {size.tokens} tokens"
    what = f"{size.completions} completions of {size.tokens} tokens"
    prompts = [f"vLLM computed {side.computed / size.completions:.0f} prompt tokens of each" for side in sides]
    read = f"{what}, which read {sides[1].read} more that the tools wrote; {prompts[1]}"
    turns = f"a tool between each of {size.turns} turns"
    rows = [
        row(
            f"{name}, one turn",
            [size.all_tokens / one for (one, _), _ in rounds],
            "tokens/s",
            note=f"{what}; {prompts[0]}",
        ),
        row(f"{name}, {turns}", [size.all_tokens / several for _, (several, _) in rounds], "tokens/s", note=read),
    ]
    for index, clock in enumerate(("", ", by CPU time")):
        ratios = [one[index] / several[index] for one, several in rounds]
        rows.append(row(f"{name}, with the tool against without{clock}", ratios, "×", target=">= 0.9"))
    one_turn.engine.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tool of 5 s in place of 30, fewer repeats")
    parser.add_argument("--vllm", action="store_true", help="tokens a second of a vLLM engine, and nothing else")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    load = os.getloadavg()
    if options.vllm:
        from async_grpo.engines.vllm import ENVIRONMENT

        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        read_as_calls()
        rows = [one for size in SIZES for one in measured_on_vllm(size, repeats=3 if options.quick else 5)]
    else:
        rows = measured(long_s=5 if options.quick else 30, repeats=3 if options.quick else 5)
    print(as_text(rows))
    if options.json:
        write_json(options.json, rows, load_before=load)


if __name__ == "__main__":
    main()
