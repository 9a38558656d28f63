"""Facts of a setup file's trainer that are known without training it.

`python -m async_grpo.checks.plan.trainer_facts` builds the trainer, as only `get_trainer()` knows what it returns, and
answers them: a process of its own, so that a crash or a hang there is a sentence here, which needs no torch.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from async_grpo.checks import probe
from async_grpo.errors import AsyncGRPOError
from async_grpo.records import distinct
from async_grpo.redaction import Redactor
from async_grpo.roles.plain_trl import require_problems
from async_grpo.rundir.paths import RunDir
from async_grpo.rundir.run_plan import RunPlan
from async_grpo.rundir.shape import as_json, shaped
from async_grpo.setup.accelerate_config import DEEPSPEED, FSDP, AccelerateConfig
from async_grpo.setup.algorithm import gradients_besides, trained_besides
from async_grpo.setup.devices import CPU, check_torch_sees, hold_to_device
from async_grpo.setup.generator_choice import (
    HF,
    check_generator_options,
    choose_generator,
    refuse_own_server,
    wants_vllm,
)
from async_grpo.setup.grpo_config.batch import Batch, BatchError
from async_grpo.setup.imports import when_imported
from async_grpo.setup.needs import check_needs
from async_grpo.setup.setup_file import load_trainer

if TYPE_CHECKING:
    from torch import nn
    from trl import GRPOTrainer

    from async_grpo.training.sharding import CheckpointLayout

BUILD_TIMEOUT_S = 1800.0  # a large model is read from a slow disk
PROMPTS_MEASURED = 64
_FROM_CONFIG = (
    *("learning_rate", "loss_type", "beta", "temperature", "max_steps"),
    *("max_completion_length", "save_steps", "save_total_limit", "seed"),
)


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
    train_of_group: int | None = None  # completions of each group that are trained on; None: all
    tasks: str = ""  # of the rows, and of a batch, in words
    parts: str = ""  # of a step, which are more than one generation batch, in words
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
    module = "async_grpo.checks.plan.trainer_facts"
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
        AsyncGRPOError: with the text and the exit code of the real start.
    """
    if look.error:
        refusal = AsyncGRPOError(look.error)
        refusal.exit_code = look.exit_code
        raise refusal
    assert look.facts is not None
    return look.facts


def _environment(device: str) -> dict[str, str]:
    quiet = {"TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}
    env = {**quiet, **os.environ, "FAST_INFERENCE": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    hold_to_device(device, env)
    if device != CPU:
        env["ACCELERATE_USE_CPU"] = "true"  # the model stays in host memory: a run may be using the GPU's
    return env


# --- in the process that builds it


def main(data: dict[str, Any]) -> dict[str, Any]:
    question, facts = shaped(Question, data), None
    plan, settings = question.plan, question.plan.training
    try:
        check_torch_sees(plan.master_device)
        _change_arguments(ranks := AccelerateConfig.read(plan.launch.accelerate_config))
        trainer = load_trainer(
            plan.config,
            engine_here=False,
            to_describe=True,
            steps=settings.steps,
            seed=settings.seed,
            config_values=settings.set,
        )
        facts = replace(describe(trainer, plan), sharded_over=ranks.sharded_over)
        if question.distributed:
            facts = replace(facts, **_distributed(trainer, question, ranks))
        else:
            _check_alone(trainer, question)
    except AsyncGRPOError as error:
        batch = error.batch if isinstance(error, BatchError) else None
        return asdict(Look(facts=facts, error=str(error), exit_code=error.exit_code, batch=batch))
    return asdict(Look(facts=facts))


def _distributed(trainer: GRPOTrainer, question: Question, ranks: AccelerateConfig) -> dict[str, Any]:
    """Facts that only a distributed run decides. Raises where its start would refuse."""
    from async_grpo.training.before_start import refuse
    from async_grpo.training.sharding import refuse_publish_dtype
    from async_grpo.training.weight_publisher import slots_of

    plan, settings = question.plan, question.plan.training
    engine = choose_generator(plan.work.generator, trainer, on_gpu=plan.master_device != CPU)
    _refuse_first_fsdp(ranks, trainer)
    refuse_publish_dtype(settings.publish_dtype, sharded=ranks.shares_weights)
    refuse(trainer, settings, engine)
    check_generator_options(engine, plan.work, deterministic=settings.deterministic, workers=plan.num_workers)
    found = _checkpoints(trainer, question, ranks) if question.run_dir is not None else {}
    return {"generator": engine.name, "slots": slots_of(trainer.model, plan, engine), **found}


def _check_alone(trainer: GRPOTrainer, question: Question) -> None:
    """Raise where plain TRL in one process would refuse."""
    check_needs(trainer)
    require_problems(question.eval_every or 0, has_dataset=trainer.eval_dataset is not None)
    if question.serves:
        args = trainer.args
        refuse_own_server(use_vllm=wants_vllm(trainer), mode=args.vllm_mode, base_url=args.vllm_server_base_url)


def _change_arguments(ranks: AccelerateConfig) -> None:
    """In this process, which ends with its answer: make no `output_dir`, and count batches as each rank does."""
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks.processes // ranks.machines)

    def change(module: ModuleType) -> None:
        module.GRPOConfig.should_save = property(lambda self: False)
        module.GRPOConfig.world_size = property(lambda self: ranks.processes)

    when_imported("trl.trainer.grpo_config", change)  # when that is, is for the setup file to say


def _layout(ranks: AccelerateConfig, trainer: GRPOTrainer) -> CheckpointLayout:
    from async_grpo.training import sharding

    if ranks.kind == DEEPSPEED:
        return sharding.CheckpointLayout(sharding.DEEPSPEED, ranks.processes)
    return sharding.CheckpointLayout(sharding.FSDP) if ranks.kind == FSDP else sharding.layout_of(trainer)


def _refuse_first_fsdp(ranks: AccelerateConfig, trainer: GRPOTrainer) -> None:
    from async_grpo.training.sharding import fsdp_of_version_1

    if ranks.kind == FSDP and ranks.fsdp_version != 2 and not trainer.args.fsdp:  # else the GRPOConfig says the version
        raise fsdp_of_version_1()


def describe(trainer: GRPOTrainer, plan: RunPlan) -> TrainerFacts:
    """The facts of a built trainer. Changes nothing about it."""
    args = trainer.args
    batch = Batch.of(args)
    assert batch is not None, "TRL has checked it"
    return TrainerFacts(
        **{name: getattr(args, name) for name in _FROM_CONFIG},
        **_of_model(trainer),
        **_of_data(trainer),
        **_of_publishing(trainer, plan),
        trainer=type(trainer).__name__,
        rewards=distinct(trainer.reward_func_names),
        batch=batch,
        epochs=args.num_train_epochs,
        precision="bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        optimizer=str(getattr(args.optim, "value", args.optim)),
        gradient_checkpointing=bool(args.gradient_checkpointing),
        use_vllm=wants_vllm(trainer),
        vllm_share=args.vllm_gpu_memory_utilization if wants_vllm(trainer) else None,
        vllm_server=wants_vllm(trainer) and args.vllm_mode == "server",
        names_server=args.vllm_mode == "server" and args.vllm_server_base_url is not None,
        report_to=list(args.report_to or ()),
        output_dir=str(Path(args.output_dir).absolute()),
        save_strategy=str(getattr(args.save_strategy, "value", args.save_strategy)),
    )


def _of_model(trainer: GRPOTrainer) -> dict[str, Any]:
    from async_grpo.training.before_start import describe_parts, describe_tasks

    model = trainer.model
    return {
        "model": type(model).__name__,
        "model_name": Redactor()(str(getattr(model.config, "_name_or_path", "") or "")),
        "parameters": parameters_of(model),
        "trained_besides": trained_besides(trainer),
        "gradients_besides": gradients_besides(trainer),
        "tasks": describe_tasks(trainer),
        "parts": describe_parts(trainer),
        "reference_bytes": parameters_of(trainer.ref_model).nbytes if trainer.ref_model is not None else 0,
        "shape": shape_of(model),
        "context_length": getattr(model.config.get_text_config(), "max_position_embeddings", None),
    }


def _of_data(trainer: GRPOTrainer) -> dict[str, Any]:
    """Facts of the prompts, and of the tokenizer that reads them."""
    from async_grpo.training.schedule import groups_per_round

    dataset = trainer.train_dataset
    rows = len(dataset) if hasattr(dataset, "__len__") else None
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    longest, measured = _longest_prompt(trainer, tokenizer)
    return {
        "dataset_rows": rows,
        "epoch_rounds": None if rows is None else rows // groups_per_round(trainer),
        "padding_token": tokenizer.pad_token,
        "end_token": tokenizer.eos_token,
        "longest_prompt": longest,
        "prompts_measured": measured,
    }


def _of_publishing(trainer: GRPOTrainer, plan: RunPlan) -> dict[str, Any]:
    """How many versions and groups there will be at a time, and how versions are published."""
    from async_grpo.training.schedule import schedule_of
    from async_grpo.training.weight_publisher import slots_of

    settings = plan.training
    schedule = schedule_of(trainer, settings.max_staleness)
    return {
        "slots": slots_of(trainer.model, plan, HF),  # until the generator is known
        "groups_ahead": schedule.groups_ahead,
        "first_groups": schedule.lookahead().groups,
        "versions_within_round": schedule.versions_within_round,
        "published_in_bf16": settings.publish_dtype == "bf16",
        "published_in_host_memory": plan.weights == "host",
        "train_of_group": settings.train_of_group,
    }


def shape_of(model: nn.Module) -> Shape | None:
    """The dimensions that the rules of memory need; None for a model that is no dense decoder."""
    config = cast(Any, model.config).get_text_config()
    hidden, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if not hidden or not heads or experts:
        return None
    shape = {
        "layers": getattr(config, "num_hidden_layers", None),
        "hidden": hidden,
        "intermediate": getattr(config, "intermediate_size", None),
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or hidden // heads,
        "vocabulary": getattr(config, "vocab_size", None),
    }
    whole = all(isinstance(value, int) and value > 0 for value in shape.values())
    return Shape(**shape, element_bytes=next(model.parameters()).element_size()) if whole else None


def parameters_of(model: nn.Module) -> Parameters:
    """Counted by tensor, tied ones once."""
    every = list(model.parameters())
    trained = [parameter for parameter in every if parameter.requires_grad]
    dtypes: dict[str, int] = {}
    for parameter in every:
        name = str(parameter.dtype).removeprefix("torch.")
        dtypes[name] = dtypes.get(name, 0) + parameter.nbytes
    return Parameters(
        count=sum(p.numel() for p in every),
        trained=sum(p.numel() for p in trained),
        nbytes=sum(p.nbytes for p in every),
        trained_bytes=sum(p.nbytes for p in trained),
        dtypes=dtypes,
        buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
    )


def _longest_prompt(trainer: GRPOTrainer, tokenizer: Any) -> tuple[int | None, int]:
    """In tokens, of the first rows; (None, 0) where prompts cannot be measured so simply."""
    lengths = []
    for row in islice(trainer.train_dataset, PROMPTS_MEASURED):
        with suppress(Exception):  # a template that wants more than messages: the trainer will say, this is a hint
            lengths.append(_tokens(row.get("prompt"), tokenizer))
    return max(lengths, default=None), len(lengths)


def _tokens(prompt: Any, tokenizer: Any) -> int:
    if isinstance(prompt, str):
        return len(tokenizer(prompt)["input_ids"])
    ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=True)
    return len(ids["input_ids"])


def _checkpoints(trainer: GRPOTrainer, question: Question, ranks: AccelerateConfig) -> dict[str, Any]:
    """Where checkpoints go, which one a resume continues from, and what else is there.

    Raises:
        RunDirError: another run's are there, or those of the run to be resumed are not.
    """
    from async_grpo.archive import output_dir
    from async_grpo.training.checkpoints import check_checkpoint

    assert question.run_dir is not None
    setting, run = trainer.args.output_dir, RunDir(question.run_dir)
    state = run.read_state() if question.plan.training.resume else None
    found = output_dir.find_checkpoint(setting, state, question.run_dir) if state else None
    if found and state:
        check_checkpoint(trainer, state, found, _layout(ranks, trainer), run)
    folder, run_id = output_dir.absolute(setting, state, question.run_dir), state.run_id if state else ""
    output_dir.refuse_another_runs(folder, run_id, question.run_dir)
    return {
        "output_dir": str(folder),
        "resumes_from": str(found.path) if found else "",
        "other_checkpoints": output_dir.what_stays(folder, run_id),
    }


if __name__ == "__main__":
    probe.answer(main)
