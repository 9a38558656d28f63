"""Makes the engine of a worker: the one module that knows all of them, in `MAKERS`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from async_grpo.engines import Engine, stop_tags
from async_grpo.errors import UsageError
from async_grpo.rundir.locks import KernelLock, describe_holder
from async_grpo.setup.generator_choice import (
    HF,
    NAMED_SERVER,
    STARTED_SERVER,
    VLLM,
    Capabilities,
    check_generator_options,
    choose_generator,
    engine_inside,
)
from async_grpo.setup.sampling import check_sampling, guidance_of, needs_kept_tokens, transformers_config
from async_grpo.telemetry.waiting import wait_until

ENGINE_START_S = 1200.0  # for all engines of one GPU

if TYPE_CHECKING:
    from transformers import StoppingCriteriaList

    from async_grpo.records import WorkerId
    from async_grpo.rollout.trl_trainer import RolloutTrainer
    from async_grpo.rundir.paths import RunDir, RunState
    from async_grpo.settings import TrainingSettings, WorkerSettings


def make_engine(
    trl: RolloutTrainer, settings: WorkerSettings, run: RunDir, state: RunState, *, worker: WorkerId, on_gpu: bool
) -> Engine:
    """The engine that the command line or the setup file asks for; one of vLLM in this process is started.

    Raises:
        UsageError: it cannot be had with the other options.
        UnsupportedError: it does not suit the trainer or the run.
    """
    training, chosen = state.plan.training, choose_generator(settings.generator, trl.trainer, on_gpu=on_gpu)
    check_sampling(trl.trainer, training.correction, chosen, deterministic=training.deterministic)
    trl.sampled_by(chosen, training.max_staleness)
    check_generator_options(chosen, settings, deterministic=training.deterministic, workers=state.plan.num_workers)
    return MAKERS[chosen](trl, settings, run, training, worker)


@contextmanager
def alone_on_the_gpu(run: RunDir, env: Mapping[str, str]) -> Iterator[None]:
    """Start the engines of one GPU, and load the models on the server's, one after the other.

    vLLM sizes its memory for keys and values by what is free on the whole GPU while it starts; two that start at the
    same time would each count the other's memory as its own. And what loads a model has it in memory once more.
    """
    gpu = env.get("CUDA_VISIBLE_DEVICES", "")
    if not gpu:  # on the CPU
        yield
        return
    lock = KernelLock(run.engine_start(gpu))
    wait_until(
        lambda: lock.try_acquire({"role": "loads a model or starts a vLLM engine"}) or None,
        what="another worker on the same GPU to load its model, or to start its vLLM engine "
        f"({describe_holder(lock.holder())})",
        timeout_s=ENGINE_START_S,
    )
    with lock:
        yield


def transformers_engine(trl: RolloutTrainer, *, deterministic: bool = False) -> Engine:
    """Make the engine that samples with the trainer's own model.

    Args:
        deterministic: a group's tokens must not depend on the groups beside it, which decide the shapes of a pass.
    """
    from async_grpo.engines.captured import DecodeSteps
    from async_grpo.engines.drawing import drawn_on
    from async_grpo.engines.transformers import TransformersEngine

    trainer, trl.view.policy_is_here = trl.trainer, True
    device = trainer.accelerator.device
    fast = device.type == "cuda" and not deterministic
    return TransformersEngine(
        trainer.model,
        config=transformers_config(trainer),
        loss_temperature=trainer.args.temperature,
        pad_token_id=trl.pad_token_id,
        autocast=trainer.accelerator.autocast,
        stopping=_stopping(trainer),
        guidance=guidance_of(trainer),
        tokenizer=trainer.processing_class,
        most_groups=trainer.args.generation_batch_size // trainer.num_generations,
        draw=drawn_on(device) if fast else None,
        steps=DecodeSteps(capture=True) if fast else None,
        device=device,
    )


def _stopping(trainer: Any) -> StoppingCriteriaList:
    from transformers import StoppingCriteriaList, StopStringCriteria

    tags = stop_tags(trainer)
    return StoppingCriteriaList([StopStringCriteria(trainer.processing_class, list(tags))] if tags else [])


def connect(run: RunDir, trainer: Any) -> Engine:
    """The vLLM server that the setup file names, for this worker alone."""
    from async_grpo.engines.served.elsewhere import VLLMServer

    lock = KernelLock(run.generator_lock)  # held as long as the process lives
    if not lock.try_acquire({"role": "feeds the vLLM server"}):
        raise UsageError(
            f"Another worker feeds the vLLM server already ({describe_holder(lock.holder())}). One is enough: the "
            "server has the GPUs for generating. End this one, or start the run with --num-workers 1."
        )
    return VLLMServer(trainer)


def start_server(trl: RolloutTrainer, settings: WorkerSettings, run: RunDir, worker: WorkerId) -> Engine:
    """A vLLM server of this worker's own."""
    from async_grpo.engines.served.started import StartedServer
    from async_grpo.serving.vllm_server import READY_S

    return StartedServer(
        trl.trainer,
        folder=run.worker_engine(worker),
        log=run.server_of_worker_log(worker),
        handle=run.weights_handle,
        number=worker.number,
        seed=int.from_bytes(os.urandom(4), "big"),  # two workers must not draw the same
        devices=settings.server_devices,
        ready_s=settings.server_timeout or READY_S,
    )


def _vllm_engine(
    trl: RolloutTrainer, settings: WorkerSettings, run: RunDir, training: TrainingSettings, worker: WorkerId
) -> Engine:
    from async_grpo.engines.continuous import ContinuousEngine
    from async_grpo.engines.vllm import VLLMEngine

    trainer, deterministic, in_flight_update = trl.trainer, training.deterministic, settings.in_flight_update == "on"
    if engine_inside(trainer.model) is None:  # else its weights are the engine's own
        trainer.model.to("meta")  # the engine will have the weights
    with alone_on_the_gpu(run, os.environ):
        engine = VLLMEngine(
            trainer,
            seed=0 if deterministic else int.from_bytes(os.urandom(4), "big"),  # two workers must not draw the same
            in_flight_update=in_flight_update,
            deterministic=deterministic,
            returns_kept=needs_kept_tokens(trainer, training.correction, VLLM),
            folder=run.worker_engine(worker),
        )
    trl.end_dialogues_before(engine.max_model_len)
    return ContinuousEngine(
        engine, group_size=trainer.num_generations, in_flight_update=in_flight_update, deterministic=deterministic
    )


MAKERS: dict[Capabilities, Callable[[RolloutTrainer, WorkerSettings, RunDir, TrainingSettings, WorkerId], Engine]] = {
    HF: lambda trl, settings, run, training, worker: transformers_engine(trl, deterministic=training.deterministic),
    VLLM: _vllm_engine,
    NAMED_SERVER: lambda trl, settings, run, training, worker: connect(run, trl.trainer),
    STARTED_SERVER: lambda trl, settings, run, training, worker: start_server(trl, settings, run, worker),
}
