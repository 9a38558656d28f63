"""What each engine can, the choice of the workers' engine, and a trainer whose setup file asks TRL for vLLM.

A setup file with `use_vllm=True` means an engine inside the trainer. In a distributed run the workers generate, so the
server starts no engine and a worker starts no second one: the request is noted, and its settings go to the workers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

from async_grpo.errors import UnsupportedError, UsageError
from async_grpo.settings import WorkerSettings
from async_grpo.setup.replaced import instead, naming_arguments

if TYPE_CHECKING:
    from trl import GRPOTrainer


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What one engine can, for all that engines differ in. Its class has it as `capabilities`."""

    name: str  # in files of a run and, unless it is `named`, after --generator
    words: str  # what samples, for people
    package: str  # that samples: the settings of sampling have its names
    served: bool = False  # a server samples, which batches requests as they come
    started: bool = False  # each worker starts that server
    named: bool = False  # the setup file names that server, which takes weights from one process
    in_place: bool = False  # samples with the worker's own model, whose weights are the published ones
    joins: bool = False  # groups can join, and weights change, while others are being sampled
    full_softmax: bool = False  # log-probabilities are of all tokens, whichever are left out when one is drawn
    names_kept: bool = False  # says which tokens were not left out
    guided: bool = False  # takes logits processors with a request
    regex: bool = False  # holds completions to vllm_structured_outputs_regex
    images: bool = False  # takes prompts with images


HF = Capabilities(
    "hf", "transformers, in the workers", "transformers", in_place=True, full_softmax=True, guided=True, images=True
)
VLLM = Capabilities("vllm", "vLLM, in the workers", "vllm", joins=True, names_kept=True, regex=True, images=True)
NAMED_SERVER = Capabilities("named-server", "the setup file's vLLM server", "vllm", served=True, named=True, regex=True)
STARTED_SERVER = Capabilities("vllm-server", "each worker's vLLM server", "vllm", served=True, started=True, regex=True)
ENGINES = {engine.name: engine for engine in (HF, VLLM, NAMED_SERVER, STARTED_SERVER)}

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
    chosen: Capabilities, work: WorkerSettings, *, deterministic: bool = False, workers: int = 0
) -> None:
    """Refuse options that the chosen generator does not have.

    Args:
        workers: how many will be started; 0 where that is unknown.

    Raises:
        UsageError: an option that only other generators have, or two that exclude each other.
        UnsupportedError: a vLLM server cannot work so.
    """
    for option, given in (("--server-devices", work.server_devices), ("--server-timeout", work.server_timeout)):
        if given is not None and not chosen.started:
            raise UsageError(f"{option} is of a server that is started for the run: --generator vllm-server.")
    if work.in_flight_update == "on" and not chosen.joins:
        raise UsageError(
            f"--in-flight-update on with {chosen.words}: a batch is generated with the weights that began it. Leave it "
            'out, or take --generator vllm (with vllm_mode="colocate").'
        )
    if work.in_flight_update == "on" and deterministic:
        raise UsageError("--in-flight-update on depends on timing, so it cannot be combined with --deterministic.")
    if chosen.named and workers > 1:
        raise UnsupportedError(
            f'vllm_mode="server": {workers} workers cannot feed one server, since it takes weights from one process '
            "only. The server has the GPUs for generating, so one worker is enough: --num-workers 1. (With "
            'vllm_mode="colocate" each worker has an engine of its own.)'
        )
    if chosen.served and deterministic:
        raise UnsupportedError(
            f"--deterministic with {chosen.words}: a server batches requests as they come. Take --generator vllm "
            '(with vllm_mode="colocate") or --generator hf.'
        )


def refuse_own_server(*, use_vllm: bool, mode: str = "server", base_url: str | None = None) -> None:
    """Raise `UsageError` where plain TRL with `--generator vllm-server` would not ask for the server.

    Args:
        use_vllm, mode, base_url: `use_vllm`, `vllm_mode` and `vllm_server_base_url` of the GRPOConfig.
    """
    if not use_vllm or mode != "server":
        says = f'vllm_mode="{mode}"' if use_vllm else "use_vllm=False"
        raise UsageError(
            f"--generator vllm-server starts a vLLM server, and the setup file says {says}. Add --set use_vllm=true "
            "--set vllm_mode=server, or leave the option out."
        )
    if base_url is not None:
        raise UsageError(
            "--generator vllm-server starts a vLLM server, and the setup file names one that runs already "
            "(vllm_server_base_url). Remove that, or leave the option out."
        )


def choose_generator(asked: str | None, trainer: GRPOTrainer | None, *, on_gpu: bool) -> Capabilities:
    """Choose the engine of the workers.

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
        if asked == HF.name:
            raise UsageError(
                "--generator hf: the model was loaded by Unsloth with fast_inference=True, so it shares its weights "
                "with the vLLM inside. Load it with fast_inference=False (the setup file can read FAST_INFERENCE: set "
                "it to 0)."
            )
        if with_images:
            raise UnsupportedError(f"The training data has images. {NO_IMAGES}")
        return VLLM
    by_default = VLLM if wants_vllm(trainer) or (there and on_gpu and not with_images) else HF
    chosen = ENGINES[asked] if asked else by_default
    if chosen.package == VLLM.package and not there:
        source = f"--generator {asked}" if asked else "use_vllm=True in the setup file"
        raise UsageError(
            f"{source}: vLLM is not installed here. `pip install 'async-grpo[vllm]'` brings it for GPUs (README: "
            "tested versions), scripts/vllm_cpu_env.sh for a CPU; or take --generator hf."
        )
    in_server = trainer is not None and wants_vllm(trainer) and trainer.args.vllm_mode == "server"
    chosen = NAMED_SERVER if chosen == VLLM and in_server else chosen
    if with_images and not chosen.images:
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
