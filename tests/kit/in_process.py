"""A whole asynchronous run in one process: no queue, no shared memory, only TRL and our hooks into it.

The trainer's rollouts come from a second copy of the user's trainer, made a rollout trainer, and pass through the
bytes of a job file on their way. Everything of a test's setup is here, too: tiny models, a tokenizer, tasks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_chat_template

from async_grpo.engines import Engine, PreparedGroup, SampledGroup
from async_grpo.engines.batch_engine import BatchEngine, Decoding
from async_grpo.queue.codec import decode_group, encode_group
from async_grpo.records import Job, RolloutGroup, Timings
from async_grpo.rollout.engine_choice import transformers_engine
from async_grpo.rollout.generation import Generation, generation
from async_grpo.rollout.trl_group import GeneratedGroup, GroupOutcome, to_record
from async_grpo.rollout.trl_trainer import RolloutTrainer
from async_grpo.settings import NO_PADDING
from async_grpo.setup.generator_choice import HF, STARTED_SERVER
from async_grpo.setup.replaced import note_originals
from async_grpo.setup.trl_compat import repair_trl
from async_grpo.setup.worker_build import built_for_a_worker
from async_grpo.telemetry.trainer_states import StateReader
from async_grpo.tokens import as_tokens
from async_grpo.training.corrections.fresh_batch import Bound
from async_grpo.training.corrections.rule import Rule, rule
from async_grpo.training.job_issuer import plain_fields
from async_grpo.training.prompts import prompt_rows
from async_grpo.training.reporting import StatesCallback
from async_grpo.training.rollout_metrics import RolloutMetrics
from async_grpo.training.schedule import groups_per_round
from async_grpo.training.trl_trainer import TrainingEvents, append_metric, make_async
from async_grpo.training.watch import Watch
from kit.recorded_batches import replaying

repair_trl()
note_originals()
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
transformers_logging.set_verbosity_error()

GROUP_SIZE = 2
DEADLINE_S = 120.0
TIMES = ("step_time", "perf/time_per_step", "perf/throughput")  # metrics that are no function of what was trained on
LAST_ENTRY = "train_runtime"  # a key of the last entry of a trainer's log history only

_PRINTABLE = [chr(code) for code in range(32, 127)] + ["\n"]


# --- A tiny model and its tokenizer -----------------------------------------------------------------------


def build_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """One token a character, and Qwen3's marks of turns."""
    vocabulary = {token: index for index, token in enumerate([*_PRINTABLE, "<pad>", "<|im_start|>", "<|im_end|>"])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    characters.decoder = decoders.Fuse()
    characters.add_special_tokens([AddedToken("<|im_start|>", special=True, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        padding_side="left",
        chat_template=chat_template,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0, **changes: Any) -> Qwen3ForCausalLM:
    """Random weights, large enough for its distributions not to be uniform."""
    settings: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "initializer_range": 0.3,
        "tie_word_embeddings": True,
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    config = Qwen3Config(**{**settings, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


# --- Tasks ------------------------------------------------------------------------------------------------

PROMPTS = ["a", "bc", "def?", "g h", "ij", "k", "lmnop", "q", "r s", "tuv", "wx", "y", "zz", "1+1"]


def plain_rows(count: int = len(PROMPTS)) -> Dataset:
    """`prompt` as text, and a column `target` for reward functions."""
    return Dataset.from_list([{"prompt": text, "target": len(text)} for text in PROMPTS[:count]])


def chat_rows(count: int = len(PROMPTS)) -> Dataset:
    """`prompt` as messages, and a column `target` for reward functions."""
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": text}], "target": len(text)} for text in PROMPTS[:count]]
    )


def text_of(completion: Any) -> str:
    """What the model wrote, of a plain or a conversational completion."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def letters(completions: list[Any], **_: Any) -> list[float]:
    """A reward that differs between random completions: the share of lower-case letters."""
    return [sum(c.islower() for c in text_of(x)) / max(1, len(text_of(x))) for x in completions]


def length(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(text_of(x))) for x in completions]


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first.
        b: The second.

    Returns:
        Their product.
    """
    return a * b


def config(output_dir: Path, config_class: type[GRPOConfig] = GRPOConfig, **changes: Any) -> GRPOConfig:
    """4 prompts of 2 completions a step, on the CPU, everything logged, unless `changes` say otherwise."""
    settings: dict[str, Any] = {
        "output_dir": str(output_dir),
        "max_steps": 2,
        "per_device_train_batch_size": 8,
        "num_generations": GROUP_SIZE,
        "max_completion_length": 8,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "adam_epsilon": 1e-5,  # or Adam's first step would turn a gradient's rounding error into a full step
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "seed": 3,
    }
    return config_class(**{**settings, **changes})


def build_trainer(
    output_dir: Path,
    *,
    model: Any = None,
    reward_funcs: Any = letters,
    train_dataset: Any = None,
    chat_template: str | None = None,
    trainer_class: type[GRPOTrainer] = GRPOTrainer,
    config_class: type[GRPOConfig] = GRPOConfig,
    arguments: dict[str, Any] | None = None,
    **changes: Any,
) -> GRPOTrainer:
    """A user's trainer, as their `get_trainer()` would build it.

    Args:
        arguments: of the trainer, e.g. `peft_config`.
        changes: of the `GRPOConfig`, e.g. `loss_type`.
    """
    tokenizer = build_tokenizer(chat_template)
    arguments = dict(arguments or {})
    if train_dataset is None and "environment_factory" not in arguments:
        train_dataset = plain_rows() if chat_template is None else chat_rows()
    return trainer_class(
        model=build_model(tokenizer) if model is None else model,
        processing_class=tokenizer,
        reward_funcs=list(reward_funcs) if isinstance(reward_funcs, list) else reward_funcs,  # TRL adds to it
        train_dataset=train_dataset,
        args=config(output_dir, config_class, **changes),
        **arguments,
    )


QWEN3_CHAT_TEMPLATE = qwen3_chat_template


# --- The run ----------------------------------------------------------------------------------------------


class InProcessWorker:
    """What a worker generates and scores with, without its queue and its weights.

    Args:
        engine: samples in place of the trainer's own model.
        states: what a server writes of each step.
    """

    def __init__(self, trainer: GRPOTrainer, engine: Engine | None = None, states: StateReader | None = None) -> None:
        self.trl = RolloutTrainer(trainer, states)
        self.calls: Generation = generation(self.trl, engine or transformers_engine(self.trl))

    def ended(self, wanted: int, jobs: Sequence[Job] = (), version: int = 0) -> list[GroupOutcome]:
        """Start the jobs, and step until so many groups have ended, in the order of their jobs."""
        deadline = time.monotonic() + DEADLINE_S
        self.calls.start(jobs, version)
        ended = self.calls.step()
        while len(ended) < wanted:
            assert time.monotonic() < deadline, "the engine does not come to an end"
            ended += self.calls.step()
        return sorted(ended, key=lambda outcome: outcome.job.seq)

    def generate(self, jobs: Sequence[Job], version: int = 0) -> list[GeneratedGroup]:
        """The groups of the jobs, not scored yet."""
        groups = []
        for outcome in self.ended(len(jobs), jobs, version):
            if outcome.error is not None:
                raise outcome.error
            assert outcome.group is not None
            groups.append(outcome.group)
        return groups

    def rollouts(self, jobs: Sequence[Job], version: int = 0) -> list[RolloutGroup]:
        return [
            to_record(group, self.trl.score([group])[0], attempt=0, worker="dev0", timings=Timings())
            for group in self.generate(jobs, version)
        ]


def jobs_of(rows: Iterable[dict[str, Any]], group_size: int = GROUP_SIZE) -> list[Job]:
    """A job for each row, numbered and seeded from 0."""
    return [
        Job(run_id="test", seq=seq, row=dict(row), num_generations=group_size, seed=seq, born_version=0, min_version=0)
        for seq, row in enumerate(rows)
    ]


class InProcessRun(TrainingEvents):
    """A trainer that takes its rollouts from workers, and one worker that works whenever it is asked to.

    Args:
        get_trainer: the user's.
        fresh_every: the worker adopts the newest weights once in this many batches; 1 is the synchronous schedule.
        engine: samples in place of the worker's model.
        correction: what is done about stale groups.
        fresh: how far trainer and sampler may be apart on fresh groups; None: nobody looks.
        padding: `none` of it is computed, or it is as in `trl`.
    """

    def __init__(
        self,
        get_trainer: Callable[[], GRPOTrainer],
        *,
        fresh_every: int = 1,
        engine: Engine | None = None,
        correction: str | Rule = "bypass",
        fresh: Bound | None = None,
        padding: str = NO_PADDING,
    ) -> None:
        self.trainer = get_trainer()
        with built_for_a_worker(1):
            self.worker: Any = get_trainer()
        states = Path(self.trainer.args.output_dir) / "trainer_states.jsonl"
        self.trainer.add_callback(StatesCallback(states))
        self._working = InProcessWorker(self.worker, engine, StateReader(states))
        self._fresh_every = fresh_every
        self._metrics = RolloutMetrics(partial(append_metric, self.trainer))
        self._rows = prompt_rows(self.trainer)
        self._watch = Watch(self.trainer, engine=HF, max_staleness=0)
        self._version = 0
        self._seq = 0
        self.batches: list[list[RolloutGroup]] = []  # what the trainer took, batch by batch
        self.inputs: list[dict[str, Any]] = []  # what the loss consumes, batch by batch
        self.versions: list[int] = []  # the trainer's, when it took the batch
        self.checkpoints: list[str] = []
        correction = correction if isinstance(correction, Rule) else rule(correction)
        make_async(self.trainer, self, correction=correction, fresh=fresh, padding=padding)
        self.trainer.correct = Recorded(self.trainer.correct, self._corrected)

    def train(self) -> InProcessRun:
        self.trainer.train()
        return self

    @property
    def logs(self) -> list[dict[str, Any]]:
        """One entry a training step."""
        return training_logs(self.trainer)

    @property
    def groups(self) -> list[RolloutGroup]:
        return [group for batch in self.batches for group in batch]

    def checkpoint_written(self, checkpoint: Path) -> None:
        self.checkpoints.append(checkpoint.name)

    def take_groups(self, version: int) -> Sequence[RolloutGroup]:
        if len(self.batches) % self._fresh_every == 0:
            copy_weights(self.trainer, self.worker)
            self._version = version
        with torch.random.fork_rng(devices=[]):  # a worker's randomness is not the trainer's
            torch.manual_seed(len(self.batches))
            groups = self._generate()
        self.batches.append(groups)
        self.versions.append(version)
        self._metrics.waited(0.0)
        self._metrics.batch_taken(groups, version)
        return groups

    def _generate(self) -> list[RolloutGroup]:
        jobs = [self._next_job() for _ in range(groups_per_round(self.trainer))]
        groups = self._working.rollouts(jobs, self._version)
        return [decode_group(encode_group(group)) for group in groups]

    def _next_job(self) -> Job:
        self._seq += 1
        return Job(
            run_id="in-process",
            seq=self._seq - 1,
            row=next(self._rows),
            num_generations=self.trainer.num_generations,
            seed=self._seq,
            born_version=self._version,
            min_version=0,
            sampling=self._watch.sampling(),
            trainer_state=plain_fields(self.trainer.state),
        )

    def _corrected(self, batch: dict[str, Any]) -> None:
        self.inputs.append(dict(batch))


class Recorded:
    """A correction that also shows each corrected batch."""

    def __init__(self, correction: Any, show: Callable[[dict[str, Any]], None]) -> None:
        self._correction, self._show = correction, show

    def __getattr__(self, name: str) -> Any:
        return getattr(self._correction, name)

    def __call__(self, batch: dict[str, Any]) -> None:
        self._correction(batch)
        self._show(batch)


def copy_weights(source: GRPOTrainer, target: GRPOTrainer) -> None:
    target.model.load_state_dict(source.model.state_dict())


def training_logs(trainer: GRPOTrainer) -> list[dict[str, Any]]:
    """The logged training steps, without evaluations and without the summary at the end."""
    history = trainer.state.log_history
    return [entry for entry in history if "loss" in entry and LAST_ENTRY not in entry]


def replay_with_trl(get_trainer: Callable[..., GRPOTrainer], batches: list[list[RolloutGroup]]) -> GRPOTrainer:
    """Train with plain TRL in one process on recorded completions, given to it by its public `rollout_func`.

    The prompts, their order and the rewards are TRL's own; that the prompts are the recorded ones is checked.
    """
    recorded = iter(batches)
    trainer = get_trainer(arguments={"rollout_func": replaying(recorded)})
    trainer.train()
    assert next(recorded, None) is None, "TRL used fewer batches than the asynchronous run"
    return trainer


class ScriptedGenerator:
    """Writes what a function of the prompt's text and its index in the batch says, instead of sampling."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, reply: Callable[[str, int], str]) -> None:
        self._tokenizer = tokenizer
        self._reply = reply

    def generate(self, prompt_ids: Sequence[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
        texts = [
            self._reply(self._tokenizer.decode(ids), index) + self._tokenizer.eos_token
            for index, ids in enumerate(prompt_ids)
        ]
        completion_ids = [self._tokenizer(text)["input_ids"] for text in texts]
        return completion_ids, [[-3.0] * len(ids) for ids in completion_ids]


class ScriptedEngine(BatchEngine):
    """Samples what a `ScriptedGenerator` writes."""

    capabilities = STARTED_SERVER

    def __init__(self, script: ScriptedGenerator) -> None:
        super().__init__(most_groups=8)
        self._script = script

    def follow(self, weights: Any) -> Any:
        raise AssertionError("nobody asks for weights")

    def _decode(self, groups: Sequence[PreparedGroup]) -> Decoding:
        completions = iter(as_tokens(*self._script.generate([ids for group in groups for ids in group.prompt_ids])))
        for group in groups:  # the index in the batch is counted over all of them, as in TRL
            yield [SampledGroup(prepared=group, tokens=[next(completions) for _ in group.prompt_ids])]
