"""Facts of a setup file's trainer that are known without training it. Torch-free: a child process looks.

The child builds the trainer, because only `get_trainer()` knows what it returns; its crash or its hanging is then
a sentence here.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path

from async_grpo.checks import probe
from async_grpo.errors import AsyncGRPOError
from async_grpo.rundir.plan import RunPlan
from async_grpo.rundir.shape import as_json, shaped
from async_grpo.setup.devices import CPU, hold_to_device
from async_grpo.setup.grpo_config.batch import Batch

BUILD_TIMEOUT_S = 1800.0  # a large model is read from a slow disk


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """How much a model's parameters are, in numbers and bytes."""

    count: int
    trained: int
    nbytes: int  # of all, as they are
    trained_bytes: int
    dtypes: dict[str, int]  # e.g. {"bfloat16": bytes}
    buffer_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Dimensions of a dense decoder, as its configuration says."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    element_bytes: int  # of a weight


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFacts:
    """A built trainer, described."""

    trainer: str  # class
    model: str  # class
    model_name: str  # path or hub name; empty for one that was made in code
    parameters: Parameters
    reference_bytes: int  # of the reference model, 0 without one
    slots: int  # versions of the published weights, at a time
    precision: str  # bf16, fp16 or fp32
    optimizer: str
    learning_rate: float
    loss_type: str
    beta: float
    temperature: float
    use_vllm: bool  # the setup file asks for it
    batch: Batch
    max_steps: int  # 0 or less: `epochs` counts
    epochs: float
    dataset_rows: int | None  # None: streamed
    rewards: list[str]
    padding_token: str | None
    end_token: str | None
    max_completion_length: int | None
    context_length: int | None  # what the model's configuration says
    longest_prompt: int | None  # in tokens, of the first `prompts_measured`
    prompts_measured: int
    output_dir: str
    save_strategy: str
    save_steps: float
    seed: int
    epoch_rounds: int | None = None  # whole generation batches in the dataset
    groups_ahead: int = 0  # most groups that the staleness bound can use
    first_groups: int = 0  # kept under way at first
    versions_within_round: int = 0  # how much older a rollout is in the last optimizer step on its batch
    vllm_server: bool = False  # the setup file generates with a vLLM server
    names_server: bool = False  # it says where that server is
    report_to: list[str] = field(default_factory=list)
    save_total_limit: int | None = None
    generator: str = "hf"  # what the workers of a distributed run generate with: the name of a `Capabilities`
    resumes_from: str = ""  # checkpoint, under --resume
    other_checkpoints: str = ""  # a sentence about those in output_dir that are not this run's
    shape: Shape | None = None  # None: a mixture of experts, or another model that is no dense decoder
    gradient_checkpointing: bool = True
    sharded_over: int = 1  # processes that share the trainer's weights, gradients and optimizer state
    published_in_bf16: bool = False  # --publish-dtype bf16
    published_in_host_memory: bool = False  # --weights host: a GPU holds none of what is published
    trained_besides: int = 0  # numbers of a critic
    gradients_besides: int = 0  # of the whole model, beside TRL's
    tasks: str = ""  # of the rows, and of a batch, in words
    vllm_share: float | None = None  # of a GPU's memory, for weights, keys and values; None: not with vLLM

    @property
    def steps(self) -> int | None:
        """Optimizer steps of the whole training; None where only the data's end would tell."""
        if self.max_steps > 0:
            return self.max_steps
        if self.epoch_rounds is None:
            return None
        passes = self.epoch_rounds * self.batch.passes
        return math.ceil(self.epochs * max(1, -(-passes // self.batch.gradient_accumulation_steps)))

    @property
    def rounds(self) -> int | None:
        """Generation batches that these steps consume."""
        steps = self.steps
        return None if steps is None else -(-steps * self.batch.gradient_accumulation_steps // self.batch.passes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The child's answer. Without `facts` there is no trainer, and `error` says why."""

    facts: TrainerFacts | None = None
    error: str = ""  # a real start would refuse with this text
    exit_code: int = 0  # and this code
    batch: Batch | None = None  # of a configuration that TRL refused


class RefusedError(AsyncGRPOError):
    """A real start would refuse with this very text."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Which trainer to look at, and for what run."""

    plan: RunPlan  # the child sees the server's device, but the trainer leaves its model in host memory
    distributed: bool = True  # what cannot run distributed is an error
    run_dir: Path | None = None  # whose checkpoints a resume is about
    eval_every: int | None = None  # in one process; None: as the setup file says
    serves: bool = False  # a vLLM server is started for TRL in one process


def look_at_trainer(question: Question, timeout_s: float = BUILD_TIMEOUT_S) -> Look:
    """Build the trainer in a child process and describe it."""
    env = _environment(question.plan.master_device)
    module = "async_grpo.checks.plan.describe"
    try:
        found = probe.ask(module, as_json(question), timeout_s=timeout_s, env=env)
    except probe.ChildFailed as failure:
        said = "\n".join(failure.said) or "(none)"
        what = f"The process that called get_trainer() in {question.plan.config} {failure.how}"
        return Look(error=f"{what}. Its last words:\n{said}", exit_code=2)
    return shaped(Look, found)


def facts_or_refusal(look: Look) -> TrainerFacts:
    """The facts of a trainer that a real start would take.

    Raises:
        RefusedError: with the text and the exit code of the real start.
    """
    if look.error:
        raise RefusedError(look.error, look.exit_code)
    assert look.facts is not None
    return look.facts


def _environment(device: str) -> dict[str, str]:
    env = dict(os.environ)
    hold_to_device(device, env)
    if device != CPU:
        env["ACCELERATE_USE_CPU"] = "true"  # the model stays in host memory: a run may be using the GPU's
    env["FAST_INFERENCE"] = "0"
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    env.setdefault("TOKENIZERS_PARALLELISM", "false")
    env.setdefault("TQDM_DISABLE", "1")
    return env
