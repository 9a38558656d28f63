"""`train --dry-run`: the plan of a run in words. Starts no run and changes none."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from async_grpo.checks.plan import memory
from async_grpo.checks.plan.trainer_facts import Question, TrainerFacts, facts_or_refusal, look_at_trainer
from async_grpo.formatting import counted, size
from async_grpo.launch.host_memory import crowding, require_memory
from async_grpo.launch.launcher import threads as threads_of
from async_grpo.roles.plain_trl import has_begun
from async_grpo.rundir.folders import require_writable
from async_grpo.rundir.lifecycle import Fate, preview
from async_grpo.rundir.run_plan import RunPlan
from async_grpo.settings import TrainingSettings
from async_grpo.setup.devices import CPU
from async_grpo.setup.generator_choice import ENGINES
from async_grpo.setup.grpo_config.batch import possible_generations
from async_grpo.training.corrections.rule import rule_of

Rows = Iterator[tuple[str, str]]
COPIES_ON_A_NODE = 4  # of what trains: its own, and the slots of `nodes.receiving`

_WIDTH = 15
_NOT_COUNTED = "not counted in the memory above: activations, keys and values; nor what Python and CUDA take themselves"


def plan_distributed(root: Path, plan: RunPlan, gpu_memory: int | None = None) -> None:
    """Print what `launch(root, plan)` would do, and what of it fits GPUs of `gpu_memory` bytes.

    Raises:
        AsyncGRPOError: where `launch` would refuse, or its server would, with the same text and exit code.
    """
    training = plan.training
    require_memory(plan.num_workers)
    fate, folder = preview(root, resume=training.resume, overwrite=plan.launch.overwrite)
    facts = _look(Question(plan=plan, run_dir=root))
    _print(
        *_trainer_rows(plan.config, facts),
        ("run directory", _fate(root, fate, folder)),
        ("checkpoints", _checkpoints(facts, training)),
        *([("", facts.other_checkpoints)] if facts.other_checkpoints else []),
        *_process_rows(plan, facts.batch.processes),
        ("generator", f"{ENGINES[facts.generator].words}; {_sampling(facts)}"),
        *_batch_rows(facts),
        *_staleness_rows(facts, training),
        *_memory_rows(facts, plan),
        *(_fit_rows(facts, plan, gpu_memory) if gpu_memory is not None else ()),
    )


def plan_single(question: Question, run_dir: Path | None, gpu_memory: int | None = None) -> None:
    """Print what training in one process would be, in `run_dir` if any. Raises as `plan_distributed` does."""
    run_directory = []
    if run_dir is not None:
        require_writable(run_dir)
        does = "continues the run" if has_begun(run_dir) else "begins a run"
        run_directory = [("run directory", f"{run_dir}: {does} in it")]
    facts = _look(question)
    on = _device(question.plan.master_device)
    engine = "vLLM" if facts.use_vllm else "transformers"
    generator = "a vLLM server that this run starts" if question.serves else f"{engine}, in this process"
    _print(
        *_trainer_rows(question.plan.config, facts),
        *run_directory,
        ("checkpoints", _checkpoints(facts, question.plan.training)),
        ("processes", f"this one alone, on {on}: plain TRL"),
        ("generator", f"{generator}; {_sampling(facts)}"),
        *_batch_rows(facts),
        ("memory", f"{size(memory.trainer_bytes(facts))} on {on}: {_parts(facts)}"),
        *memory.size_rows(facts, on_gpu=question.plan.master_device != CPU or gpu_memory is not None),
        ("", _NOT_COUNTED),
        *(memory.fit_rows(facts, gpu_memory) if gpu_memory is not None else ()),
    )


def _look(question: Question) -> TrainerFacts:
    loading = "(its get_trainer() may load the model)"
    print(f"Building the trainer of {question.plan.config} to look at it {loading} ...", file=sys.stderr)
    return facts_or_refusal(look_at_trainer(question))


def _print(*rows: tuple[str, str]) -> None:
    for label, text in rows:
        print(f"{label:<{_WIDTH}}{text}")
    print("\nNothing was started and no run was changed. Without --dry-run this run starts.")


def _trainer_rows(config: Path, facts: TrainerFacts) -> Rows:
    parameters = facts.parameters
    trained = "all trained" if parameters.trained == parameters.count else f"{parameters.trained:,} of them trained"
    name = f" ({facts.model_name})" if facts.model_name else ""
    dtypes = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in parameters.dtypes.items())
    rate = f"learning rate {facts.learning_rate:g}"
    loss = f"loss {facts.loss_type}, beta {facts.beta:g}, seed {facts.seed}"
    yield "setup file", str(config)
    yield "trainer", f"{facts.trainer}, reward functions: {', '.join(facts.rewards)}"
    yield "model", f"{facts.model}{name}: {parameters.count:,} parameters, {trained}; {dtypes}"
    yield "training", f"{facts.precision}, {facts.optimizer}, {rate}, {loss}"


def _fate(root: Path, fate: Fate, folder: Path) -> str:
    return {
        Fate.NEW: f"{root}: {'the run begins in it' if root.exists() else 'will be made'}",
        Fate.RESUMED: f"{root}: the run in it is resumed",
        Fate.MOVED_ASIDE: f"{root}: the ended run in it is moved to {folder}",
        Fate.OVERWRITTEN: f"{root}: the queue, logs and metrics in it ARE DELETED (--overwrite); checkpoints stay",
    }[fate]


def _checkpoints(facts: TrainerFacts, settings: TrainingSettings) -> str:
    strategies = {"steps": f"every {facts.save_steps:g} steps", "no": "none (save_strategy=no)"}
    often = strategies.get(facts.save_strategy, f"save_strategy={facts.save_strategy}")
    begins = facts.resumes_from or "the start: there is no complete checkpoint yet"
    return f"{facts.output_dir}, {often}{f'; resumes from {begins}' if settings.resume else ''}"


def _process_rows(plan: RunPlan, ranks: int) -> Rows:
    workers, threads = plan.worker_devices, threads_of(plan, os.environ)
    each = f"{threads} CPU thread{'' if threads == '1' else 's'} each" if threads else "CPU threads as torch chooses"
    yield "processes", f"1 parameter server and {counted(len(workers), 'worker')}, {each}"
    if plan.launch.accelerate_config is None:
        yield "", f"server on {_device(plan.master_device)}"
    else:
        yield "", f"server in {ranks} processes, on the devices that {plan.launch.accelerate_config} names"
    for number, device in enumerate(workers, start=1):
        yield "", f"worker {number} on {_device(device)}"
    if crowd := crowding(len(workers)):
        yield "", crowd
    if (launch := plan.launch).ray is not None:
        count = launch.nodes - 1 if launch.nodes else "all"
        on_each = launch.workers_per_node or "one for each GPU, else 2,"
        yield "", f"workers on {count} other machines of the Ray cluster {launch.ray}: {on_each} on each"


def _sampling(facts: TrainerFacts) -> str:
    return f"up to {facts.max_completion_length} tokens a completion, temperature {facts.temperature:g}"


def _batch_rows(facts: TrainerFacts) -> Rows:
    batch = facts.batch
    each = f"{'each process: ' if batch.processes > 1 else ''}forward passes of {batch.per_device_train_batch_size}"
    steps = f"an optimizer step is {batch.gradient_accumulation_steps} of them, a round {batch.passes}"
    product = f"{counted(batch.prompts, 'prompt')} x {batch.num_generations} completions"
    yield "batch", f"{product} = {batch.generation_batch_size} a round ({each}; {steps})"
    yield "", f"  possible num_generations: {', '.join(map(str, possible_generations(batch)))}"
    if facts.tasks:
        yield "tasks", facts.tasks
    if facts.parts:
        yield "step", facts.parts
    if facts.rounds is None:
        yield "length", f"{facts.epochs:g} epochs of streamed data: as many steps as it has"
        return
    data = "streamed data"
    if facts.dataset_rows is not None:
        epochs = f"{facts.rounds / facts.epoch_rounds:.2g} epochs" if facts.epoch_rounds else "no whole epoch"
        data = f"{epochs} of {facts.dataset_rows:,} prompts"
    completions = f"{facts.rounds * batch.generation_batch_size:,} completions"
    yield "length", f"{facts.steps:,} optimizer steps = {facts.rounds:,} rounds = {completions}; {data}"


def _staleness_rows(facts: TrainerFacts, training: TrainingSettings) -> Rows:
    bound = training.max_staleness
    groups = f"{facts.first_groups} prompt groups under way at first, at most {facts.groups_ahead}"
    schedule = " (the synchronous schedule)" if bound == 0 else ""
    yield "staleness", f"at most {bound} policy versions; {groups}{schedule}"
    if facts.versions_within_round:
        yield "", f"  when a batch is begun; {facts.versions_within_round} more in its last optimizer step"
    extras = ["deterministic"] if training.deterministic else []
    extras += ["prompts are chosen"] if training.choose_prompts else []
    extras += ["groups with equal rewards are replaced"] if training.filter_zero_variance else []
    extras += [f"{training.train_of_group} completions of each group are trained on"] if training.train_of_group else []
    yield "correction", ", ".join([str(rule_of(training)), *extras])


def _memory_rows(facts: TrainerFacts, plan: RunPlan) -> Rows:
    master, workers = plan.master_device, plan.worker_devices
    if master == CPU:  # its memory is the host's
        facts = replace(facts, published_in_host_memory=False)
    published, own = size(memory.published_bytes(facts)), size(memory.weight_bytes(facts.parameters))
    where = " in host memory" if facts.published_in_host_memory else ""
    yield "memory", f"server, on {_device(master)}: {size(memory.server_bytes(facts))}"
    yield "", f"  {_parts(facts)}, published for the workers{where} {published} ({_slots(facts)})"
    sharing = _sharing(facts, plan)
    if sharing:
        starting = f"no weights of their own, but {own} each while they start"
        yield "", f"{counted(sharing, 'worker')} on {_device(master)}: {starting}"
    if plan.launch.ray is not None:
        copies = size(COPIES_ON_A_NODE * memory.version_bytes(facts) + memory.frozen_bytes(facts))
        yield "", f"each other machine: {copies} of the host for a copy of the weights and 3 versions"
    for device in sorted({device for device in workers if device != master or not sharing}):
        yield "", f"{counted(workers.count(device), 'worker')} on {_device(device)}: {own} each"
    yield from memory.size_rows(facts, on_gpu=master != CPU)
    yield "", _NOT_COUNTED
    if facts.batch.processes > 1:
        whole = "the server's memory is that of a process with the whole model"
        share = f"each of the {facts.batch.processes} has about its share of weights, gradients and optimizer"
        yield "", f"{whole}: with FSDP or ZeRO-3 {share}"


def _fit_rows(facts: TrainerFacts, plan: RunPlan, gpu_memory: int) -> Rows:
    """Devices of a CPU stand for the GPUs of another machine: the workers would be on GPUs of their own."""
    workers, master = plan.worker_devices, plan.master_device
    if master == CPU:
        return memory.fit_rows(facts, gpu_memory, elsewhere=1)
    elsewhere = max((workers.count(device) for device in set(workers) if device != master), default=0)
    sharing = _sharing(facts, plan)
    own_weights = 0 if ENGINES[facts.generator].served else workers.count(master) - sharing
    return memory.fit_rows(facts, gpu_memory, sharing=sharing, own_weights=own_weights, elsewhere=elsewhere)


def _sharing(facts: TrainerFacts, plan: RunPlan) -> int:
    """How many workers have the server's weights for their own; an engine of vLLM has a copy."""
    return plan.workers_sharing if ENGINES[facts.generator].in_place else 0


def _slots(facts: TrainerFacts) -> str:
    versions, frozen = f"{facts.slots} versions of {size(memory.version_bytes(facts))}", memory.frozen_bytes(facts)
    own = "a copy" if memory.copies_frozen(facts) else "which the trainer uses as well: counted there"
    return f"{versions}; {size(frozen)} do not train, {own}" if frozen else versions


def _parts(facts: TrainerFacts) -> str:
    return ", ".join(f"{name} {size(nbytes)}" for name, nbytes in memory.trainer_parts(facts).items() if nbytes)


def _device(device: str) -> str:
    return "the CPU" if device == CPU else f"GPU {device}"
