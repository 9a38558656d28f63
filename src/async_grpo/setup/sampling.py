"""What the sampler draws from: every setting that changes it, resolved once for the trainer's side and the workers.

The settings come from the `GRPOConfig`, its `generation_kwargs`, and with transformers also from the model's own
`generation_config`, which fills what nobody has set. `effective_sampling` resolves them, `check_sampling` decides what
each engine may do with them: it is the only module that does. It also refuses code of the user's that an engine would
go round.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from async_grpo.errors import UnsupportedError
from async_grpo.setup.generator_choice import HF, VLLM, Capabilities, wants_vllm
from async_grpo.setup.replaced import of_libraries
from async_grpo.setup.trl_compat import is_adapter

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import GenerationConfig, LogitsProcessorList
    from trl import GRPOTrainer

WITHOUT_SAMPLER = ("none", "trl")  # corrections that take the sampler's log-probabilities as TRL does, or not at all
_BESIDE_THE_LOOP = ("_sample",)  # the workers' own loop takes its place
_ONLY_IN_TRANSFORMERS = ("generate", "_sample", "_get_logits_processor", "_get_stopping_criteria")
_NEUTRAL: dict[str, Any] = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
_TRUNCATING = ("top_p", "top_k", "min_p")
# By the engine's own names: what else changes the distribution, with the value that turns it off (None always does).
_OTHERS_HF: dict[str, Any] = {
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "guidance_scale": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "bad_words_ids": [],
    **dict.fromkeys(("top_h", "forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty")),
    **dict.fromkeys(("sequence_bias", "watermarking_config")),
}
_OTHERS_VLLM: dict[str, Any] = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "min_tokens": 0,
    "watermarking": False,
    **dict.fromkeys(("logit_bias", "allowed_token_ids", "bad_words", "structured_outputs", "logits_processors")),
    **dict.fromkeys(("thinking_token_budget", "trace_decode_token_ids")),
}
_HF_NAMES_IN_VLLM = {"min_new_tokens": "min_tokens"}
_SUMMED_AS_FLOATS = ("typical_p", "top_h")  # by torch.cumsum, which CUDA has no deterministic kernel of
# Ways of decoding that are no sampling of one token after another, and what turns them off.
_NOT_SAMPLING: dict[str, Any] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), 1),
    **dict.fromkeys(("penalty_alpha", "dola_layers", "prompt_lookup_num_tokens", "constraints", "force_words_ids")),
    **dict.fromkeys(("use_mtp", "token_healing"), False),
    "assistant_early_exit": None,
}


class Guided(Protocol):
    """What a trainer has as `guidance` whose evaluations are decoded by more than its model (`guided`)."""

    sampling: Mapping[str, Any]  # what jobs are sampled with where nobody says otherwise, as `Job.sampling`

    def processors(
        self,
        sampling: Mapping[str, Any],
        model: Any,
        tokenizer: Any,
        *,
        attention_mask: Tensor | None,
        temperature: float,
    ) -> LogitsProcessorList:
        """The logits processors of one batch, new for each: they come before the temperature (0: greedy)."""
        ...


def guidance_of(trainer: Any) -> Guided | None:
    """What guides the decoding of this trainer's evaluations; None: its model alone decodes."""
    return getattr(trainer, "guidance", None)


def refuse_guided(trainer: Any) -> None:
    """Raise `UnsupportedError` where a trainer that is to be trained is guided."""
    if guidance_of(trainer) is not None:
        raise UnsupportedError(
            "A guided sampler is not the policy that the loss updates; evaluate with it, or leave `guided` out of the "
            "setup file."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a token is drawn. What is off has its neutral value, however the user wrote it."""

    temperature: float  # 0: the most likely token, always
    loss_temperature: float  # of the log-probabilities that the loss computes
    top_p: float = 1.0
    top_k: int = 0  # 0: every token
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    regex: str | None = None
    others: Mapping[str, Any] = field(default_factory=dict)  # by the engine's names, only what is not off

    @property
    def truncation(self) -> list[str]:
        """What leaves out the less likely tokens, as `name=value`."""
        return [f"{name}={value!r}" for name in _TRUNCATING if (value := getattr(self, name)) != _NEUTRAL[name]]

    def departures(self) -> list[str]:
        """What makes the sampler draw from another distribution than the loss computes, as `name=value`."""
        own = {name: value for name in _NEUTRAL if (value := getattr(self, name)) != _NEUTRAL[name]}
        if self.temperature != self.loss_temperature:
            own = {"temperature": self.temperature, **own}
        if self.regex is not None:
            own["vllm_structured_outputs_regex"] = self.regex
        return [f"{name}={value!r}" for name, value in {**own, **self.others}.items()]


def effective_sampling(trainer: GRPOTrainer, engine: Capabilities) -> Sampling:
    """Resolve what this engine draws from.

    Raises:
        UnsupportedError: the engine cannot do what a setting says.
    """
    args: Any = trainer.args
    settings, others = _of_transformers(trainer) if engine.package == HF.package else _of_vllm(args)
    sampled = settings.pop("do_sample", True)
    return Sampling(
        temperature=_value(settings, "temperature", 1.0) if sampled else 0.0,
        loss_temperature=float(args.temperature),
        top_p=_value(settings, "top_p", 1.0),
        top_k=max(0, int(_value(settings, "top_k", 0))),  # vLLM's -1 is off as well
        min_p=_value(settings, "min_p", 0.0),
        repetition_penalty=_value(settings, "repetition_penalty", 1.0),
        regex=args.vllm_structured_outputs_regex,
        others={name: settings[name] for name, off in others.items() if settings.get(name) not in (None, off)},
    )


def check_sampling(
    trainer: GRPOTrainer,
    correction: str,
    engine: Capabilities | None,
    evaluated_with: Mapping[str, Any] | None = None,
    *,
    deterministic: bool = False,
) -> None:
    """Refuse, before anything is started, sampling that would make the loss wrong silently, or not be the user's.

    Args:
        engine: None where it is not known: then only what is refused for every engine; the workers check again.
        evaluated_with: the sampling settings of evaluations, where there are any.

    Raises:
        UnsupportedError: the engine cannot do it, or not with this correction.
    """
    if guidance_of(trainer) is not None:
        _check_guided(trainer, engine)
    if engine is None:
        with suppress(UnsupportedError):
            _check(effective_sampling(trainer, VLLM), correction, VLLM)
            return
        engine = HF
    else:
        check_generation(trainer, engine)
    sampling = effective_sampling(trainer, engine)
    if deterministic and trainer.accelerator.device.type == "cuda":
        _check_deterministic(sampling)
    if evaluated_with and needs_kept_tokens(trainer, correction, engine):
        _check_evaluation(evaluated_with)
    _check(sampling, correction, engine)


def _check(sampling: Sampling, correction: str, engine: Capabilities) -> None:
    if sampling.regex is not None and not engine.regex:
        raise UnsupportedError(
            "vllm_structured_outputs_regex needs vLLM: transformers has no structured outputs, so completions would "
            "not follow it. Take --generator vllm, or remove it."
        )
    departures = sampling.departures()
    if not departures or correction in WITHOUT_SAMPLER or engine.full_softmax:
        return
    if departures == sampling.truncation:
        _check_truncation(sampling, engine)
    else:
        raise UnsupportedError(
            f"{', '.join(departures)}: vLLM's log-probabilities are then those of another distribution than the loss "
            "computes, so the ratio between them is biased, stale or not. Remove it from the GRPOConfig or its "
            "generation_kwargs (the GRPOConfig's temperature is fine), or take --generator hf, whose log-probabilities "
            "are of the full softmax as the loss's, or --correction trl, which has that bias as TRL has it, or none, "
            "which ignores the sampler's."
        )


def _check_guided(trainer: Any, engine: Capabilities | None) -> None:
    if engine is not None and not engine.guided:
        raise UnsupportedError(
            f"A guided sampler with {engine.words}: vLLM takes logits processors when an engine starts, not with a "
            "request, and has no keys and values for a value model. Take --generator hf."
        )
    turns = {name: getattr(trainer, name, None) for name in ("tools", "environment_factories", "rollout_func")}
    if found := [name for name, value in turns.items() if value]:
        raise UnsupportedError(f"{found[0]} with guidance: it is for a single turn. Leave one of them out.")
    if is_adapter(trainer.model):
        raise UnsupportedError("An adapter with guidance: a head is of a model's own weights. Merge the adapter.")
    changed = [one for one in effective_sampling(trainer, HF).departures() if not one.startswith("temperature=")]
    if changed:
        raise UnsupportedError(
            f"{', '.join(changed)} with guidance: values are of the untruncated sampler. Set top_p to 1, top_k to 0 "
            "and min_p to None in the GRPOConfig, and remove what else changes the distribution."
        )


def _check_deterministic(sampling: Sampling) -> None:
    if found := [f"{name}={sampling.others[name]!r}" for name in _SUMMED_AS_FLOATS if name in sampling.others]:
        raise UnsupportedError(
            f"{', '.join(found)} with --deterministic on a GPU: transformers sums probabilities for it with "
            "torch.cumsum, which has no deterministic kernel for floats there. Remove it (top_p is summed in integers "
            "here), or leave out --deterministic."
        )


def _check_truncation(sampling: Sampling, engine: Capabilities) -> None:
    """Refuse what vLLM could not name the kept tokens of, over which the loss is computed."""
    found = ", ".join(sampling.truncation)
    if not engine.names_kept:
        raise UnsupportedError(
            f"{found} with a vLLM server: its log-probabilities are over the tokens that it kept, and the loss is to "
            "be computed over the same, but a server does not say which they are to TRL's client. Take --generator "
            'vllm (in the GRPOConfig vllm_mode="colocate"), whose engines are in the workers; or --generator hf, whose '
            "log-probabilities are of the full softmax as the loss's; or --correction trl or none."
        )
    if sampling.top_k == 0:
        raise UnsupportedError(
            f"{found} without top_k: vLLM's log-probabilities are over the tokens that it kept, and the loss is to be "
            "computed over the same, but vLLM says which they are only with top_k > 0. Set top_k in the GRPOConfig as "
            "well: 512 rarely leaves out what top_p keeps. Or take --generator hf, whose log-probabilities are of the "
            "full softmax as the loss's, or --correction trl or none."
        )


def _check_evaluation(sampling: Mapping[str, Any]) -> None:
    if sampling["temperature"] > 0 and sampling["top_k"] == 0:
        raise UnsupportedError(
            "--eval-top-k 0: the run trains with truncated sampling, so its vLLM engines name the tokens that they "
            "kept, and vLLM does that with top_k > 0 only, in evaluations too. Give --eval-top-k a number, or take "
            "--generator hf."
        )


def needs_kept_tokens(trainer: GRPOTrainer, correction: str, engine: Capabilities) -> bool:
    """Whether the engine has to say which tokens it kept, so that the loss can be computed over them."""
    able = engine.names_kept and correction not in WITHOUT_SAMPLER
    return able and bool(effective_sampling(trainer, engine).truncation)


def transformers_config(trainer: GRPOTrainer) -> GenerationConfig:
    """The `GenerationConfig` to sample with: TRL's, completed from the model's own, with `top_k=-1` as off."""
    trl: Any = trainer
    config: GenerationConfig = copy.deepcopy(trl.generation_config)
    inherited = trl.model.generation_config.to_dict()
    config.update(**inherited, defaults_only=True, allow_custom_entries=True)  # as `generate` would
    if config.top_k is not None and config.top_k < 0:
        config.top_k = 0
    return config


def _of_transformers(trainer: GRPOTrainer) -> tuple[dict[str, Any], dict[str, Any]]:
    given: dict[str, Any] = trainer.args.generation_kwargs or {}
    config = transformers_config(trainer)
    if unknown := sorted(set(given) - set(vars(type(config)()))):
        raise UnsupportedError(
            f"generation_kwargs has {unknown[0]!r}, which transformers does not know, so it would be ignored. Remove "
            "it, or take --generator vllm if it is vLLM's."
        )
    settings = dict(vars(config))
    if settings.get("stop_strings") is not None:
        raise UnsupportedError(
            "stop_strings: transformers needs the tokenizer to find them, which TRL does not give to `generate`. "
            "Remove them, or take --generator vllm."
        )
    for name, off in _NOT_SAMPLING.items():
        if settings.get(name) not in (None, off):
            where = "generation_kwargs" if name in given else "the model's generation_config"
            raise UnsupportedError(
                f"{name}={settings[name]!r} in {where}: workers sample one token after another, so they would ignore "
                f"it. Set it to {off!r} there, or train in one process (without --distributed)."
            )
    return settings, _OTHERS_HF


def _of_vllm(args: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    given = {_HF_NAMES_IN_VLLM.get(name, name): value for name, value in (args.generation_kwargs or {}).items()}
    own = {name: getattr(args, name) for name in ("temperature", *_NEUTRAL)}
    return {**own, **given}, _OTHERS_VLLM


def _value(settings: dict[str, Any], name: str, off: float) -> float:
    value = settings.get(name)
    return off if value is None else value


def check_generation(trainer: GRPOTrainer, engine: Capabilities) -> None:
    """Refuse what plain TRL would generate with, and the workers' engine would not.

    Raises:
        UnsupportedError: with the name of it and the way out.
    """
    if engine.in_place:
        for name in _replaced_in(trainer.model, _BESIDE_THE_LOOP):
            raise UnsupportedError(
                f"The model's {name} is not transformers' own, and workers sample with a loop of theirs, so it would "
                "be ignored. Sample in a logits processor (_get_logits_processor of the model) or in rollout_func, or "
                "train in one process (without --distributed)."
            )
    elif not wants_vllm(trainer):
        for name in _replaced_in(trainer.model, _ONLY_IN_TRANSFORMERS):
            raise UnsupportedError(
                f"The model's {name} is not transformers' own, and vLLM would ignore it. Take --generator hf."
            )
        for name in _set_later(trainer):
            raise UnsupportedError(
                f"{name} of trainer.generation_config was set after the trainer was built, and vLLM samples by the "
                "GRPOConfig. Set it there, or in its generation_kwargs, or take --generator hf."
            )


def _replaced_in(model: Any, names: tuple[str, ...]) -> list[str]:
    base = model.get_base_model() if is_adapter(model) else model
    return [name for name in names if not of_libraries(getattr(base, name, None))]


def _set_later(trainer: Any) -> list[str]:
    """What `generation_config` has otherwise than TRL made it."""
    from transformers import GenerationConfig

    if getattr(trainer, "generation_config", None) is None:  # TRL makes none for an engine inside the model
        return []
    built = vars(GenerationConfig(**trainer.generation_kwargs, disable_compile=True))
    now = vars(trainer.generation_config)
    return [name for name in now if now[name] != built.get(name) and not name.startswith("_")]
