"""`python -m async_grpo.checks.plan.describe REQUEST`: builds a trainer and writes down what it is. See `facts`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_grpo.checks.plan.facts import BatchFacts, Parameters, TrainerFacts
from async_grpo.errors import AsyncGRPOError, SetupFileError
from async_grpo.settings import TrainingSettings
from async_grpo.setup.devices import CPU, check_torch_sees
from async_grpo.setup.generator_choice import VLLM_SERVER, choose_generator, refuse_with_server, wants_vllm

if TYPE_CHECKING:
    from torch import nn
    from trl import GRPOTrainer

PROMPTS_MEASURED = 64


def main(request: dict[str, Any]) -> None:
    settings = TrainingSettings(**request["settings"])
    answer: dict[str, Any] = {"facts": None, "error": "", "exit_code": 0, "batch": None}
    try:
        check_torch_sees(request["device"])
        if request["accelerate_config"]:
            _count_processes(request["accelerate_config"])
        with _no_new_folders():
            trainer = _build(Path(request["config"]), settings)
        answer["facts"] = describe(trainer, settings, request["sharing"]).as_json()
        if request["distributed"]:
            from async_grpo.training.loop import refuse

            refuse(trainer, settings)
            on_gpu = request["device"] != CPU
            generator = choose_generator(request["generator"], trainer, on_gpu=on_gpu)
            if generator == VLLM_SERVER:
                refuse_with_server(workers=request["workers"], deterministic=settings.deterministic)
            answer["facts"]["generator"] = generator
            if settings.resume:
                answer["facts"]["resumes_from"] = _checkpoint(trainer, Path(request["run_dir"]))
    except AsyncGRPOError as error:
        answer.update(error=str(error), exit_code=error.exit_code)
        if isinstance(error, SetupFileError):
            answer["batch"] = _batch_refused_by_trl(error)
    Path(request["answer"]).write_text(json.dumps(answer))


def _build(config: Path, settings: TrainingSettings) -> GRPOTrainer:
    from transformers import Trainer

    from async_grpo.roles.parameter_server import apply_overrides
    from async_grpo.setup.setup_file import check_setup_file, load_trainer

    check_setup_file(config)
    Trainer.init_hf_repo = lambda self, token=None: None  # a plan makes no repository for push_to_hub
    trainer = load_trainer(config, engine_here=False)
    apply_overrides(trainer, steps=settings.steps, seed=settings.seed)
    return trainer


def _count_processes(accelerate_config: str) -> None:
    """Let TRL do its arithmetic of batches as in each of the processes that there will be."""
    from accelerate.commands.config.config_args import load_config_from_file
    from transformers import TrainingArguments

    processes = int(load_config_from_file(accelerate_config).num_processes)
    TrainingArguments.world_size = property(lambda self: processes)


def describe(trainer: GRPOTrainer, settings: TrainingSettings, sharing: int | None = None) -> TrainerFacts:
    """The facts of a built trainer. Changes nothing about it.

    Args:
        sharing: workers on the server's device; None: nobody knows.
    """
    from async_grpo.training.loop import schedule_of
    from async_grpo.training.schedule import Lookahead
    from async_grpo.training.trl_trainer import groups_per_round, is_adapter
    from async_grpo.training.weight_publisher import slots_for

    args = trainer.args
    model = trainer.model
    rows = len(trainer.train_dataset) if hasattr(trainer.train_dataset, "__len__") else None
    schedule = schedule_of(trainer, settings.max_staleness)
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    longest, measured = _longest_prompt(trainer, tokenizer)
    return TrainerFacts(
        trainer=type(trainer).__name__,
        model=type(model).__name__,
        model_name=str(getattr(model.config, "_name_or_path", "") or ""),
        adapter=is_adapter(model),
        parameters=parameters_of(model),
        reference_bytes=parameters_of(trainer.ref_model).nbytes if trainer.ref_model is not None else 0,
        slots=slots_for(model, max_staleness=settings.max_staleness, sharing=sharing),
        precision="bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        optimizer=str(getattr(args.optim, "value", args.optim)),
        learning_rate=args.learning_rate,
        loss_type=args.loss_type,
        beta=args.beta,
        temperature=args.temperature,
        use_vllm=wants_vllm(trainer),
        batch=_batch(args),
        max_steps=args.max_steps,
        epochs=args.num_train_epochs,
        dataset_rows=rows,
        columns=list(trainer.train_dataset.column_names or ()),
        rewards=list(trainer.reward_func_names),
        padding_token=tokenizer.pad_token,
        end_token=tokenizer.eos_token,
        max_completion_length=args.max_completion_length,
        context_length=getattr(model.config.get_text_config(), "max_position_embeddings", None),
        longest_prompt=longest,
        prompts_measured=measured,
        output_dir=str(Path(args.output_dir).absolute()),
        save_strategy=str(getattr(args.save_strategy, "value", args.save_strategy)),
        save_steps=args.save_steps,
        seed=args.seed,
        epoch_rounds=None if rows is None else rows // groups_per_round(trainer),
        groups_ahead=schedule.groups_ahead,
        first_groups=Lookahead(schedule.groups_per_round, schedule.groups_ahead).groups,
    )


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
        factored=sum(
            p.numel() if p.dim() < 2 else p.numel() // p.shape[-1] + p.numel() // p.shape[-2] for p in trained
        ),
        dtypes=dtypes,
        buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
    )


def _batch(args: Any) -> BatchFacts:
    return BatchFacts(
        per_device_train_batch_size=args.per_device_train_batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        steps_per_generation=args.steps_per_generation,
        generation_batch_size=args.generation_batch_size,
        num_generations=args.num_generations,
        num_iterations=args.num_iterations,
        processes=args.world_size,
    )


def _batch_refused_by_trl(error: SetupFileError) -> dict[str, int] | None:
    """The numbers of the GRPOConfig that refused them: it was never returned, but its frame is in the traceback."""
    from trl import GRPOConfig

    trace = error.__cause__.__traceback__ if error.__cause__ is not None else None
    while trace is not None:
        config = trace.tb_frame.f_locals.get("self")
        if isinstance(config, GRPOConfig) and trace.tb_frame.f_code.co_name == "__post_init__":
            with suppress(AttributeError, TypeError):
                facts = _batch(config)
                return asdict(facts) if facts.steps_per_generation and facts.generation_batch_size else None
        trace = trace.tb_next
    return None


def _longest_prompt(trainer: GRPOTrainer, tokenizer: Any) -> tuple[int | None, int]:
    """In tokens, of the first rows; (None, 0) where prompts cannot be measured so simply."""
    longest, measured = None, 0
    for row in islice(trainer.train_dataset, PROMPTS_MEASURED):
        prompt = row.get("prompt")
        with suppress(Exception):  # a template that wants more than messages: the trainer will say, this is a hint
            ids = (
                tokenizer(prompt)["input_ids"]
                if isinstance(prompt, str)
                else tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=True)[
                    "input_ids"
                ]
            )
            longest, measured = max(longest or 0, len(ids)), measured + 1
    return longest, measured


def _checkpoint(trainer: GRPOTrainer, run_dir: Path) -> str:
    from async_grpo.archive import rollout_state
    from async_grpo.rundir.paths import RunDir
    from async_grpo.training import partial_batch

    state = RunDir(run_dir).read_state()
    found = rollout_state.latest(Path(trainer.args.output_dir).absolute(), state.run_id) if state else None
    if found and found[1].passes_done:
        partial_batch.check_ranks(found[0], trainer.args.world_size)
    return str(found[0]) if found else ""


@contextmanager
def _no_new_folders() -> Iterator[None]:
    """Folders that are made in the block go at its end if nothing is in them: transformers makes `output_dir` with
    the trainer, and a plan leaves nothing behind.
    """
    made: list[Path] = []
    mkdir = os.mkdir

    def remember(path: Any, *args: Any, **kwargs: Any) -> None:
        mkdir(path, *args, **kwargs)
        if "dir_fd" not in kwargs:
            made.append(Path(os.fsdecode(path)).absolute())

    os.mkdir = remember
    try:
        yield
    finally:
        os.mkdir = mkdir
        for folder in reversed(made):
            with suppress(OSError):
                folder.rmdir()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # what get_trainer() has left running must not hold up an answer that is written
