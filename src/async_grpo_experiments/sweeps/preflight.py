"""Before anything is started: places, ports, the setup file built once, space on the disk, and W&B's key."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from async_grpo.checks.plan.trainer_facts import Question, TrainerFacts, facts_or_refusal, look_at_trainer
from async_grpo.deltas.chain import FULL_EVERY
from async_grpo.errors import UsageError
from async_grpo.formatting import counted, size
from async_grpo.rundir.run_plan import RunPlan
from async_grpo.serving.vllm_server import is_free
from async_grpo.settings import TrainingSettings
from async_grpo.setup.devices import CPU, visible_gpus
from async_grpo.setup.generator_choice import ENGINES
from async_grpo_experiments.slots.places import Place, core_pairs, core_places, gpu_places
from async_grpo_experiments.sweeps.plan import ASYNC, TRL, Sweep

OPTIMIZER_BYTES = 8  # two float32 for each parameter that is trained
BF16_DELTA, FP32_DELTA = 0.2, 0.7  # size of a delta, by the size of the weights
LOGS_BYTES = 100_000_000  # of each run: logs, metrics and the archive of groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    places: list[Place]
    offline: bool  # W&B has no key
    serves: bool  # runs start vLLM servers
    model: str = ""  # that is trained, as its configuration names it


def preflight(sweep: Sweep, say: Callable[[str], None]) -> Preflight:
    """Look at everything that could stop the runs later. Starts none.

    Raises:
        AsyncGRPOError: a run could not start, or the disk has too little space; says what to do.
    """
    places = places_of(sweep)
    say(f"building the trainer of {sweep.setup} once")
    facts = _facts(sweep, places[0])
    _refuse_shared_server(sweep, facts)
    if sweep.mode == TRL:
        places = _places_of_plain_trl(sweep, facts, places)
    _check_disk(sweep, facts)
    offline = "wandb" in facts.report_to and wandb_is_offline(os.environ, Path.home())
    if offline:
        say("W&B has no key (WANDB_API_KEY, or `wandb login`), so the runs log offline; `wandb sync` uploads later")
    serves = starts_servers(sweep, facts)
    taken = [port for run in sweep.runs for port in run.port_pairs()[0] if serves and not is_free(port)]
    if taken:
        say(f"taken by other programs now: port {', '.join(map(str, taken))}; a run that needs one gets the next free")
    return Preflight(places=places, offline=offline, serves=serves, model=facts.model_name or "")


def wandb_is_offline(env: Mapping[str, str], home: Path) -> bool:
    """Whether W&B has no key to upload with: neither in the environment nor from `wandb login`."""
    if env.get("WANDB_MODE") or env.get("WANDB_API_KEY"):
        return False
    netrc = home / ".netrc"
    return not (netrc.is_file() and "wandb" in netrc.read_text(errors="replace"))


def places_of(sweep: Sweep) -> list[Place]:
    """The places of the runs: GPUs where there are some, else shares of the cores. No more than there are runs."""
    gpus = visible_gpus()
    if gpus or sweep.gpus_per_run is not None:
        each = sweep.gpus_per_run or 1
        places = gpu_places(gpus, each=each, first=sweep.start_instance * each, at_most=sweep.num_instances)
        return places[: len(sweep.seeds)]
    return core_places(min(sweep.num_instances or core_pairs(), len(sweep.seeds)))


def _places_of_plain_trl(sweep: Sweep, facts: TrainerFacts, places: list[Place]) -> list[Place]:
    """One GPU a run; with a vLLM server, one GPU more or as many as `--gpus-per-run` says.

    Raises:
        UsageError: the GPUs are too few or too many.
    """
    each = sweep.gpus_per_run
    if not starts_servers(sweep, facts):
        if each is not None and each > 1:
            raise UsageError(
                f"--gpus-per-run {each}: plain TRL (--mode trl) trains each run in one process on one GPU, so the "
                "others would be idle. Leave it out."
            )
        return places
    if not places[0].gpus or each == 1:
        raise UsageError(
            f'{sweep.setup} generates with a vLLM server (vllm_mode="server"). TRL sends it weights with NCCL, which '
            "wants a GPU for the trainer and others for the server: --gpus-per-run 2. Or let TRL generate without a "
            "server: --set use_vllm=false, or --set vllm_mode=colocate."
        )
    return places if each is not None else places_of(replace(sweep, gpus_per_run=2))


def starts_servers(sweep: Sweep, facts: TrainerFacts) -> bool:
    if sweep.mode == ASYNC:
        return ENGINES[facts.generator].started
    return facts.vllm_server and not facts.names_server


def _facts(sweep: Sweep, place: Place) -> TrainerFacts:
    device = place.gpus[0] if place.gpus else CPU
    before = os.environ.get("DATASET")
    if sweep.dataset is not None:
        os.environ["DATASET"] = sweep.dataset
    try:
        training = sweep.runs[0].training()
        plan = RunPlan(config=Path(sweep.setup), training=training, work=sweep.work, master_device=device)
        evaluates = training.eval_every if "eval_every" in sweep.given else 0
        question = Question(plan=plan, distributed=sweep.mode == ASYNC, eval_every=evaluates)
        return facts_or_refusal(look_at_trainer(question))
    finally:
        if sweep.dataset is not None:
            os.environ.pop("DATASET")
            os.environ |= {} if before is None else {"DATASET": before}


def _refuse_shared_server(sweep: Sweep, facts: TrainerFacts) -> None:
    shared = ENGINES[facts.generator].named if sweep.mode == ASYNC else facts.vllm_server and facts.names_server
    if shared and len(sweep.seeds) > 1:
        raise UsageError(
            f'{sweep.setup} generates with one vLLM server (vllm_mode="server"). {counted(len(sweep.seeds), "run")} '
            "cannot share it, because each sends it its own weights. Let each run have an engine of its own: --set "
            "vllm_mode=colocate, --generator hf, or --generator vllm-server, with which workers start servers."
        )


def _check_disk(sweep: Sweep, facts: TrainerFacts) -> None:
    each = needed_bytes(facts) + kept_bytes(facts, sweep.training)
    base = Path(sweep.output_base).absolute()
    free = shutil.disk_usage(next(folder for folder in (base, *base.parents) if folder.exists())).free
    if each * len(sweep.seeds) > free:
        raise UsageError(
            f"{counted(len(sweep.seeds), 'run')} need about {size(each * len(sweep.seeds))} in {base} for checkpoints, "
            f"kept versions and logs ({size(each)} each), and {size(free)} are free. Make room, set save_total_limit "
            "or save_steps (--set save_total_limit=1), keep fewer versions (--delta-keep), or choose another "
            "--output-base."
        )


def kept_bytes(facts: TrainerFacts, settings: TrainingSettings) -> int:
    """What --delta-every writes, at a learning rate of about 3e-5; docs/deltas.md has the sizes at others."""
    if not settings.delta_every or facts.max_steps <= 0:
        return 0
    parameters = facts.parameters
    weights = parameters.trained_bytes if settings.publish_dtype is None else 2 * parameters.trained
    versions = facts.max_steps // settings.delta_every + 1
    if settings.delta_keep is not None:
        versions = min(versions, settings.delta_keep + 2 * FULL_EVERY)
    snapshots = math.ceil(versions / FULL_EVERY)
    share = BF16_DELTA if weights <= 2 * parameters.trained else FP32_DELTA
    return int(weights * (snapshots + share * (versions - snapshots)))


def needed_bytes(facts: TrainerFacts) -> int:
    """What a run writes: the checkpoints that it keeps, each with weights and optimizer, and its logs."""
    parameters = facts.parameters
    weights = parameters.trained_bytes if parameters.trained < parameters.count else parameters.nbytes
    checkpoint = weights + OPTIMIZER_BYTES * parameters.trained
    saved = 1
    if facts.save_strategy == "steps" and facts.max_steps > 0 and facts.save_steps >= 1:
        saved = math.ceil(facts.max_steps / facts.save_steps)
    if facts.save_strategy == "no":
        saved = 0
    if facts.save_total_limit is not None:
        saved = min(saved, facts.save_total_limit + 1)  # the oldest goes once the newest is there
    return saved * checkpoint + LOGS_BYTES
