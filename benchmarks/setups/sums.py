"""The demo's sums with answers of a given length and a reward that may be slow: what `async_vs_trl.py` trains.

Everything that a side of the comparison does, it does through this file, in plain TRL and in our processes alike. The
setting comes from `$BENCH_SETTING` (JSON), the record of the run goes to `$BENCH_RECORD`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from async_grpo.training import padding

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src" / "app"))
import trainer_setup_tiny

tiny = trainer_setup_tiny  # its model and problems, for the benchmarks too

DIGITS = tiny.ANSWER_DIGITS
FILLER = tiny.SYMBOLS.index("=")  # token id of what long answers go on with
WARM_UP_STEPS = 3  # not timed: first kernels, first rollouts
SNAPSHOT_EVERY = 2  # steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One workload. `as_env` and `from_env` carry it to the processes of a run."""

    prompts: int = 16  # a step
    generations: int = 8  # a prompt
    answer_tokens: int | None = None  # of every answer, end of text included; None: as the model likes
    long_share: float = 0.0  # of the answers are `LONGER` times as long
    steps: int = 20
    num_iterations: int = 1  # optimizer steps on each batch
    micro_batches: int = 1  # a step
    as_they_come: bool = False  # a generation batch is one of them, so that each begins with the groups that are there
    learning_rate: float = 4e-4
    loss_type: str = "dapo"  # TRL's default
    seed: int = 42
    reward_call_s: float = 0.0  # that each call of the reward function sleeps ...
    reward_item_s: float = 0.0  # ... and each completion in it
    server_threads: int | None = None  # of the training process, once training begins; None: as it was started
    unpadded: bool = False  # TRL's training step computes no padding
    accuracy: bool = False  # keep snapshots, and measure their held-out accuracy after the run

    def as_env(self) -> dict[str, str]:
        return {"BENCH_SETTING": json.dumps(asdict(self))}

    @classmethod
    def from_env(cls) -> Setting:
        return cls(**json.loads(os.environ["BENCH_SETTING"]))


LONGER = 8


# --- Answers of a given length ----------------------------------------------------------------------------


class AnswerLengths(LogitsProcessor):
    """Three digits, then filler, then end of text where the answer's length is reached.

    Which answers are long depends on the prompt's tokens and the answer's index in its group only, so that every side
    generates the same lengths, whatever it batches together.
    """

    def __init__(self, prompts_BP: torch.Tensor, eos: int, setting: Setting) -> None:
        assert setting.answer_tokens is not None
        self._prompt_length = prompts_BP.shape[1]
        self._eos = eos
        self.lengths_B = torch.full((len(prompts_BP),), setting.answer_tokens)
        for row, prompt in enumerate(prompts_BP.tolist()):
            if _is_long(prompt, row % setting.generations, setting.long_share):
                self.lengths_B[row] *= LONGER

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        position = input_ids.shape[1] - self._prompt_length
        scores[:, self._eos] = -torch.inf
        if position >= DIGITS:
            ends_B = position == self.lengths_B - 1
            scores.fill_(-torch.inf)
            scores[~ends_B, FILLER] = 0.0
            scores[ends_B, self._eos] = 0.0
        return scores


def _is_long(prompt: list[int], position: int, share: float) -> bool:
    number = 0
    for token in (position, *prompt[-6:]):  # a hash; the last 6 tokens are the prompt without padding
        number = (number * 1_000_003 + token + 17) % 2_147_483_647
    return number % 1000 < 1000 * share


class LengthControlledModel(Qwen3ForCausalLM):
    """Adds `AnswerLengths` to what both TRL and our worker call: `generate`."""

    setting: Setting

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        if self.setting.answer_tokens is not None:
            lengths = AnswerLengths(kwargs["input_ids"], self.config.eos_token_id, self.setting)
            given = kwargs.pop("logits_processor", None) or []
            kwargs["logits_processor"] = LogitsProcessorList([*given, lengths])  # ours last: log-probs are the model's
        return super().generate(*args, **kwargs)


# --- Held-out accuracy ------------------------------------------------------------------------------------


@torch.no_grad()
def held_out_accuracy(model: Any, tokenizer: Any) -> float:
    """The expected accuracy of an answer sampled at temperature 1, exactly: no sampling, so no sampling error."""
    rows = tiny.as_dataset(tiny.split_problems()[1])
    prompts = torch.tensor(tokenizer(list(rows["prompt"]))["input_ids"])
    answers = torch.tensor(tokenizer(list(rows["answer"]))["input_ids"])
    logits = model(torch.cat([prompts, answers[:, :-1]], dim=1), use_cache=False).logits
    logprobs = logits[:, prompts.shape[1] - 1 :].float().log_softmax(-1)
    return float(logprobs.gather(2, answers[:, :, None])[:, :, 0].sum(1).exp().mean())


# --- The record -------------------------------------------------------------------------------------------


def processes_of_this_run() -> dict[str, list[int]]:
    """Process ids by role: the first word after `async_grpo.cli` on the command line, e.g. `server`; else `ray`."""
    mark = f"BENCH_RECORD={os.environ['BENCH_RECORD']}".encode()
    found: dict[str, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark in path.read_bytes().split(b"\0"):
                words = (path.parent / "cmdline").read_text().split("\0")
                role = words[words.index("async_grpo.cli") + 1] if "async_grpo.cli" in words else "ray"
                found.setdefault(role, []).append(int(path.parent.name))
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of a process, from its CPU clock (see clock_getcpuclockid(3)); 0 if gone."""
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


class Recorder(TrainerCallback):
    """When each step ended, on the machine's monotonic clock; accuracies are measured after the last one."""

    def __init__(self, trainer: GRPOTrainer, setting: Setting, path: Path) -> None:
        self._trainer, self._setting, self._path = trainer, setting, path
        self._ends: list[float] = []
        self._cpu: dict[str, list[float]] = {}  # role -> CPU seconds that its processes used until each step's end
        self._processes: dict[str, list[int]] = {}
        self._snapshots: dict[int, dict[str, torch.Tensor]] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._setting.server_threads is not None:
            torch.set_num_threads(self._setting.server_threads)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._ends.append(time.monotonic())
        if len(self._ends) <= WARM_UP_STEPS:  # a worker may still come
            self._processes = processes_of_this_run()
        for role, processes in self._processes.items():
            earlier = self._cpu.setdefault(role, [0.0] * (len(self._ends) - 1))
            earlier.append(sum(map(cpu_seconds, processes)))
        last = state.global_step == state.max_steps
        if self._setting.accuracy and (last or state.global_step % SNAPSHOT_EVERY == 0):
            weights = self._trainer.model.state_dict()
            self._snapshots[state.global_step] = {name: tensor.clone() for name, tensor in weights.items()}

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model, accuracy = self._trainer.model, {}
        for step, weights in self._snapshots.items():
            model.load_state_dict(weights)
            accuracy[step] = held_out_accuracy(model, self._trainer.processing_class)
        self._path.write_text(json.dumps({"step_ends": self._ends, "cpu_s": self._cpu, "accuracy": accuracy}))


# --- The trainer ------------------------------------------------------------------------------------------


def reward(setting: Setting) -> Any:
    """1 for the right three digits; sleeps first, as an API would make one wait."""

    def accuracy(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        pause = setting.reward_call_s + setting.reward_item_s * len(completions)
        if pause:
            time.sleep(pause)
        return [float(completion[:DIGITS] == right) for completion, right in zip(completions, answer, strict=True)]

    return accuracy


class Unpadded(padding.Unpadded, GRPOTrainer):
    """What a user may write to have it in plain TRL."""


def get_trainer() -> GRPOTrainer:
    setting = Setting.from_env()
    tokenizer = tiny.build_tokenizer()
    model = tiny.build_model(tokenizer)
    model.__class__ = LengthControlledModel
    model.setting = setting
    longest = setting.answer_tokens or DIGITS + 1
    trainer = (Unpadded if setting.unpadded else GRPOTrainer)(
        model=model,
        processing_class=tokenizer,
        reward_funcs=[reward(setting)],
        train_dataset=tiny.as_dataset(tiny.split_problems()[0]),
        args=GRPOConfig(
            output_dir=os.environ["BENCH_RECORD"] + ".outputs",
            max_steps=setting.steps,
            per_device_train_batch_size=setting.prompts * setting.generations // setting.micro_batches,
            gradient_accumulation_steps=setting.micro_batches,
            steps_per_generation=1 if setting.as_they_come else setting.micro_batches,
            num_generations=setting.generations,
            num_iterations=setting.num_iterations,
            max_completion_length=longest * (LONGER if setting.long_share else 1),
            temperature=1.0,
            learning_rate=setting.learning_rate,
            loss_type=setting.loss_type,
            lr_scheduler_type="linear",
            warmup_steps=5,
            seed=setting.seed,
            eval_strategy="no",
            save_strategy="no",
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
        ),
    )
    trainer.add_callback(Recorder(trainer, setting, Path(os.environ["BENCH_RECORD"])))
    return trainer
