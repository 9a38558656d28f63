"""The arithmetic of what fits a GPU, against published configurations and by hand."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from async_grpo.checks.doctor import setup_check
from async_grpo.checks.doctor.finding import Level
from async_grpo.checks.plan import dry_run
from async_grpo.checks.plan.memory import _with_lora as with_lora
from async_grpo.checks.plan.memory import (
    activation_bytes,
    best_change,
    fit_rows,
    kv_bytes_a_token,
    need_of,
    published_bytes,
    size_rows,
    tokens_beside,
    trainer_bytes,
    trainer_fit,
    weight_bytes,
    worker_fit,
)
from async_grpo.checks.plan.trainer_facts import Look, Parameters, Shape, TrainerFacts
from async_grpo.engines.fixed_sizes import LEAST_ROWS, LEAST_TOKENS, rounded
from async_grpo.setup.grpo_config.batch import BatchError, possible_generations
from kit.plans import planned
from kit.trainer_facts import batch, facts

GB = 10**9
GIB = 2**30
LLAMA_2_7B = Shape(
    layers=32, hidden=4096, intermediate=11008, heads=32, kv_heads=32, head_dim=128, vocabulary=32000, element_bytes=2
)
QWEN_7B = replace(LLAMA_2_7B, layers=28, hidden=3584, intermediate=18944, heads=28, kv_heads=4, vocabulary=152064)
LLAMA_31_8B = replace(LLAMA_2_7B, intermediate=14336, kv_heads=8, vocabulary=128256)
GEMMA_3_1B = replace(
    LLAMA_2_7B, layers=26, hidden=1152, intermediate=6912, heads=4, kv_heads=1, head_dim=256, vocabulary=262144
)
OPT_13B = replace(LLAMA_2_7B, layers=40, hidden=5120, intermediate=20480, heads=40, kv_heads=40)


def of_size(count: int, shape: Shape | None, **changes: object) -> TrainerFacts:
    held = Parameters(
        count=count, trained=count, nbytes=2 * count, trained_bytes=2 * count, dtypes={"bfloat16": 2 * count}
    )
    return facts(parameters=held, shape=shape, longest_prompt=0, **changes)


@pytest.mark.parametrize(
    ("numbers", "possible"),
    [
        (batch(2, group=14, processes=7), [2, 7, 14]),
        (batch(2, group=14, processes=7, passes=4), [2, 4, 7, 8, 14, 28, 56]),
        (batch(1, group=2), []),
    ],
)
def test_the_possible_numbers_of_generations(numbers: object, possible: list[int]) -> None:
    assert possible_generations(numbers) == possible  # type: ignore[arg-type]


def test_a_refusal_has_the_whole_list() -> None:
    assert "num_generations can be: 2, 7, 14." in str(BatchError(batch(2, group=8, processes=7)))


# --- published configurations (docs/what_fits.md cites them)


def test_the_kv_cache_of_opt_13b_is_that_of_the_paper_of_vllm() -> None:
    assert kv_bytes_a_token(OPT_13B) == 800 * 1024
    assert tokens_beside(12 * GIB, OPT_13B) == pytest.approx(15_700, rel=0.01)


def test_the_kv_cache_and_the_engine_of_llama_31_8b_are_those_of_unsloth() -> None:
    assert kv_bytes_a_token(LLAMA_31_8B) * 20 * 1024 == 2.5 * GIB
    assert weight_bytes(of_size(8_030_000_000, LLAMA_31_8B).parameters) == pytest.approx(16 * GB, rel=0.01)


@pytest.mark.parametrize(("sequences", "stated", "ours"), [(1, 8.87, 8.58), (2, 10.30, 9.72)])
def test_a_whole_step_on_a_gpu_takes_what_the_notes_of_trl_say(sequences: int, stated: float, ours: float) -> None:
    """SFT of one sequence, and GRPO of the smallest group: TRL 1.15's release notes."""
    of = of_size(999_885_952, GEMMA_3_1B, batch=batch(sequences), max_completion_length=8192)
    gib = need_of(of, on_gpu=True, published=False) / GIB
    assert gib == pytest.approx(ours, abs=0.005) and gib == pytest.approx(stated, rel=0.06)


# --- 7 B with a critic


@functools.cache
def policy_and_critic_of_7b() -> tuple[Parameters, Shape | None, int]:
    """What a dry run reads of the two. They have no weights here."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from async_grpo.checks.plan.trainer_facts import parameters_of, shape_of
    from async_grpo.credit import critic

    sizes = {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
    config = Qwen2Config(**sizes, intermediate_size=18944, vocab_size=152064, tie_word_embeddings=False)
    with torch.device("meta"):
        policy = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return parameters_of(policy), shape_of(policy), critic.parameters_of(policy, None, None, None)


def seven_billion_with_critic(gpus: int) -> TrainerFacts:
    """As `main_ppo` has it by default: fp32 under autocast, micro-batches of 8, 512 + 512 tokens."""
    parameters, shape, critic = policy_and_critic_of_7b()
    return facts(
        parameters=parameters,
        shape=shape,
        trained_besides=critic,
        batch=batch(8, group=1, passes=32, processes=gpus),
        optimizer="adamw_torch_fused",
        precision="bf16",
        longest_prompt=512,
        max_completion_length=512,
        sharded_over=gpus,
        published_in_host_memory=gpus > 1,
    )


def test_policy_and_critic_of_7b_are_what_their_sizes_come_to() -> None:
    of = seven_billion_with_critic(1)
    queries, keys, mlp, norms = 2 * 3584 * 3584 + 3584, 2 * (3584 * 512 + 512), 3 * 3584 * 18944, 2 * 3584
    body = 28 * (queries + keys + mlp + norms) + 152064 * 3584 + 3584
    assert of.parameters.count == of.parameters.trained == body + 152064 * 3584
    assert of.trained_besides == body + 3584 + 1, "a head of one number with a bias in place of the vocabulary's"
    numbers = of.parameters.count + of.trained_besides
    assert trainer_bytes(of) == 16 * numbers + 512, "weight, gradient, AdamW's two, and 64 frequencies, twice"
    of_a_layer = 2 * (6 * 3584 + 4 * 3584 + 4 * 512 + 4 * 18944) + 8 * 3584
    inputs, autocast = 28 * 3584 * 2, 2 * of.parameters.count
    assert activation_bytes(of, on_gpu=True) == 8 * 1024 * (inputs + of_a_layer) + autocast


@pytest.mark.parametrize(("gpus", "fits"), [(1, False), (2, False), (4, False), (6, True), (8, True)])
def test_the_table_of_7b_with_a_critic_is_what_a_dry_run_says(gpus: int, fits: bool) -> None:
    page = (Path(__file__).parents[3] / "docs" / "ppo.md").read_text()
    of = seven_billion_with_critic(gpus)
    held, activations = trainer_bytes(of), activation_bytes(of, on_gpu=True) or 0
    beside = 0 if of.published_in_host_memory else published_bytes(of)
    figures = [held / gpus, beside, activations, held / gpus + beside + activations]
    row = " | ".join([str(gpus), *(f"{figure / GB:.1f} GB" for figure in figures), "yes" if fits else "no"])
    assert f"| {row} |" in page
    assert trainer_fit(of, 80 * GB).fits is fits
    assert f"{figures[-1] / GB:.1f} GB" in trainer_fit(of, 80 * GB).text
    if gpus == 4:
        assert best_change(of).text == "FSDP2 over 8 GPUs instead of 4"


# --- 7 B on 40 GB


def plan_of_the_recipe(name: str) -> TrainerFacts:
    """A row of the table of docs/recipes.md."""
    count, lengths = 7_616_000_000, {"longest_prompt": 512, "max_completion_length": 2048}
    whole = replace(of_size(count, QWEN_7B, batch=batch(1, passes=16), vllm_share=0.85), **lengths)
    wide = replace(whole.parameters, nbytes=4 * count, trained_bytes=4 * count, dtypes={"float32": 4 * count})
    in_fp32 = replace(whole, parameters=wide, published_in_bf16=True)
    plans = {
        "A": with_lora(whole, QWEN_7B),
        "B": replace(whole, sharded_over=2, published_in_host_memory=True),
        "C": replace(whole, sharded_over=4),
        "D": replace(in_fp32, sharded_over=4, published_in_host_memory=True),
    }
    return plans[name]


@pytest.mark.parametrize("plan", ["A", "B", "C", "D"])
def test_the_recipe_of_7b_has_what_a_dry_run_says(plan: str) -> None:
    page = (Path(__file__).parents[3] / "docs" / "recipes.md").read_text()
    (row,) = re.findall(rf"^\| {plan}: .*$", page, re.MULTILINE)
    of = plan_of_the_recipe(plan)
    assert trainer_fit(of, 80 * GB).fits and worker_fit(of, 80 * GB).fits
    held = [f"{need_of(of, on_gpu=True) / GB:.1f} GB"]
    if of.published_in_host_memory:
        held.append(f"{published_bytes(of) / GB:.1f} GB of the host's memory")
    if "the same" not in row:
        found = re.match(r"([\d,]+) tokens .*: ([\d,]+) of", worker_fit(of, 80 * GB).text)
        held += [f"{found[1]} tokens", f"{found[2]} "]
    assert not [figure for figure in held if figure not in row]


@pytest.mark.parametrize(("length", "well"), [(131_072, False), (8_192, True)])
def test_a_sequence_with_the_keys_of_every_head_beside_7b_on_40_gb(length: int, well: bool) -> None:
    answer = worker_fit(of_size(6_738_000_000, LLAMA_2_7B, max_completion_length=length), 40 * GB)
    assert answer.fits is well
    assert ("does NOT fit" in answer.text) is not well


def test_grouped_heads_hold_a_long_sequence_beside_7b_on_40_gb_but_no_group_of_them() -> None:
    answer = worker_fit(of_size(7_616_000_000, QWEN_7B, max_completion_length=131_072), 40 * GB)
    assert answer.fits and "2 of 131,072 at a time" in answer.text


@pytest.mark.parametrize("prompt", [0, 700])
def test_as_many_rows_as_said_fit_the_buffers_of_the_generator_hf_and_no_more(prompt: int) -> None:
    def buffers(rows: int) -> int:
        return rounded(rows, LEAST_ROWS) * rounded(prompt + 2000, LEAST_TOKENS) + rows * prompt

    of = replace(of_size(7_616_000_000, QWEN_7B, max_completion_length=2000), longest_prompt=prompt)
    answers = (worker_fit(it, 40 * GB).text for it in (of, replace(of, vllm_share=0.85)))
    found = [re.match(r"([\d,]+) tokens .* ([\d,]+) of [\d,]+ at a time", answer) for answer in answers]
    (tokens, rows), (_, vllm_rows) = ([int(it.replace(",", "")) for it in each.groups()] for each in found)
    assert buffers(rows) <= tokens < buffers(rounded(rows + 1, LEAST_ROWS))
    assert rows < vllm_rows == tokens // (prompt + 2000)


def test_the_share_that_vllm_gets_is_the_setting_and_raising_it_is_the_advice() -> None:
    of = of_size(7_616_000_000, QWEN_7B, vllm_share=0.3, max_completion_length=8192)
    assert "do NOT fit vllm_gpu_memory_utilization=0.3" in worker_fit(of, 40 * GB).text
    rows = list(fit_rows(of, 40 * GB, elsewhere=1))
    assert any("vllm_gpu_memory_utilization=0.85" in text for _, text in rows)


def test_a_worker_with_vllm_on_the_trainers_gpu_has_weights_of_its_own() -> None:
    """One with the generator hf reads the trainer's in place."""
    plan = planned(master_device="0", worker_devices=("0",))
    of = replace(of_size(1_000_000_000, QWEN_7B, max_completion_length=512), generator="hf")
    in_place, own = (_tokens(dry_run._fit_rows(it, plan, 80 * GB)) for it in (of, replace(of, generator="vllm")))
    assert in_place - own == pytest.approx(2e9 / kv_bytes_a_token(QWEN_7B), abs=1), "2 GB of bf16 weights less"
    less = replace(of, generator="vllm", vllm_share=0.05)
    assert _tokens(dry_run._fit_rows(less, plan, 80 * GB)) == int((4e9 - 2e9) // kv_bytes_a_token(QWEN_7B))


def _tokens(rows: Iterable[tuple[str, str]]) -> int:
    return int(dict(rows)["workers fit"].partition(" tokens")[0].replace(",", ""))


def test_the_trainer_of_7b_does_not_fit_and_the_doctor_warns_with_what_helps_most() -> None:
    of = of_size(7_616_000_000, QWEN_7B, max_completion_length=1024)
    assert not trainer_fit(of, 40 * GB).fits
    change = best_change(of)
    assert change.text.startswith("LoRA") and change.saved > 70 * GB
    found = [line for line in setup_check.judge(Look(facts=of), 0, 10**12, 40 * GB) if line.subject.endswith("fits")]
    assert [line.level for line in found] == [Level.WARNING] and "LoRA" in found[0].fix


def test_a_part_of_each_group_needs_as_much_as_a_smaller_batch() -> None:
    of = of_size(1_000_000, QWEN_7B, batch=batch(8, group=4))
    smaller = replace(of, batch=batch(4, group=4))
    part, less, more = (activation_bytes(it, on_gpu=True) for it in (replace(of, train_of_group=2), smaller, of))
    assert part == less < more


def test_checkpointing_is_what_helps_most_where_activations_rule() -> None:
    of = of_size(1_000_000, QWEN_7B, max_completion_length=4096, gradient_checkpointing=False)
    change = best_change(of)
    assert change.text == "gradient_checkpointing=True"
    before, after = (activation_bytes(other, on_gpu=True) for other in (of, replace(of, gradient_checkpointing=True)))
    assert change.saved == before - after


def test_a_model_of_unknown_shape_is_said_to_be_counted_without_activations() -> None:
    assert "without activations" in trainer_fit(of_size(1000, None), GB).text
    assert list(size_rows(of_size(1000, None), on_gpu=True)) == []
