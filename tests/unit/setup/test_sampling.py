"""What the sampler draws from, resolved once for each engine, and what is refused of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig

from async_grpo.cli.compute import train
from async_grpo.errors import UnsupportedError
from async_grpo.settings import TrainingSettings
from async_grpo.setup.generator_choice import HF, NAMED_SERVER, STARTED_SERVER, VLLM
from async_grpo.setup.sampling import (
    check_sampling,
    effective_sampling,
    needs_kept_tokens,
    refuse_guided,
    transformers_config,
)
from async_grpo.training.before_start import refuse


def trainer(inherited: dict[str, Any] | None = None, **changes: Any) -> Any:
    """A trainer with what TRL makes of its `GRPOConfig`.

    Args:
        inherited: of the model's own `generation_config`.
    """
    five = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    args = {**five, "generation_kwargs": None, "vllm_structured_outputs_regex": None, **changes}
    five = {name: args[name] for name in five}
    given = {"do_sample": True, "max_new_tokens": 8, **five, **(args["generation_kwargs"] or {})}
    config = GenerationConfig(**given, disable_compile=True)
    model = SimpleNamespace(generation_config=GenerationConfig(**(inherited or {})))
    return SimpleNamespace(args=SimpleNamespace(**args), generation_kwargs=given, generation_config=config, model=model)


@pytest.mark.parametrize("engine", [HF, VLLM, NAMED_SERVER])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.7},
        {"top_k": -1},
        {"top_k": None, "top_p": None} | {"min_p": 0.0},
        {"generation_kwargs": {"max_new_tokens": 4, "temperature": 1.0, "top_k": -1}},
    ],
    ids=str,
)
def test_what_is_off_is_off_however_it_is_written(changes: dict[str, Any], engine: Any) -> None:
    config = trainer(**changes)
    sampling = effective_sampling(config, engine)
    assert sampling.departures() == []
    assert (sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 0, 0.0)
    check_sampling(config, "bypass", engine)


TRUNCATING: list[tuple[dict[str, Any], str]] = [
    ({"top_p": 0.9}, "top_p=0.9"),
    ({"top_k": 20}, "top_k=20"),
    ({"min_p": 0.1}, "min_p=0.1"),
]
DEPARTURES: list[tuple[dict[str, Any], str]] = [
    ({"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
    ({"generation_kwargs": {"temperature": 0.5}}, "temperature=0.5"),
    ({"generation_kwargs": {"do_sample": False}}, "temperature=0.0"),
    ({"generation_kwargs": {"min_new_tokens": 3}}, "min_(new_)?tokens=3"),
]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        *((changes, f"{text}: vLLM's log-probabilities ") for changes, text in DEPARTURES),
        *((changes, f"{text} without top_k.*Set top_k") for changes, text in (TRUNCATING[0], TRUNCATING[2])),
        ({"top_k": 20, "repetition_penalty": 1.1}, "top_k=20, repetition_penalty=1.1: vLLM's .*another distribution"),
    ],
    ids=str,
)
def test_another_distribution_is_refused_with_vllm_wherever_it_is_set(changes: dict[str, Any], said: str) -> None:
    config = trainer(**changes)
    with pytest.raises(UnsupportedError, match=rf"{said}.*--generator hf.*--correction trl"):
        check_sampling(config, "bypass", VLLM)
    check_sampling(config, "none", VLLM)
    check_sampling(config, "trl", VLLM)  # TRL has the same bias


@pytest.mark.parametrize("correction", ["bypass", "decoupled", "tis", "icepop"])
@pytest.mark.parametrize("changes", [{"top_k": 20}, {"top_p": 0.9, "top_k": 512, "min_p": 0.1}], ids=str)
def test_truncated_sampling_with_vllm_needs_the_tokens_that_were_kept(changes: dict[str, Any], correction: str) -> None:
    config = trainer(**changes)
    check_sampling(config, correction, VLLM)
    assert needs_kept_tokens(config, correction, VLLM)
    assert not needs_kept_tokens(config, correction, HF)
    assert not needs_kept_tokens(config, "trl", VLLM) and not needs_kept_tokens(config, "none", VLLM)
    assert not needs_kept_tokens(trainer(), correction, VLLM)


@pytest.mark.parametrize("engine", [NAMED_SERVER, STARTED_SERVER])
@pytest.mark.parametrize(("changes", "text"), TRUNCATING, ids=str)
def test_truncated_sampling_is_refused_with_a_server(changes: dict[str, Any], text: str, engine: Any) -> None:
    with pytest.raises(UnsupportedError, match=rf"{text} with a vLLM server.*does not say which.*--generator vllm "):
        check_sampling(trainer(**changes), "tis", engine)
    check_sampling(trainer(**changes), "none", engine)


def test_an_evaluation_without_top_k_is_refused_beside_truncated_training_with_vllm() -> None:
    truncated, evaluated = trainer(top_k=20), {"temperature": 0.6, "top_p": 0.95, "top_k": 0}
    with pytest.raises(UnsupportedError, match=r"--eval-top-k 0: .*--eval-top-k a number"):
        check_sampling(truncated, "bypass", VLLM, evaluated)
    check_sampling(truncated, "bypass", VLLM, {**evaluated, "temperature": 0.0})
    check_sampling(truncated, "bypass", VLLM, {**evaluated, "top_k": 20})
    check_sampling(truncated, "bypass", HF, evaluated)
    check_sampling(trainer(), "bypass", VLLM, evaluated)


@pytest.mark.parametrize(("changes", "text"), [*TRUNCATING, *DEPARTURES], ids=str)
def test_another_distribution_is_trained_on_with_transformers(changes: dict[str, Any], text: str) -> None:
    """Its log-probabilities are of the full softmax, as the loss's are, so the ratio of fresh rollouts is 1."""
    config = trainer(**changes)
    assert len(effective_sampling(config, HF).departures()) == 1
    for correction in ("bypass", "decoupled", "none"):
        check_sampling(config, correction, HF)
        check_sampling(config, correction, None)  # the workers' engine may be transformers


@pytest.mark.parametrize(
    ("name", "value"), [("min_p", 0.3), ("typical_p", 0.9), ("no_repeat_ngram_size", 2), ("suppress_tokens", [3])]
)
def test_transformers_inherits_from_the_model_what_nobody_has_set(name: str, value: Any) -> None:
    config = trainer(inherited={name: value})
    assert effective_sampling(config, HF).departures() == [f"{name}={value!r}"]
    assert effective_sampling(config, VLLM).departures() == [], "it takes what it is given, and nothing else"
    assert getattr(transformers_config(config), name) == value


@pytest.mark.parametrize("name", ["typical_p", "top_h"])
def test_what_cuda_cannot_sum_deterministically_is_refused_by_name(name: str) -> None:
    config = trainer(generation_kwargs={name: 0.5})
    config.accelerator = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    with pytest.raises(UnsupportedError, match=rf"^{name}=0.5 with --deterministic on a GPU"):
        check_sampling(config, "bypass", HF, deterministic=True)
    check_sampling(config, "bypass", HF)
    config.accelerator.device.type = "cpu"
    check_sampling(config, "bypass", HF, deterministic=True)


def test_what_trl_sets_is_not_inherited() -> None:
    config = trainer(inherited={"temperature": 0.6, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05})
    assert effective_sampling(config, HF).departures() == []


@pytest.mark.parametrize(
    "name", ["frequency_penalty", "presence_penalty", "logit_bias", "structured_outputs", "thinking_token_budget"]
)
def test_settings_of_vllm_alone(name: str) -> None:
    config = trainer(generation_kwargs={name: {1: 2.0}})
    with pytest.raises(UnsupportedError, match=rf"{name}.*those of another distribution"):
        check_sampling(config, "bypass", VLLM)
    with pytest.raises(UnsupportedError, match=rf"generation_kwargs has '{name}'.*does not know.*--generator vllm"):
        check_sampling(config, "none", HF)


def test_a_regex_needs_vllm_and_changes_what_is_drawn() -> None:
    config = trainer(vllm_structured_outputs_regex="[0-9]+")
    with pytest.raises(UnsupportedError, match=r"needs vLLM.*--generator vllm"):
        check_sampling(config, "none", HF)
    with pytest.raises(UnsupportedError, match=r"vllm_structured_outputs_regex.*another distribution"):
        check_sampling(config, "bypass", VLLM)
    check_sampling(config, "none", VLLM)
    check_sampling(config, "none", None)  # some engine can


@pytest.mark.parametrize("name", ["num_beams", "prompt_lookup_num_tokens"])
def test_decoding_that_is_not_sampling_is_refused_with_where_it_comes_from(name: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"{name}=4 in generation_kwargs.*would ignore it"):
        check_sampling(trainer(generation_kwargs={name: 4}), "none", HF)
    with pytest.raises(UnsupportedError, match=rf"{name}=4 in the model's generation_config"):
        check_sampling(trainer(inherited={name: 4}), "none", HF)


def guided(**changes: Any) -> Any:
    user = trainer(**changes)
    user.guidance = SimpleNamespace(sampling={})
    return user


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_p": 0.9}, r"top_p=0.9 with guidance: values are of the untruncated sampler. Set top_p to 1"),
        ({"top_k": 20}, "top_k=20 with guidance"),
        ({"min_p": 0.1}, r"min_p=0.1 with guidance"),
        ({"repetition_penalty": 1.2}, r"repetition_penalty=1.2 with guidance"),
        ({"generation_kwargs": {"no_repeat_ngram_size": 3}}, "no_repeat_ngram_size=3 with guidance"),
    ],
)
def test_guidance_is_of_the_untruncated_sampler(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        check_sampling(guided(**changes), "trl", HF)


def test_guidance_is_for_the_workers_own_model_and_a_single_turn() -> None:
    check_sampling(guided(temperature=0.7), "trl", HF)
    for engine in (VLLM, NAMED_SERVER, STARTED_SERVER):
        with pytest.raises(UnsupportedError, match=f"guided sampler with {engine.words}: vLLM takes"):
            check_sampling(guided(), "trl", engine)
    for name in ("tools", "environment_factories", "rollout_func"):
        user = guided()
        setattr(user, name, [print])
        with pytest.raises(UnsupportedError, match=f"{name} with guidance: it is for a single turn"):
            check_sampling(user, "trl", HF)
    user = guided()
    user.model.peft_config = {}
    with pytest.raises(UnsupportedError, match="An adapter with guidance"):
        check_sampling(user, "trl", HF)


def test_a_guided_trainer_is_not_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither on workers nor by TRL alone."""
    refuse_guided(trainer())
    refused = "A guided sampler is not the policy that the loss updates; evaluate"
    with pytest.raises(UnsupportedError, match=refused):
        refuse(guided(), TrainingSettings(), None)
    monkeypatch.setattr("async_grpo.setup.setup_file.load_trainer", lambda *_, **__: guided())
    monkeypatch.setattr("async_grpo.setup.needs.check_needs", lambda _: None)
    with pytest.raises(UnsupportedError, match=refused):
        train._train_alone(train.build_parser().parse_args(["guided.py"]), None, None, serves=False)


def test_stop_strings_need_vllm() -> None:
    config = trainer(generation_kwargs={"stop_strings": ["</a>"]})
    with pytest.raises(UnsupportedError, match=r"tokenizer.*--generator vllm"):
        check_sampling(config, "bypass", HF)
    check_sampling(config, "bypass", VLLM)
