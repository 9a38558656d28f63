"""`--tiny`: the user's architecture with small dimensions and random weights, in place of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from async_grpo.errors import AsyncGRPOError, UnsupportedError

_AT_MOST = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "num_experts_per_tok", "first_k_dense_replace"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "moe_intermediate_size"), 128),
    "head_dim": 16,
}
_WEIGHTS = 0.3  # standard deviation: with less, all tokens are nearly equally likely, and differences do not show


@contextmanager
def cut_down() -> Iterator[None]:
    """Inside this block a `GRPOTrainer` gets a small random model in place of the one that it is given.

    Raises:
        UnsupportedError: the model is loaded by the file itself, or cannot be cut down.
    """
    from transformers import PreTrainedModel
    from trl import GRPOTrainer
    from trl.trainer import grpo_trainer

    build, load, create = (
        GRPOTrainer.__init__,
        vars(PreTrainedModel)["from_pretrained"],
        grpo_trainer.create_model_from_path,
    )

    @wraps(build)
    def build_small(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("quantization_config") is not None:
            raise UnsupportedError("--tiny is for the CPU, where bitsandbytes cannot run: check the file on a GPU.")
        build(self, model if isinstance(model, str) else _small_of(model), *args, **kwargs)

    def create_small(model_id: str, *_: Any, trust_remote_code: bool = False, **kwargs: Any) -> Any:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(model_id, trust_remote_code=trust_remote_code)
        return _made(config, _architecture(config))

    def load_none(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls.can_generate():
            raise UnsupportedError(
                f"The setup file calls {cls.__name__}.from_pretrained itself, so --tiny cannot keep the whole model "
                'out of memory. Give GRPOTrainer its name (model="..."), or check the file without --tiny.'
            )
        return load.__func__(cls, *args, **kwargs)

    GRPOTrainer.__init__, grpo_trainer.create_model_from_path = build_small, create_small
    PreTrainedModel.from_pretrained = classmethod(load_none)
    try:
        yield
    finally:
        GRPOTrainer.__init__, grpo_trainer.create_model_from_path = build, create
        PreTrainedModel.from_pretrained = load


def _small_of(model: Any) -> Any:
    from async_grpo.setup.trl_compat import is_adapter

    if is_adapter(model):
        raise UnsupportedError(
            "--tiny cannot cut down a model that has adapters already. Give GRPOTrainer the name of the model and "
            "peft_config, or check the file without --tiny."
        )
    return _made(model.config, type(model)._from_config)


def _architecture(config: Any) -> Callable[[Any], Any]:
    import transformers

    named = getattr(transformers, (config.architectures or [""])[0], None)
    made: Callable[[Any], Any] = named._from_config if named else transformers.AutoModelForCausalLM.from_config
    return made


def _made(config: Any, architecture: Callable[[Any], Any]) -> Any:
    """A model of the small configuration, the same in every process."""
    import torch

    if hasattr(config, "vision_config"):
        raise UnsupportedError("--tiny cannot cut down a model of images: check the file without --tiny.")
    small = small_config(config)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return architecture(small).float()
    except AsyncGRPOError:
        raise
    except Exception as error:  # a field of an architecture that is not known here
        raise UnsupportedError(
            f"--tiny cannot cut down a {type(config).__name__} ({type(error).__name__}: {error}). Check the file "
            "without --tiny, or with a small model of that architecture."
        ) from error


def small_config(config: Any) -> Any:
    """A copy of the configuration with small dimensions; the vocabulary stays, so the tokenizer fits."""
    fields = config.to_dict()
    heads, kept = fields.get("num_attention_heads"), {name for name in _AT_MOST if isinstance(fields.get(name), int)}
    small = {**fields, **{name: min(fields[name], _AT_MOST[name]) for name in kept}}
    if heads and (shared := fields.get("num_key_value_heads")):
        small["num_key_value_heads"] = max(1, small["num_attention_heads"] * shared // heads)
    if isinstance(kinds := fields.get("layer_types"), list):
        small["layer_types"] = kinds[: small["num_hidden_layers"]]
    if "initializer_range" in fields:
        small["initializer_range"] = _WEIGHTS
    small.pop("quantization_config", None)
    made = type(config).from_dict(small)
    made._name_or_path, made.dtype = config._name_or_path, None
    return made
