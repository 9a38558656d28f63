"""A setup file: its trainer is built in a child process, and its numbers are judged. No reward is called."""

from __future__ import annotations

from collections.abc import Iterator

import psutil

from async_grpo.checks.doctor.finding import Asked, Finding, error, ok, warning
from async_grpo.checks.doctor.gpu import driver
from async_grpo.checks.plan.memory import best_change, more_for_workers, server_bytes, trainer_fit, worker_fit
from async_grpo.checks.plan.trainer_facts import Look, Question, TrainerFacts, look_at_trainer
from async_grpo.errors import SetupFileError
from async_grpo.formatting import counted, size
from async_grpo.rundir.run_plan import RunPlan
from async_grpo.settings import TrainingSettings
from async_grpo.setup.devices import CPU
from async_grpo.setup.grpo_config.batch import Batch, misfit, possible_generations, what_to_set
from async_grpo.setup.setup_file import check_setup_file

TIMEOUT_S = 600.0
_INSTEAD = "Do what the message says, or train in one process, as TRL does: `async-grpo train FILE --device 0`."


def setup_file(asked: Asked) -> Iterator[Finding]:
    """Build the trainer that the file's `get_trainer()` returns, and say what would stop or hinder a run."""
    if asked.config is None:
        return
    try:
        check_setup_file(asked.config)
    except SetupFileError as refusal:
        yield error("setup file", str(refusal).splitlines()[0], "Give a Python file with get_trainer().")
        return
    gpus, memory = driver().visible, psutil.virtual_memory().available
    plan = RunPlan(
        config=asked.config.absolute(),
        training=TrainingSettings(set=dict(asked.values or {})),
        master_device="0" if gpus else CPU,
        worker_devices=(CPU, CPU) if not gpus else ("0",) if gpus == 1 else ("1",),  # as `train --distributed` has them
    )
    yield from judge(look_at_trainer(Question(plan=plan), TIMEOUT_S), gpus, memory, asked.gpu_memory)


def judge(look: Look, gpus: int, memory: int, gpu_memory: int | None = None) -> Iterator[Finding]:
    """Judge what the child found. What is well and not among the first lines is left to the plan of a dry run."""
    facts = look.facts
    if facts is None:
        if look.batch is not None and misfit(look.batch):
            yield _misfit(look.batch)
        else:
            yield error("get_trainer()", look.error, "The last lines of the message say what failed; fix the file.")
        return
    yield _trainer(facts)
    if look.error:
        yield error("distributed", look.error, _INSTEAD)
    yield _batch(facts.batch)
    yield _lengths(facts)
    yield _memory(facts, gpus, memory)
    yield from _complaints(facts, gpus)
    if gpu_memory is not None:
        yield from _fit(facts, gpu_memory)


def _trainer(facts: TrainerFacts) -> Finding:
    count, trained = facts.parameters.count, facts.parameters.trained
    name = f" ({facts.model_name})" if facts.model_name else ""
    built = f"returns a {facts.trainer} of {facts.model}{name}, {count:,} parameters"
    if trained == 0:
        return error("get_trainer()", f"{built}, none of which is trained", "Set requires_grad, or give a peft_config.")
    return ok("get_trainer()", f"{built}, {'all' if trained == count else f'{trained:,}'} trained")


def _misfit(batch: Batch) -> Finding:
    possible = ", ".join(map(str, possible_generations(batch))) or "none"
    fix = f"Set one of: {'; '.join(what_to_set(batch))}. Possible num_generations: {possible}."
    return error("batch", misfit(batch), fix)


def _batch(batch: Batch) -> Finding:
    """Describe the batch of a trainer that was built: its configuration has checked the numbers."""
    possible = ", ".join(map(str, possible_generations(batch)))
    product = f"{counted(batch.prompts, 'prompt')} x {batch.num_generations} completions"
    return ok("batch", f"{product} = {batch.generation_batch_size} a round; possible num_generations: {possible}")


def _lengths(facts: TrainerFacts) -> Finding:
    longest, completion, context = facts.longest_prompt, facts.max_completion_length, facts.context_length
    measured = f"up to {counted(longest or 0, 'token')} (the first {facts.prompts_measured})"
    found = f"prompts {measured if longest else 'of any length'}, completions up to {completion}"
    if context is None or completion is None:
        return ok("lengths", found)
    left = context - (longest or 0)
    if completion > left:
        fix = f"max_completion_length={max(1, left)}, or shorter prompts."
        return error("lengths", f"{found}: more than the model's context of {context}", fix)
    return ok("lengths", f"{found}; the model's context is {context}")


def _memory(facts: TrainerFacts, gpus: int, available: int) -> Finding:
    need = server_bytes(facts)
    found = f"the server takes {size(need)} before activations"
    if not gpus and need > available:
        fix = "A smaller model, LoRA, or an 8-bit optimizer."
        return error("model memory", f"{found}, and {size(available)} are available", fix)
    return ok("model memory", f"{found} (`train --dry-run` has the parts)")


def _complaints(facts: TrainerFacts, gpus: int) -> Iterator[Finding]:
    prompts, rows, types = facts.batch.prompts, facts.dataset_rows, ", ".join(facts.parameters.dtypes)
    if rows is not None and rows < prompts:
        found = f"{rows:,} rows: fewer than the {prompts} prompts of one round, so no round is ever full"
        yield error("dataset", found, f"Use at least {prompts} rows, or a smaller generation batch.")
    if facts.end_token is None:
        found = "it has no end-of-text token, so no completion would ever end"
        yield error("tokenizer", found, "Set tokenizer.eos_token.")
    elif facts.padding_token is None:
        fix = "Set tokenizer.pad_token (not to the end-of-text token)."
        yield error("tokenizer", "it has no padding token", fix)
    in_two_bytes = facts.parameters.trained_bytes == 2 * facts.parameters.trained
    if facts.precision == "fp16" and "float16" in facts.parameters.dtypes and in_two_bytes:
        found = f"fp16, weights in {types}: gradients of fp16 weights cannot be unscaled"
        yield error("precision", found, "bf16=True, or weights in float32.")
    elif gpus and facts.precision == "fp32" and "float32" in facts.parameters.dtypes:
        found = f"fp32, weights in {types} on a GPU is several times slower than bf16"
        yield warning("precision", found, "bf16=True in the GRPOConfig.")
    versions, bound = facts.batch.passes / facts.batch.gradient_accumulation_steps, TrainingSettings().max_staleness
    if versions > bound + 1:
        found = f"one round is {versions:g} optimizer steps, more than the default bound of {bound} versions"
        fix = f"--max-staleness {int(2 * versions)}, or fewer steps_per_generation or num_iterations."
        yield warning("staleness", f"{found}: the trainer waits for each round", fix)
    if facts.save_strategy == "no":
        found = "none are saved (save_strategy='no'): a run that is killed starts again from step 0"
        yield warning("checkpoints", found, "save_strategy='steps', save_steps=50")


def _fit(facts: TrainerFacts, gpu_memory: int) -> Iterator[Finding]:
    """Judge a server and a worker on GPUs of their own."""
    change = best_change(facts)
    fits = {
        trainer_fit(facts, gpu_memory): change.text if change else "",
        worker_fit(facts, gpu_memory): more_for_workers(facts, gpu_memory),
    }
    for answer, helps in fits.items():
        fix = f"What helps most: {helps or 'a smaller model, or a shorter max_completion_length'}."
        yield ok(answer.subject, answer.text) if answer.fits else warning(answer.subject, answer.text, fix)
