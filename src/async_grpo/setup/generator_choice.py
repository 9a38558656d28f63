"""Choose the engine that the workers generate with, and build a trainer whose setup file asks TRL for vLLM.

A setup file with `use_vllm=True` means an engine inside the trainer. In a distributed run the workers generate, so the
server starts no engine and a worker starts no second one: the request is noted, and its settings go to the workers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

from async_grpo.errors import UnsupportedError, UsageError
from async_grpo.settings import WorkerSettings
from async_grpo.setup.replaced import instead, naming_arguments

if TYPE_CHECKING:
    from trl import GRPOTrainer

HF, VLLM, VLLM_SERVER = "hf", "vllm", "vllm server"
STARTED_SERVER = "vllm-server"  # as the command line names it
_SERVERS = {  # how each is asked for, and the engine in the worker instead
    VLLM_SERVER: ('vllm_mode="server"', 'vllm_mode="colocate"'),
    STARTED_SERVER: ("--generator vllm-server", "--generator vllm"),
}
NO_IMAGES = (
    "Workers give images to an engine of their own. They give none to a vLLM server, which keeps encoded images when "
    "it gets new weights, and none to the vLLM that Unsloth puts into a model. Take --generator vllm (use_vllm=True "
    'with vllm_mode="colocate"; with Unsloth, fast_inference=False) or --generator hf.'
)
_REQUEST = "async_grpo_wants_vllm"  # attribute of the trainer: its file said use_vllm=True


@contextmanager
def engines_left_to_workers() -> Iterator[None]:
    """Inside this block, a `GRPOTrainer` that is told `use_vllm=True` is built without an engine."""
    from trl import GRPOTrainer

    build = GRPOTrainer.__init__
    named = naming_arguments(GRPOTrainer)

    @wraps(build)  # whoever changes the building too sees the same signature
    def build_without_engine(self: Any, *args: Any, **kwargs: Any) -> None:
        config: Any = named(self, *args, **kwargs).get("args")
        requested = bool(config and config.use_vllm)
        if requested:
            config.use_vllm = False
        build(self, *args, **kwargs)
        if requested:
            setattr(self, _REQUEST, True)

    with instead(GRPOTrainer, __init__=build_without_engine):
        yield


def wants_vllm(trainer: GRPOTrainer | None) -> bool:
    """Whether the setup file said `use_vllm=True`."""
    return bool(getattr(trainer, _REQUEST, False))


def refuse_late_vllm(trainer: GRPOTrainer) -> None:
    """Raise `UnsupportedError` where `use_vllm=True` was set too late to be noted."""
    if trainer.args.use_vllm:
        raise UnsupportedError("use_vllm=True was set after the trainer was built: give it to the GRPOConfig.")


def installed(package: str) -> bool:
    """Whether a package is there, without importing it."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None  # without an origin it is a folder of that name


def engine_inside(model: Any) -> Any | None:
    """The vLLM engine that Unsloth puts into a model with `fast_inference=True` (a `vllm.LLM`), else None."""
    return getattr(model, "vllm_engine", None)


def check_generator_options(
    chosen: str, work: WorkerSettings, *, deterministic: bool = False, workers: int = 0
) -> None:
    """Refuse options that the chosen generator does not have.

    Args:
        workers: how many will be started; 0 where that is unknown.

    Raises:
        UsageError: an option that only other generators have, or two that exclude each other.
        UnsupportedError: a vLLM server cannot work so.
    """
    if work.server_devices is not None and chosen != STARTED_SERVER:
        raise UsageError("--server-devices names the GPUs of a server that a worker starts: --generator vllm-server.")
    if work.server_timeout is not None and chosen != STARTED_SERVER:
        raise UsageError("--server-timeout is of a server that is started for the run: --generator vllm-server.")
    if work.in_flight_update == "on":
        _check_in_flight_update(chosen, deterministic=deterministic)
    if chosen == VLLM_SERVER and workers > 1:
        raise UnsupportedError(
            f'vllm_mode="server": {workers} workers cannot feed one server, since it takes weights from one process '
            "only. The server has the GPUs for generating, so one worker is enough: --num-workers 1. (With "
            'vllm_mode="colocate" each worker has an engine of its own.)'
        )
    if chosen in _SERVERS and deterministic:
        server, in_worker = _SERVERS[chosen]
        raise UnsupportedError(
            f"{server} cannot be --deterministic: a vLLM server batches requests as they come. Take {in_worker} or "
            "--generator hf."
        )


def _check_in_flight_update(chosen: str, *, deterministic: bool) -> None:
    if chosen == HF:
        raise UsageError(
            "--in-flight-update on: transformers generates a batch with the weights that began it (--generator hf). "
            "Leave it out, or take --generator vllm."
        )
    if chosen in _SERVERS:
        raise UsageError(
            "--in-flight-update on needs an engine in the worker: a vLLM server does not say which weights sampled a "
            f"token. Leave it off, or take {_SERVERS[chosen][1]}."
        )
    if deterministic:
        raise UsageError("--in-flight-update on depends on timing, so it cannot be combined with --deterministic.")


def refuse_own_server(*, use_vllm: bool, mode: str = "server", base_url: str | None = None) -> None:
    """Raise `UsageError` where plain TRL with `--generator vllm-server` would not ask for the server.

    Args:
        use_vllm, mode, base_url: `use_vllm`, `vllm_mode` and `vllm_server_base_url` of the GRPOConfig.
    """
    if not use_vllm:
        raise UsageError(
            "--generator vllm-server: the setup file's trainer generates without a vLLM server. Add --set "
            "use_vllm=true --set vllm_mode=server, or leave the option out."
        )
    if mode != "server":
        raise UsageError(
            f'--generator vllm-server starts a vLLM server, and the setup file says vllm_mode="{mode}". Add --set '
            "vllm_mode=server, or leave the option out."
        )
    if base_url is not None:
        raise UsageError(
            "--generator vllm-server starts a vLLM server, and the setup file names one that runs already "
            "(vllm_server_base_url). Remove that, or leave the option out."
        )


def choose_generator(asked: str | None, trainer: GRPOTrainer | None, *, on_gpu: bool) -> str:
    """Choose `HF`, `VLLM` (an engine in the worker), `VLLM_SERVER` (the setup file names a server) or `STARTED_SERVER`.

    The command line decides, else the setup file, else the machine: vLLM on a GPU where it is installed and the
    data has no images, which vLLM has to be asked for.

    Args:
        trainer: what the setup file made; None before it is loaded.

    Raises:
        UsageError: vLLM is not installed, or `hf` for a model that generates with an engine of its own.
        UnsupportedError: a server, or an engine inside the model, is to generate from images.
    """
    there, with_images = installed("vllm"), trainer is not None and has_images(trainer)
    if trainer is not None and engine_inside(trainer.model) is not None:
        if asked == HF:
            raise UsageError(
                "--generator hf: the model was loaded by Unsloth with fast_inference=True, so it shares its weights "
                "with the vLLM inside. Load it with fast_inference=False (the setup file can read FAST_INFERENCE: set "
                "it to 0)."
            )
        if with_images:
            raise UnsupportedError(f"The training data has images. {NO_IMAGES}")
        return VLLM
    chosen = asked or (VLLM if wants_vllm(trainer) or (there and on_gpu and not with_images) else HF)
    if chosen in (VLLM, STARTED_SERVER) and not there:
        source = f"--generator {asked}" if asked else "use_vllm=True in the setup file"
        raise UsageError(
            f"{source}: vLLM is not installed here. `pip install 'async-grpo[vllm]'` brings it for GPUs (README: "
            "tested versions), scripts/vllm_cpu_env.sh for a CPU; or take --generator hf."
        )
    in_server = trainer is not None and wants_vllm(trainer) and trainer.args.vllm_mode == "server"
    chosen = VLLM_SERVER if chosen == VLLM and in_server else chosen
    if chosen in (VLLM_SERVER, STARTED_SERVER) and with_images:
        raise UnsupportedError(f"The training data has images. {NO_IMAGES}")
    return chosen


def has_images(trainer: GRPOTrainer) -> bool:
    """Whether the training data is known to have images. Environments and streams may bring some all the same."""
    data = getattr(trainer, "train_dataset", None)
    columns = getattr(data, "column_names", None) or ()
    return "image" in columns or "images" in columns or _holds_images(getattr(data, "features", None))


def _holds_images(feature: Any) -> bool:
    """Whether a feature of `datasets` is an image, or has one inside."""
    inner = feature.values() if isinstance(feature, dict) else [getattr(feature, "feature", None)]
    return type(feature).__name__ == "Image" or any(_holds_images(part) for part in inner if part is not None)
