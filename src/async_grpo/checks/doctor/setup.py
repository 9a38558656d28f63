"""A setup file: its trainer is built in a child process, and its numbers are looked at. No reward is called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from async_grpo.checks.doctor.finding import Finding, error, ok, warning
from async_grpo.checks.plan.batch_arithmetic import optimizer_steps, rounds_of
from async_grpo.checks.plan.facts import Look, Question, TrainerFacts, look_at_trainer
from async_grpo.checks.plan.fit import best_change
from async_grpo.checks.plan.memory import estimate
from async_grpo.checks.plan.what_fits import best_generation_change, trainer_fit, worker_fit
from async_grpo.errors import SetupFileError
from async_grpo.formatting import counted, size
from async_grpo.settings import TrainingSettings
from async_grpo.setup.devices import CPU
from async_grpo.setup.grpo_config.batch import Batch, misfit, possible_generations, what_to_set
from async_grpo.setup.setup_file import check_setup_file

TIMEOUT_S = 600.0
_HINT = "`async-grpo train FILE --device 0` runs it in one process, as TRL does."


def setup_file(
    config: Path,
    config_values: Mapping[str, str] | None = None,
    *,
    gpus: int,
    memory: int,
    gpu_memory: int | None = None,
) -> Iterator[Finding]:
    """Build the trainer that the file's `get_trainer()` returns, and say what would stop or hinder a run.

    Args:
        config_values: of `--set`.
        gpus: how many are visible.
        memory: bytes of RAM that are available.
        gpu_memory: bytes of each GPU that the run is planned for; None: not asked about.
    """
    try:
        check_setup_file(config)
    except SetupFileError as refusal:
        yield error("setup file", str(refusal).splitlines()[0], "Give a Python file with get_trainer().")
        return
    question = Question(config=config, device="0" if gpus else CPU, settings=TrainingSettings(set=config_values))
    yield from judge(look_at_trainer(question, TIMEOUT_S), gpus, memory, gpu_memory)


def judge(look: Look, gpus: int, memory: int, gpu_memory: int | None = None) -> Iterator[Finding]:
    """The lines for what the child found."""
    if look.facts is None:
        if look.batch is not None and misfit(look.batch):
            yield _batch(look.batch)
        else:
            yield error(
                "get_trainer()", look.error, "The last lines of the message say what failed; fix the setup file."
            )
        return
    facts, parameters = look.facts, look.facts.parameters
    name = f" ({facts.model_name})" if facts.model_name else ""
    built = f"returns a {facts.trainer} of {facts.model}{name}, {parameters.count:,} parameters"
    if parameters.trained == 0:
        yield error("get_trainer()", f"{built}, none of which is trained", "Set requires_grad, or give a peft_config.")
    else:
        trained = "all" if parameters.trained == parameters.count else f"{parameters.trained:,}"
        yield ok("get_trainer()", f"{built}, {trained} trained")
    if look.error:
        yield error("distributed", look.error, _HINT)
    yield from (_batch(facts.batch), _dataset(facts), _tokens(facts), _lengths(facts))
    yield from (_precision(facts, gpus), _memory(facts, gpus, memory), _pace(facts), _checkpoints(facts))
    if gpu_memory is not None:
        yield from _fit(facts, gpu_memory)


def _batch(batch: Batch) -> Finding:
    wrong = misfit(batch)
    if wrong:
        possible = ", ".join(map(str, possible_generations(batch))) or "none"
        return error(
            "batch", wrong, f"Set one of: {'; '.join(what_to_set(batch))}. Possible num_generations: {possible}."
        )
    return ok(
        "batch",
        f"{counted(batch.prompts, 'prompt')} x {batch.num_generations} completions = "
        f"{batch.generation_batch_size} a round; "
        f"possible num_generations: {', '.join(map(str, possible_generations(batch)))}",
    )


def _dataset(facts: TrainerFacts) -> Finding:
    prompts = facts.batch.prompts
    if facts.dataset_rows is None:
        return ok("dataset", f"streamed; columns {', '.join(facts.columns) or 'unknown'}")
    found = f"{facts.dataset_rows:,} rows, columns {', '.join(facts.columns)}"
    if facts.dataset_rows < prompts:
        return error(
            "dataset",
            f"{found}: fewer than the {prompts} prompts of one round, so no round is ever full",
            f"Use at least {prompts} rows, or a smaller generation batch.",
        )
    return ok("dataset", f"{found}; {facts.epoch_rounds:,} rounds an epoch")


def _tokens(facts: TrainerFacts) -> Finding:
    padding, end = facts.padding_token, facts.end_token
    if end is None:
        return error(
            "tokenizer", "it has no end-of-text token, so no completion would ever end", "Set tokenizer.eos_token."
        )
    if padding is None:
        return error("tokenizer", "it has no padding token", "Set tokenizer.pad_token (not to the end-of-text token).")
    return ok("tokenizer", f"padding {padding!r}, end of text {end!r}")


def _lengths(facts: TrainerFacts) -> Finding:
    longest, completion, context = facts.longest_prompt, facts.max_completion_length, facts.context_length
    prompt = (
        f"prompts up to {counted(longest, 'token')} (the first {facts.prompts_measured})"
        if longest
        else "prompts of any length"
    )
    found = f"{prompt}, completions up to {completion}"
    if context is None or completion is None:
        return ok("lengths", found)
    if (longest or 0) + completion > context:
        return error(
            "lengths",
            f"{found}: more than the model's context of {context}",
            f"max_completion_length={max(1, context - (longest or 0))}, or shorter prompts.",
        )
    return ok("lengths", f"{found}; the model's context is {context}")


def _precision(facts: TrainerFacts, gpus: int) -> Finding:
    types = ", ".join(facts.parameters.dtypes)
    found = f"{facts.precision}, weights in {types}"
    in_two_bytes = facts.parameters.trained_bytes == 2 * facts.parameters.trained
    if facts.precision == "fp16" and "float16" in facts.parameters.dtypes and in_two_bytes:
        return error(
            "precision", f"{found}: gradients of fp16 weights cannot be unscaled", "bf16=True, or weights in float32."
        )
    if gpus and facts.precision == "fp32" and "float32" in facts.parameters.dtypes:
        return warning(
            "precision", f"{found} on a GPU is several times slower than bf16", "bf16=True in the GRPOConfig."
        )
    return ok("precision", found)


def _memory(facts: TrainerFacts, gpus: int, available: int) -> Finding:
    need = estimate(facts)
    found = f"the server takes {size(need.server)} before activations"
    if not gpus and need.server > available:
        return error(
            "model memory",
            f"{found}, and {size(available)} are available",
            "A smaller model, LoRA, or an 8-bit optimizer.",
        )
    return ok("model memory", f"{found} (`train --dry-run` has the parts)")


def _fit(facts: TrainerFacts, gpu_memory: int) -> Iterator[Finding]:
    """Of a server and a worker on GPUs of their own."""
    for subject, text, well in (trainer_fit(facts, gpu_memory), worker_fit(facts, gpu_memory)):
        if well:
            yield ok(subject, text)
        else:
            change = best_change(facts) if subject == "trainer fits" else best_generation_change(facts, gpu_memory)
            yield warning(
                subject,
                text,
                f"What helps most: {change.text if change else 'a smaller model, or a shorter max_completion_length'}.",
            )


def _pace(facts: TrainerFacts) -> Finding:
    batch = facts.batch
    steps = optimizer_steps(batch, max_steps=facts.max_steps, epochs=facts.epochs, epoch_rounds=facts.epoch_rounds)
    versions = batch.steps_per_generation * batch.num_iterations / batch.gradient_accumulation_steps
    bound = TrainingSettings().max_staleness
    if versions > bound + 1:
        return warning(
            "staleness",
            f"one round is {versions:g} optimizer steps, more than the default bound of {bound} versions: the trainer "
            "waits for each round",
            f"--max-staleness {int(2 * versions)}, or fewer steps_per_generation or num_iterations.",
        )
    length = f"{steps:,} optimizer steps, {rounds_of(batch, steps):,} rounds; " if steps is not None else ""
    return ok(
        "staleness",
        f"{length}policy versions a round: {versions:g}, bound {bound}, up to {facts.groups_ahead} groups open",
    )


def _checkpoints(facts: TrainerFacts) -> Finding:
    if facts.save_strategy == "no":
        return warning(
            "checkpoints",
            "none are saved (save_strategy='no'): a run that is killed starts again from step 0",
            "save_strategy='steps', save_steps=50",
        )
    place = Path(facts.output_dir)
    shown = place.relative_to(Path.cwd()) if place.is_relative_to(Path.cwd()) else place
    return ok("checkpoints", f"{shown}, save_strategy={facts.save_strategy}")
