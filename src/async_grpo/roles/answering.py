"""What the servers of `evaluate` and `generate` share: they publish given weights, which workers answer with.

Nothing is trained. `load_weights` puts those of a checkpoint into the model of the setup file's trainer.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from async_grpo.archive.advantages import AdvantageRule
from async_grpo.archive.disk_space import retry_while_full
from async_grpo.deltas.chain import MODEL, Chain, named_version
from async_grpo.errors import BadFileError, RunDirError, UsageError
from async_grpo.queue import ServerQueue
from async_grpo.roles.parameter_server import ServerOptions, server_of
from async_grpo.rundir import paths as runs
from async_grpo.rundir.files import write_json
from async_grpo.rundir.paths import SERVER, RunDir, RunState
from async_grpo.rundir.reading import read_object
from async_grpo.rundir.run_plan import RunPlan
from async_grpo.settings import Way
from async_grpo.setup.devices import check_torch_sees
from async_grpo.setup.needs import check_needs
from async_grpo.setup.process import StopRequest, gc_paused, own_compile_cache, write_stacks_on_signal
from async_grpo.setup.setup_file import load_trainer
from async_grpo.telemetry.activity import ENDING, LOADING, activity
from async_grpo.telemetry.stalls import StallReporter
from async_grpo.telemetry.waiting import wait_until

if TYPE_CHECKING:
    from trl import GRPOTrainer

    from async_grpo_ipc import WeightExporter

SLOT_WAIT_S = 1800.0
SHOWN = 3  # names of tensors in an error
SCALING = ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")  # no shape tells all of them


@dataclass(frozen=True, slots=True)
class AnswerServer:
    run: RunDir
    plan: RunPlan
    state: RunState
    trainer: GRPOTrainer
    queue: ServerQueue
    weights: PublishedModels
    should_stop: Callable[[], bool]


def rule_of(server: AnswerServer) -> AdvantageRule:
    """How the rewards of a completion are added up; `hyperparameters.json` has it from now on."""
    from async_grpo.training.hyperparameters import hyperparameters

    record = hyperparameters(server.trainer, server.plan.training)
    write_json(server.run.hyperparameters, record)
    return AdvantageRule.from_record(record)


def serve_answers(options: ServerOptions) -> None:
    """Be the server of a prepared run that evaluates models, or samples rows with one.

    Raises:
        AsyncGRPOError: with a text for the user. `run.json` then says `failed`.
    """
    from async_grpo.roles import evaluator, row_sampler

    stop = StopRequest().install()
    run, plan = RunDir(options.run_dir), options.plan
    device, training, stall_s = plan.master_device, plan.training, plan.training.stall_warning
    work, role = (evaluator.evaluate_all, "evaluation") if plan.rows is None else (row_sampler.generate, "generation")
    write_stacks_on_signal(run.stacks(SERVER))
    with server_of(run, role) as (lock, state), _telling_how_it_ended(run):
        activity.publish(run.root, SERVER, device=device, run_id=state.run_id, state=LOADING, stall_after_s=stall_s)
        StallReporter(activity, run.root, stall_s).start()
        own_compile_cache("parameter_server", os.environ)
        check_torch_sees(device)
        with gc_paused():
            trainer = load_trainer(plan.config, engine_here=False, seed=training.seed, config_values=training.set)
        if plan.num_workers:  # those that are started by hand may have another environment
            check_needs(trainer)
        stop.defer()
        run.update_state(of=state.run_id, undo=None)  # a resume is accepted
        with (
            closing(ServerQueue.open(run.root, state.run_id, max_attempts=training.max_attempts, lock=lock)) as queue,
            PublishedModels(trainer, run, plan.weights) as weights,
        ):
            done = work(AnswerServer(run, plan, state, trainer, queue, weights, lambda: stop.requested))
        activity.doing(ENDING)
        result = runs.FINISHED if done else runs.STOPPED
        retry_while_full(lambda: run.update_state(state=result), should_stop=lambda: stop.requested)


@contextmanager
def _telling_how_it_ended(run: RunDir) -> Iterator[None]:
    """Write into `run.json` that the run was stopped or has failed, where the block raises; or undo a resume."""
    try:
        yield
    except BaseException as error:
        if run.read_state() is not None and not run.take_back_resume(None):
            run.update_state(state=runs.STOPPED if isinstance(error, SystemExit) else runs.FAILED)
        raise


class PublishedModels:
    """Publishes one model's weights after another's."""

    def __init__(self, trainer: GRPOTrainer, run: RunDir, way: Way) -> None:
        self._trainer, self._run, self._way = trainer, run, way
        self._exporter: WeightExporter | None = None

    def __enter__(self) -> PublishedModels:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._exporter is not None:
            self._exporter.close()

    def publish(self, version: int, model: str) -> None:
        """`RunDirError` where an earlier process evaluated other weights as this version."""
        from async_grpo_ipc import WeightExporter

        load_weights(self._trainer, model)
        self._require_same(str(version), model)
        if self._exporter is None:
            policy: Any = self._trainer.model
            self._exporter = WeightExporter.from_model(
                policy,
                self._run.weights_handle,
                slots=2,
                # Of adapters the base stays. Another model has other weights also where the setup file freezes them.
                frozen="static" if hasattr(policy, "peft_config") else "changing",
                way=self._way,
            )
        publish = self._exporter.publish
        wait_until(lambda: publish(version) or None, what="a free slot for the weights", timeout_s=SLOT_WAIT_S)

    def _require_same(self, version: str, model: str) -> None:
        digest = model_digest(self._trainer.model)
        known = read_object(self._run.evaluated) if self._run.evaluated.exists() else {}
        before = known.setdefault(version, {"model": model, "weights": digest})
        if before["weights"] != digest:
            raise RunDirError(
                f"{self._run.root} holds the evaluation of {before['model']}, whose weights are not those of {model}. "
                "Choose another --run-dir."
            )
        write_json(self._run.evaluated, known)


def load_weights(trainer: GRPOTrainer, source: str) -> None:
    """Replace the weights of `trainer.model` by those of `source`.

    Args:
        source: a folder that `save_pretrained` or a training run wrote (a whole model, or an adapter for a model that
            has one), a model of the Hugging Face hub, or `RUN_DIR@137`, a version that a run kept.

    Raises:
        UsageError: it cannot be read, or is of another model. The trainer's weights are then undefined.
    """
    model: Any = trainer.model
    if (named := named_version(source)) is not None:
        _load_version(model, Chain(named.folder), named.version, source)
        return
    config = Path(source) / "adapter_config.json"
    is_adapter = config.is_file()
    _compare_adapters(model, config if is_adapter else None, source)
    try:
        weights = _adapter(source) if is_adapter else _whole_model(model, source)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:  # not there, damaged, other shapes
        raise UsageError(f"The weights of {source} cannot be read: {str(error).splitlines()[0]}") from error
    _put(model, weights, source, is_adapter=is_adapter)


def _load_version(model: Any, chain: Chain, version: int, source: str) -> None:
    from async_grpo.deltas.tensors import as_tensors

    is_adapter = chain.about.kind == "adapter"
    _compare_adapters(model, chain.folder / MODEL / "adapter_config.json" if is_adapter else None, source)
    if is_adapter:
        _compare_base(model, chain, source)
    weights = as_tensors(chain.rebuild(version), chain.about.tensors)
    ours = dict(model.named_parameters())
    _compare({name: ours[name] for name in ours if name in weights or not is_adapter}, weights, source)
    for name, tensor in weights.items():
        ours[name].data.copy_(tensor)


def _compare_base(model: Any, chain: Chain, source: str) -> None:
    """The frozen weights that an adapter belongs to."""
    import torch

    from async_grpo.deltas.delta import digest_of
    from async_grpo.deltas.tensors import copied

    parameters = dict(model.named_parameters())
    frozen = [(name, parameters[name].data) for name in sorted(parameters) if not parameters[name].requires_grad]
    in_bf16 = ((name, data.to(torch.bfloat16) if data.is_floating_point() else data) for name, data in frozen)
    found = digest_of(copied(frozen))
    if chain.about.frozen not in (found, digest_of(copied(in_bf16))):  # the run may have published in bf16
        raise UsageError(
            f"{source} is an adapter for another base: its frozen weights have the hash {chain.about.frozen}, those of "
            f"the setup file's model {found}. Load the model that the run was begun with."
        )


def model_digest(model: Any) -> str:
    """SHA-256 over the names and bytes of the model's tensors, hexadecimal."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _adapter(folder: str) -> dict[str, Any]:
    from peft import load_peft_weights

    return load_peft_weights(folder, device="cpu")


def _whole_model(model: Any, source: str) -> dict[str, Any]:
    dtype = next(model.parameters()).dtype
    loaded, report = type(model).from_pretrained(source, dtype=dtype, output_loading_info=True)
    made_up = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}  # by transformers, at random
    return {name: tensor for name, tensor in loaded.state_dict().items() if name not in made_up}


def _put(model: Any, weights: dict[str, Any], source: str, *, is_adapter: bool) -> None:
    if is_adapter:
        from peft import get_peft_model_state_dict, set_peft_model_state_dict

        _compare(get_peft_model_state_dict(model), weights, source)
        set_peft_model_state_dict(model, weights)
    else:
        _compare(model.state_dict(), weights, source)
        _compare_ties(model.state_dict(), weights, source)
        model.load_state_dict(weights)


def _compare(ours: dict[str, Any], theirs: dict[str, Any], source: str) -> None:
    missing, unknown = sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys())
    other = [name for name in sorted(ours.keys() & theirs.keys()) if ours[name].shape != theirs[name].shape]
    for names, what in ((missing, "lacks"), (unknown, "has, unlike the setup file's model,"), (other, "resizes")):
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            raise UsageError(
                f"{source} is a checkpoint of another model than the setup file's: it {what} "
                f"{', '.join(names[:SHOWN])}{more}."
            )


def _compare_ties(ours: dict[str, Any], theirs: dict[str, Any], source: str) -> None:
    """Refuse weights that are one memory here and two there: one of them would be lost."""
    import torch

    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in ours.items():
        other = first.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()), name)
        if other != name and tensor.numel() and not torch.equal(theirs[other], theirs[name]):
            raise UsageError(
                f"{source} is a checkpoint of another model than the setup file's: {other} and {name} are tied in the "
                "setup file's model (tie_word_embeddings), and differ there."
            )


def _compare_adapters(model: Any, config: Path | None, source: str) -> None:
    """Weights of the same shapes are another adapter where they are scaled otherwise.

    config: of the adapter; None: the weights are those of a whole model.
    """
    if (config is not None) != hasattr(model, "peft_config"):
        has, needs = ("an adapter", "no adapter") if config is not None else ("no adapter", "one")
        raise UsageError(f"{source} is {has}, and the model of the setup file has {needs}. Give its own setup file.")
    if config is None:
        return
    try:
        theirs = read_object(config)
    except BadFileError as error:
        raise UsageError(f"The adapter of {source} cannot be read: {error}") from error
    ours = model.peft_config.get("default")
    for name in SCALING:
        if hasattr(ours, name) and name in theirs and getattr(ours, name) != theirs[name]:
            raise UsageError(
                f"{source} is another adapter than the setup file's: {name} is {theirs[name]} there and "
                f"{getattr(ours, name)} here. Set it in the setup file's peft_config."
            )
