"""What the workers' engine draws from, and what ends a completion, is what TRL's own engine would get."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import qwen3_1m
from trl.generation.vllm_generation import VLLMGeneration
from vllm import SamplingParams

from async_grpo.engines import vllm
from async_grpo.engines.vllm_options import sampling_options
from async_grpo.engines.vllm_sampling import parameters
from kit.runs import command
from kit.waiting import until_gone

END, SECOND_END = 40, 33  # of the tokenizer, and one that the model's generation_config names beside it
OF_THE_CONFIG: dict[str, list[Any]] = {
    "temperature": [1.0, 0.7],
    "top_p": [1.0, 0.9],
    "top_k": [0, 5, -1],
    "min_p": [None, 0.05],
    "repetition_penalty": [1.0, 1.2],
    "vllm_structured_outputs_regex": [None, "[0-9]+"],
}
IN_GENERATION_KWARGS: dict[str, list[Any]] = {
    "temperature": [0.0, 0.5],
    "top_k": [3],
    "min_p": [0.1],
    "frequency_penalty": [0.5],
    "presence_penalty": [-0.5],
    "min_tokens": [2],
    "max_tokens": [5],
    "stop": ["12", ["1", "2"]],
    "stop_token_ids": [[3], [3, END]],
    "ignore_eos": [True, False],
    "include_stop_str_in_output": [True],
    "bad_words": [["7"]],
    "logit_bias": [{4: 2.0}],
    "allowed_token_ids": [[1, 2, 3, END]],
    "structured_outputs": [{"regex": "[ab]+"}],
}
SAME = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("max_tokens", "min_tokens", "stop", "ignore_eos", "include_stop_str_in_output", "bad_words", "logit_bias"),
    *("allowed_token_ids", "structured_outputs"),
)


def drawn(seed: int) -> dict[str, Any]:
    """Fields of a `GRPOConfig`."""
    rng = random.Random(seed)
    given = {name: rng.choice(values) for name, values in OF_THE_CONFIG.items()}
    names = rng.sample(sorted(IN_GENERATION_KWARGS), rng.randrange(4))
    return {**given, "generation_kwargs": {name: rng.choice(IN_GENERATION_KWARGS[name]) for name in names} or None}


@pytest.fixture(scope="module")
def trainer() -> Any:
    return qwen3_1m.get_trainer()


def of_trl(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> SamplingParams:
    """Made by TRL's own code, for an engine that only notes them."""
    seen: list[SamplingParams] = []

    class Noting:
        def generate(self, prompts: Any, sampling_params: SamplingParams, **_: Any) -> list[Any]:
            seen.append(sampling_params)
            return []

    monkeypatch.setattr(VLLMGeneration, "_init_vllm", lambda self: None)
    args = trainer.args
    generation = VLLMGeneration(
        model=trainer.model,
        accelerator=trainer.accelerator,
        processing_class=trainer.processing_class,
        structured_outputs_regex=args.vllm_structured_outputs_regex,
        **{name: getattr(args, name) for name in (*SAME[:5], "max_completion_length", "generation_kwargs")},
        logprobs=0,
    )
    generation.llm = Noting()
    generation.generate([[1]], None, 1)
    return seen[0]


def ends(sampling: SamplingParams) -> set[int]:
    return {*(sampling.stop_token_ids or ()), *([] if sampling._eos_token_id is None else [sampling._eos_token_id])}


@pytest.mark.parametrize("seed", range(40))
def test_random_settings(seed: int, trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in drawn(seed).items():
        monkeypatch.setattr(trainer.args, name, value)
    monkeypatch.setattr(trainer, "eos_token_ids", [END, SECOND_END])
    trls = of_trl(trainer, monkeypatch)
    trls.update_from_generation_config({"eos_token_id": [END, SECOND_END]}, END)  # as its engine does, with a tokenizer
    ours = parameters(sampling_options(trainer), every_token=False)
    ours.update_from_generation_config({}, None)  # as the workers' does without one
    trls.top_k = max(0, trls.top_k)  # -1 is off as well
    differ = {name: (mine, theirs) for name in SAME if (mine := getattr(ours, name)) != (theirs := getattr(trls, name))}
    assert not differ
    assert ends(ours) == ends(trls)
    least = ours.min_tokens and ours._all_stop_token_ids
    assert not least or least == trls._all_stop_token_ids


def test_the_fields_that_no_draw_has_are_refused_or_do_not_matter() -> None:
    """A new one in a new vLLM makes this fail until somebody has looked at it."""
    refused = {"n", "seed", "logprobs", "output_kind", "stream_interval", "flat_logprobs"}
    no_tokens_of_it = {"prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start", "logprob_token_ids"}
    text_only = {"detokenize", "skip_special_tokens", "spaces_between_special_tokens", "output_text_buffer_length"}
    passed_on = {"extra_args", "skip_clone", "skip_reading_prefix_cache", "routed_experts_prompt_start"}
    changes_what_is_drawn = {"watermarking", "thinking_token_budget", "trace_decode_token_ids"}  # `setup.sampling`
    ends_loops = {"repetition_detection"}  # passed on
    known = refused | no_tokens_of_it | text_only | passed_on | changes_what_is_drawn | ends_loops
    fields = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    assert fields == known | set(SAME) | {"stop_token_ids"}
    given = SimpleNamespace(args=SimpleNamespace(generation_kwargs={}))
    for name in refused:
        given.args.generation_kwargs = {name: 1}
        with pytest.raises(vllm.UnsupportedError, match=name):
            sampling_options(given)


# --- Plain TRL starts a real vLLM server, which answers; without a GPU TRL cannot send it weights, and the run ends

SETUP = str(Path(__file__).parent / "setups" / "qwen3_1m.py")
OPTIONS = ("--device", "cpu", "--generator", "vllm-server", "--set", "vllm_mode=server")


@pytest.mark.slow
def test_the_server_of_plain_trl_answers_and_ends_with_the_run(tmp_path: Path) -> None:
    log = tmp_path / "run" / "log_vllm_server.txt"
    family: list[psutil.Process] = []
    with command("train", SETUP, "--run-dir", "run", *OPTIONS, cwd=tmp_path, TEST_USE_VLLM="1") as run:
        run.wait_until(lambda: log.exists() and "GET /health" in log.read_text(), "an answer of the server")
        family += run.children()
        assert run.wait() == 2, run.output
    assert "TRL cannot send weights to a vLLM server here" in run.output
    assert not (tmp_path / "run" / "vllm_server").exists()
    until_gone(family)
