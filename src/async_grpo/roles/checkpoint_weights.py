"""Put the weights of a checkpoint into the model of a trainer that a setup file returned."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from async_grpo.deltas.chain import MODEL, Chain
from async_grpo.deltas.chain_folder import named_version
from async_grpo.errors import BadFileError, UsageError
from async_grpo.rundir.reading import read_object

if TYPE_CHECKING:
    from trl import GRPOTrainer

SHOWN = 3  # names of tensors in an error
SCALING = ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")  # no shape tells all of them


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

    found: dict[str, Any] = load_peft_weights(folder, device="cpu")
    return found


def _whole_model(model: Any, source: str) -> dict[str, Any]:
    dtype = next(model.parameters()).dtype
    loaded, report = type(model).from_pretrained(source, dtype=dtype, output_loading_info=True)
    found: dict[str, Any] = loaded.state_dict()
    made_up = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}  # by transformers, at random
    return {name: tensor for name, tensor in found.items() if name not in made_up}


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
