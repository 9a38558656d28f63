"""Training steps that compute no padding: the same losses and gradients as TRL's, by fewer tokens."""

from __future__ import annotations

import inspect
import json
import os
import random
import re
import sys
from pathlib import Path
from subprocess import PIPE, Popen
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from differential_rows import ACCUMULATING, UNEVEN
from matrix import Row, build
from peft import PromptTuningConfig
from trl import GRPOTrainer

from async_grpo.credit import PPOConfig, PPOTrainer
from async_grpo.setup import pieces
from async_grpo.tasks.gradients import OF_BATCHES, OF_ROWS, OF_TOKENS
from async_grpo.training.corrections.kept_log_probs import IDS, SIZES
from async_grpo.training.padding import METRIC, Unpadded, computes_pieces, dealt_by_length, exchanging
from kit.compared_with_trl import TOLERANCE, comparable, largest_difference, settings
from kit.in_process import InProcessRun, training_logs
from kit.recorded_batches import replay_with_trl
from kit.tiny_trainer import build_model, build_tokenizer, build_trainer

DEADLINE_S = 300
TOKENIZER = build_tokenizer()
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
FAMILIES: dict[str, tuple[Row, str]] = {  # and which padding is left out
    **{name: (Row(family=name), "both") for name in ("qwen3", "mixtral", "bloom", "mamba2", "lfm2")},
    "gemma3_text": (Row(family="gemma3_text", model={"sliding_window": 16}), "both"),
    "opt": (Row(family="opt"), "both"),  # positions count what is there
    "gpt2": (Row(family="gpt2"), "right"),
    "virtual tokens": (Row(peft=PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)), "right"),
    "recurrent_gemma": (Row(family="recurrent_gemma", model={"attention_window_size": 16}), "right"),
    "llama": (Row(family="llama", model={"max_position_embeddings": 40, "rope_parameters": DYNAMIC}), "none"),
}


@pytest.fixture(autouse=True)
def every_piece_is_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "CALLS", 0.0)


class Plain(Unpadded, GRPOTrainer):
    """What a user's file may have, for plain TRL in one process."""


# --- Log-probabilities, entropies and gradients, by architecture


def rows(count: int = 8) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Ids, mask and the number of columns of completions."""
    chance = random.Random(0)
    lengths = [(chance.randint(2, 30), chance.choice([1, 5, 20, 80])) for _ in range(count)]
    prompt, keep = max(p for p, _ in lengths), max(c for _, c in lengths)
    ids = torch.full((count, prompt + keep), TOKENIZER.pad_token_id)
    mask = torch.zeros_like(ids)
    for row, (before, behind) in enumerate(lengths):
        for column in range(prompt - before, prompt + behind):
            ids[row, column], mask[row, column] = chance.randrange(90), 1
    return ids, mask, keep


def answered(trainer: Any, padding: str, **asked: Any) -> tuple[Any, ...]:
    """Log-probabilities, entropies, and the gradient of both."""
    trainer.padding, trainer._pieces = padding, None
    trainer.model.zero_grad()
    ids, mask, keep = rows()
    logprobs, entropies, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model, ids, mask, keep, compute_entropy=True, **asked
    )
    (logprobs.mul(torch.linspace(-1, 1, keep)).sum() + entropies.sum()).backward()
    grads = [it.grad for it in trainer.model.parameters() if it.grad is not None]
    return logprobs.detach(), entropies.detach(), torch.cat([grad.flatten() for grad in grads])


def noted_shapes(model: Any) -> list[torch.Size]:
    """The shapes that the model's forward passes will get."""
    shapes: list[torch.Size] = []
    model.register_forward_pre_hook(lambda _, __, asked: shapes.append(asked["input_ids"].shape), with_kwargs=True)
    return shapes


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_model_says_the_same_without_the_padding_that_it_does_not_read(kind: str, tmp_path: Path) -> None:
    row, left_out = FAMILIES[kind]
    given = {"peft_config": row.peft} if row.peft else {}
    trainer: Any = build_trainer(tmp_path, model=build(row), trainer_class=Plain, arguments=given)
    trainer.model.train()
    ours, trls = (answered(trainer, padding) for padding in ("none", "trl"))
    for mine, reference in zip(ours[:2], trls[:2], strict=True):
        assert mine.shape == reference.shape
        torch.testing.assert_close(mine, reference, atol=2e-5, rtol=0)
    torch.testing.assert_close(ours[2], trls[2], atol=1e-5 * float(trls[2].abs().max()), rtol=0)
    fraction, whole = trainer._metrics["train"][METRIC]
    assert {"both": fraction < 1.15, "right": 1.15 < fraction < 0.8 * whole, "none": fraction == whole}[left_out]


def test_attention_takes_no_mask_and_no_prompt_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer: Any = build_trainer(tmp_path, trainer_class=Plain)
    answered_rows(trainer)  # with the trial
    attention, masks, labels = torch.nn.functional.scaled_dot_product_attention, [], []

    def noted(*given: Any, **asked: Any) -> Any:
        masks.append((asked["attn_mask"], asked["is_causal"]))
        return attention(*given, **asked)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    trainer.model.register_forward_pre_hook(lambda _, __, asked: labels.append(asked["labels"]), with_kwargs=True)
    answered_rows(trainer)
    assert len(masks) > 2 and set(masks) == {(None, True)}
    _, mask, keep = rows(24)
    assert sum(int((each != -100).sum()) for each in labels) == mask[:, -keep:].sum()


def test_the_passes_of_old_and_reference_policies_have_no_more_tokens_than_trls(tmp_path: Path) -> None:
    trainer: Any = build_trainer(tmp_path, trainer_class=Plain)
    given = noted_shapes(trainer.model)
    with torch.no_grad():
        logprobs = answered_rows(trainer, batch_size=2)
    assert max(shape.numel() for shape in given) <= 2 * rows(24)[0].shape[1]
    assert any(shape[0] > 2 for shape in given[3:]), "of short rows, more at a time"
    trainer.padding, trainer._pieces = "trl", None
    with torch.no_grad():
        torch.testing.assert_close(logprobs, answered_rows(trainer, batch_size=2), atol=2e-5, rtol=0)


def answered_rows(trainer: Any, **asked: Any) -> torch.Tensor:
    ids, mask, keep = rows(24)
    return trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, keep, **asked)[0]


# --- Whole trainings: more are in `differential_rows`


def test_plain_trl_takes_the_class_too_and_a_run_of_it_is_the_same(tmp_path: Path) -> None:
    changes = {**UNEVEN, **ACCUMULATING, "trainer_class": Plain}
    run = InProcessRun(settings(tmp_path, **changes)).train()
    plain = replay_with_trl(settings(tmp_path, **changes), run.batches)
    theirs = [{name: value for name, value in entry.items() if name != METRIC} for entry in training_logs(plain)]
    assert largest_difference(run.logs, theirs) < TOLERANCE
    assert [entry[METRIC] for entry in run.logs] == [entry[METRIC] for entry in training_logs(plain)]


def test_a_critic_computes_no_padding_either(tmp_path: Path) -> None:
    changes = {**UNEVEN, **ACCUMULATING, "trainer_class": PPOTrainer, "config_class": PPOConfig}
    run = InProcessRun(settings(tmp_path, **changes)).train()
    critic = run.trainer.critic
    given = noted_shapes(critic.model)
    batch = run.trainer._buffered_inputs[-1]  # of the shortest rows
    values = critic.values(batch)
    assert min(shape[1] for shape in given) < batch["prompt_ids"].shape[1] + batch["completion_ids"].shape[1]
    critic._pieces = None
    there = batch["completion_mask"].bool()
    torch.testing.assert_close(values[there], critic.values(batch)[there], atol=1e-5, rtol=0)
    plain = replay_with_trl(settings(tmp_path, **changes), run.batches)
    assert largest_difference(*comparable(run, plain), tolerance=1e-4) < 1e-4


# --- Rows that change places


def test_every_loss_of_trl_is_known_to_be_a_sum_over_rows_or_not() -> None:
    source = inspect.getsource(GRPOTrainer._compute_loss)
    named = re.findall(r"loss_type (?:==|in) (\[.*?\]|\".*?\")", source)
    assert {name for text in named for name in re.findall(r'"(\w+)"', text)} == {*OF_ROWS, *OF_TOKENS, *OF_BATCHES}


def losses_of(trainer: Any, batches: list[dict[str, Any]]) -> float:
    """The sum of TRL's loss over micro-batches whose log-probabilities are given."""

    def given(model: Any, input_ids: torch.Tensor, mask: Any, keep: int, **_: Any) -> tuple[Any, ...]:
        row = input_ids[:, -keep:].float()
        return -0.02 * row, 0.01 * (row % 7), 0.1 * row.mean()

    trainer._get_per_token_logps_and_entropies = given
    trainer.current_gradient_accumulation_steps = len(batches)
    return float(sum(trainer._compute_loss(trainer.model, batch) for batch in batches))


@pytest.mark.parametrize("own", [{}, {"top_entropy_quantile": 0.5}, {"entropy_coef": 0.1}, {"beta": 0.1}])
@pytest.mark.parametrize("loss_type", [*OF_ROWS, *OF_TOKENS, *OF_BATCHES])
def test_rows_change_places_where_the_loss_stays(loss_type: str, own: Any, tmp_path: Path, model_folder: str) -> None:
    trainer: Any = build_trainer(
        tmp_path, trainer_class=Plain, model=model_folder, loss_type=loss_type, **ACCUMULATING, **own
    )
    trainer.model.train()
    ids, mask, keep = rows()
    chance = torch.Generator().manual_seed(1)
    batch = {
        "prompt_ids": ids[:, :-keep],
        "prompt_mask": mask[:, :-keep],
        "completion_ids": ids[:, -keep:],
        "completion_mask": mask[:, -keep:],
        "advantages": torch.randn(8, generator=chance),
        "old_per_token_logps": -0.02 * ids[:, -keep:] + 0.1 * torch.randn(8, keep, generator=chance),
        "ref_per_token_logps": -0.02 * ids[:, -keep:] + 0.1 * torch.randn(8, keep, generator=chance),
        "num_items_in_batch": mask[:, -keep:].sum(),
    }
    batches = [{name: it[at : at + 2] if it.dim() else it for name, it in batch.items()} for at in range(0, 8, 2)]
    count = exchanging(trainer)
    before, after = losses_of(trainer, batches), losses_of(trainer, dealt_by_length(batches, 4))
    assert (after == pytest.approx(before, abs=1e-5)) is (count == 4), f"{loss_type}: {count}"


def marked(sizes: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Micro-batches of two rows of these lengths; each row has its number as its ids."""
    made = []
    for at, both in enumerate(sizes):
        there = torch.tensor([[int(column < length) for column in range(9)] for length in both])
        ids = torch.tensor([[2 * at], [2 * at + 1]]).expand(2, 9)
        batch = {"prompt_ids": ids[:, :1], "prompt_mask": there[:, :1], "completion_ids": ids, "completion_mask": there}
        made.append({**batch, "advantages": ids[:, 0].float(), "names": ids[:, 0].tolist(), "none": None})
    return made


def test_rows_stay_in_their_optimizer_step_with_all_that_is_theirs() -> None:
    dealt = dealt_by_length(marked([(1, 9), (8, 2), (3, 7), (6, 4)]), 2)
    numbers = [batch["completion_ids"][:, 0].tolist() for batch in dealt]
    assert numbers == [[1, 2], [3, 0], [5, 6], [7, 4]]
    for batch in dealt:
        assert batch["advantages"].tolist() == batch["names"] == batch["completion_ids"][:, 0].tolist()
        assert batch["none"] is None


def test_rows_stay_where_they_are_with_images_and_with_columns_of_other_rows() -> None:
    for extra in ({"pixel_values": torch.zeros(7, 3)}, {"of_groups": torch.zeros(1)}, {"of_groups": [1, 2, 3]}):
        batches = [{**batch, **extra} for batch in marked([(1, 9), (8, 2)])]
        assert dealt_by_length(batches, 2) == batches


@pytest.mark.parametrize(
    ("batch", "step", "count"), [(4, 4, 4), (4, 2, 2), (2, 4, 2), (1, 4, 1), (4, 1, 1), (3, 2, 1), (2, 3, 1)]
)
def test_micro_batches_exchange_rows_within_a_step(batch: int, step: int, count: int, tmp_path: Path) -> None:
    changes = {"per_device_train_batch_size": 2, "steps_per_generation": batch, "gradient_accumulation_steps": step}
    assert exchanging(build_trainer(tmp_path, trainer_class=Plain, **changes)) == count


# --- Where TRL's way stays


def overriding(name: str) -> type[GRPOTrainer]:
    """A class of a user's with a method that may look at the batch."""
    method = getattr(GRPOTrainer, name)
    return type("Own", (GRPOTrainer,), {name: lambda self, *args, **kwargs: method(self, *args, **kwargs)})


@pytest.mark.parametrize(
    ("own", "cuts", "deals"),
    [
        ({}, True, True),
        ({"trainer_class": overriding("_get_per_token_logps_and_entropies")}, False, False),
        ({"trainer_class": overriding("_compute_loss")}, True, False),
        ({"trainer_class": overriding("_prepare_inputs")}, True, False),
        ({"loss_type": "bnpo"}, True, False),
    ],
)
def test_code_that_looks_at_the_batch_gets_trls(own: dict[str, Any], cuts: bool, deals: bool, tmp_path: Path) -> None:
    trainer = InProcessRun(settings(tmp_path, **{**ACCUMULATING, **own})).trainer
    assert (computes_pieces(trainer), exchanging(trainer) > 1) == (cuts, deals)


@pytest.mark.parametrize("asked", [{"compute_aux_loss": True}, {"token_type_ids": torch.zeros(8, 1)}, {"kept": True}])
def test_what_mixes_rows_is_computed_whole(asked: dict[str, Any], tmp_path: Path) -> None:
    trainer: Any = InProcessRun(settings(tmp_path)).trainer
    assert trainer._pieces_for({}) is not None
    if "kept" in asked:  # the sets of a batch under way
        trainer._kept = {SIZES: torch.zeros(8, 1, dtype=torch.int32), IDS: torch.zeros(8, 1, dtype=torch.int32)}
    assert trainer._pieces_for(asked) is None


def test_of_several_ranks_that_may_have_images_none_computes_pieces(tmp_path: Path) -> None:
    trainer: Any = build_trainer(tmp_path, trainer_class=Plain)
    trainer.accelerator = SimpleNamespace(num_processes=2)
    assert computes_pieces(trainer)
    trainer.processing_class = SimpleNamespace(image_processor=None)
    assert not computes_pieces(trainer)


def test_no_column_to_keep_is_all_columns_as_in_trl(tmp_path: Path) -> None:
    trainer: Any = build_trainer(tmp_path, trainer_class=Plain)
    ids, mask, _ = rows()
    with torch.no_grad():
        logprobs = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 0)[0]
        trainer.padding = "trl"
        trls = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 0)[0]
    assert torch.equal(logprobs, trls)


# --- Several processes

RANK = """
import json, os, random, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from torch import distributed
meeting = f"file://{sys.argv[2]}/meeting"  # a port could be another's by the time that it is opened
distributed.init_process_group("gloo", init_method=meeting, rank=int(os.environ["RANK"]), world_size=2)
from kit.in_process import training_logs
from kit.tiny_trainer import build_trainer
from trl import GRPOTrainer
from async_grpo.setup import pieces
from async_grpo.training.padding import METRIC, Unpadded
from async_grpo.training.trl_trainer import name_the_cpu

pieces.CALLS = 0.0
passes = []

def rollouts(prompts, trainer):
    chance = random.Random(100 * trainer.state.global_step + trainer.accelerator.process_index)
    sizes = [1, 60, 2, 40] if trainer.accelerator.process_index else [30, 30, 30, 30]
    ids = [[chance.randrange(90) for _ in range(sizes[row % 4])] for row in range(len(prompts))]
    encoded = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    return {"prompt_ids": encoded, "completion_ids": ids, "logprobs": [[-3.0] * len(row) for row in ids]}

class Plain(Unpadded, GRPOTrainer):
    pass

logs = {}
for padding in ("none", "trl"):
    changes = dict(max_steps=2, per_device_train_batch_size=4, steps_per_generation=2, gradient_accumulation_steps=2)
    arguments = {"rollout_func": rollouts}
    trainer = build_trainer(Path(sys.argv[2]), trainer_class=Plain, arguments=arguments, num_generations=4,
                            max_completion_length=64, **changes)
    name_the_cpu(trainer)
    trainer.padding = padding
    count = [0]
    trainer.model.register_forward_pre_hook(lambda *_, count=count: count.__setitem__(0, count[0] + 1))
    trainer.train()
    logs[padding] = [[entry[name] for name in ("loss", "grad_norm", METRIC)] for entry in training_logs(trainer)]
    logs[padding + " passes"] = count[0]
Path(sys.argv[2], f"{trainer.accelerator.process_index}.json").write_text(json.dumps(logs))
os._exit(0)  # as ranks do: a thread of gloo may abort an ordinary exit
"""


def test_two_ranks_of_other_lengths_train_as_trl_does_by_as_many_passes(tmp_path: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    command = [sys.executable, "-c", RANK, str(Path(__file__).parents[1]), str(tmp_path)]
    ranks = [Popen(command, env={**env, "RANK": rank, "LOCAL_RANK": rank}, stderr=PIPE, text=True) for rank in "01"]
    try:
        errors = [rank.communicate(timeout=DEADLINE_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first["none passes"] == second["none passes"] > first["trl passes"]
    for rank in (first, second):
        for ours, trls in zip(rank["none"], rank["trl"], strict=True):
            assert ours[:2] == pytest.approx(trls[:2], abs=1e-5)
    assert all(ours[2] < 1.2 < trls[2] for ours, trls in zip(second["none"], second["trl"], strict=True))


def test_the_trial_leaves_the_mode_of_the_model_and_the_random_numbers(tmp_path: Path) -> None:
    trainer: Any = build_trainer(tmp_path, model=build_model(TOKENIZER, attention_dropout=0.5), trainer_class=Plain)
    trainer.model.train()
    after = []
    for _ in range(2):  # with the trial, and without
        torch.manual_seed(0)
        answered_rows(trainer)
        after.append(torch.random.get_rng_state())
    assert torch.equal(*after)
    assert all(module.training for module in trainer.model.modules())
