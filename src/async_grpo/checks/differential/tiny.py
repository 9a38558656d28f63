"""`--tiny`: the user's architecture with small dimensions and random weights, in place of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

from async_grpo.errors import AsyncGRPOError, UnsupportedError
from async_grpo.setup.replaced import instead

_AT_MOST = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "num_experts_per_tok", "first_k_dense_replace"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "moe_intermediate_size"), 128),
    "head_dim": 16,
}
_QUANTISED = (
    "--tiny makes a model that is not quantised, so it would check another training. Check the file without it."
)
_GENERATE = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM")
_WEIGHTS = 0.3  # standard deviation: with less, all tokens are nearly equally likely, and differences do not show


@contextmanager
def cut_down() -> Iterator[None]:
    """Inside this block a `GRPOTrainer` gets a small random model in place of the one that it is given.

    Raises:
        UnsupportedError: the model is loaded by the file itself, or cannot be cut down.
    """
    import transformers
    from trl import GRPOTrainer
    from trl.trainer import grpo_trainer

    build = GRPOTrainer.__init__
    kinds = [kind for name in ("PreTrainedModel", *_GENERATE) if (kind := getattr(transformers, name, None))]
    loading = {next(it for it in kind.__mro__ if "from_pretrained" in vars(it)) for kind in kinds}

    @wraps(build)
    def build_small(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("quantization_config") is not None:
            raise UnsupportedError(_QUANTISED)
        build(self, model if isinstance(model, str) else _small_of(model), *args, **kwargs)

    with ExitStack() as changed:
        changed.enter_context(instead(GRPOTrainer, __init__=build_small))
        changed.enter_context(instead(grpo_trainer, create_model_from_path=_created))
        for kind in loading:
            small = classmethod(partial(_load, kind.from_pretrained.__func__))
            changed.enter_context(instead(kind, from_pretrained=small))
        yield


def _created(model_id: str, *_: Any, trust_remote_code: bool = False, **kwargs: Any) -> Any:
    """In place of TRL's loading of a policy or a reference by its name: the small model, from the configuration."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(model_id, trust_remote_code=trust_remote_code)
    if kwargs.get("quantization_config") is not None or hasattr(config, "quantization_config"):
        raise UnsupportedError(_QUANTISED)
    named = getattr(transformers, (config.architectures or [""])[0], None)
    return _made(config, named._from_config if named else transformers.AutoModelForCausalLM.from_config)


def _load(load: Callable[..., Any], kind: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of `from_pretrained`: models that do not generate, such as those of rewards, are loaded."""
    generates = kind.can_generate() if hasattr(kind, "can_generate") else kind.__name__ in _GENERATE
    if generates:
        raise UnsupportedError(
            f"The setup file calls {kind.__name__}.from_pretrained itself, so --tiny cannot keep the whole model out "
            'of memory. Give GRPOTrainer its name (model="..."), or check the file without --tiny.'
        )
    return load(kind, *args, **kwargs)


def _small_of(model: Any) -> Any:
    from async_grpo.setup.trl_compat import is_adapter

    if is_adapter(model):
        raise UnsupportedError(
            "--tiny cannot cut down a model that has adapters already. Give GRPOTrainer the name of the model and "
            "peft_config, or check the file without --tiny."
        )
    return _made(model.config, type(model)._from_config)


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
    made = type(config).from_dict(small)
    made._name_or_path, made.dtype = config._name_or_path, None
    return made
