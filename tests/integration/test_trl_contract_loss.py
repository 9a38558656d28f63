"""What our loss hooks, advantages and hyperparameters rely on in TRL, checked against the installed version."""

from __future__ import annotations

import inspect
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from packaging.version import Version
from torch.testing import assert_close
from transformers import PreTrainedTokenizerFast
from trl.trainer import utils as trl_utils
from trl_contract import INSTALLED, LOSS, ON_CPU, ROLLOUT, THREADS, TRAINING, moved, scripted_rollout, twice

from async_grpo.archive.advantages import AdvantageRule
from async_grpo.settings import TrainingSettings
from async_grpo.setup import trl_compat
from async_grpo.setup.generator_choice import engines_left_to_workers, wants_vllm
from async_grpo.training.hyperparameters import hyperparameters
from kit.in_process import InProcessRun
from kit.tiny_trainer import QWEN3_CHAT_TEMPLATE, build_trainer, chat_rows, letters, plain_rows

LOSS_INPUTS = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "num_items_in_batch"}
Prepared = tuple[dict[str, Any], Any]


@pytest.fixture
def inputs_and_trainer(tmp_path: Path) -> Prepared:
    """What the loss consumes for a batch of a `rollout_func`; a loss that weighs each sequence alike."""
    given = {"arguments": {"rollout_func": scripted_rollout}, "reward_funcs": lambda completions, score, **_: score}
    trainer: Any = build_trainer(tmp_path, **given, loss_type="grpo", epsilon=0.2)
    trainer.current_gradient_accumulation_steps = 1
    return trainer._generate_and_score_completions(twice(plain_rows(4))), trainer


def test_keys_and_shapes_of_the_loss_inputs(inputs_and_trainer: Prepared, trainer: Any) -> None:
    plain = trainer._generate_and_score_completions(twice(plain_rows(4)))
    assert set(plain) == LOSS_INPUTS, moved("the loss", f"consumes {sorted(plain)} after generating", TRAINING)

    inputs, trainer = inputs_and_trainer
    expected = LOSS_INPUTS | {"sampling_per_token_logps", "tool_mask"}
    assert set(inputs) == expected, moved("the loss", f"consumes {sorted(inputs)} of a rollout_func", TRAINING)
    completions_BC = (8, 3)
    for name in ("completion_ids", "completion_mask", "sampling_per_token_logps", "tool_mask"):
        assert inputs[name].shape == completions_BC, moved(f"`{name}`", f"has shape {inputs[name].shape}", TRAINING)
    assert inputs["advantages"].shape == (8,)
    assert inputs["num_items_in_batch"].ndim == 0


def test_logprobs_and_env_mask_of_a_rollout_func_reach_the_loss(inputs_and_trainer: Prepared) -> None:
    inputs, _ = inputs_and_trainer
    assert inputs["sampling_per_token_logps"].tolist() == [[-0.5, -1.5, 0.0]] + [[-0.5, -1.5, -2.5]] * 7, moved(
        "rollout_func", "'s `logprobs` do not arrive as `sampling_per_token_logps`", TRAINING
    )
    assert inputs["tool_mask"].tolist() == [[1, 0, 1]] * 8, moved(
        "rollout_func", "'s `env_mask` does not arrive as `tool_mask`", TRAINING
    )
    assert inputs["completion_mask"].tolist() == [[1, 1, 0]] + [[1, 1, 1]] * 7


def test_the_loss_takes_old_per_token_logps_as_the_policy_that_sampled(inputs_and_trainer: Prepared) -> None:
    inputs, trainer = inputs_and_trainer
    with torch.no_grad():
        logprobs_BC, *rest = trainer._get_per_token_logps_and_entropies(
            trainer.model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            3,
        )
        assert len(rest) == 2, moved(
            "GRPOTrainer._get_per_token_logps_and_entropies", f"returns {1 + len(rest)} things, not 3", ROLLOUT
        )
        shift_BC = torch.linspace(-0.5, 0.5, 24).view(8, 3)
        inputs["old_per_token_logps"] = logprobs_BC - shift_BC
        loss = trainer._compute_loss(trainer.model, inputs)

    ratio_BC = shift_BC.exp()
    advantages_B1 = inputs["advantages"][:, None]
    objective_BC = torch.min(ratio_BC * advantages_B1, ratio_BC.clamp(0.8, 1.2) * advantages_B1)
    mask_BC = inputs["completion_mask"] * inputs["tool_mask"]
    expected = -((objective_BC * mask_BC).sum(1) / mask_BC.sum(1)).mean()
    unused = "does not use `old_per_token_logps` and `tool_mask`"
    assert_close(loss, expected, msg=lambda text: moved("GRPOTrainer._compute_loss", f"{unused}: {text}", TRAINING))


def test_the_loss_weighs_by_a_ratio_that_is_filled_in_after_its_forward_pass(
    inputs_and_trainer: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, trainer = inputs_and_trainer
    weights_BC = torch.linspace(0.0, 2.0, 24).view(8, 3)
    inputs["importance_sampling_ratio"] = torch.ones(8, 3)
    compute = trainer._get_per_token_logps_and_entropies

    def then_fill(*args: Any, **kwargs: Any) -> Any:
        result = compute(*args, **kwargs)
        inputs["importance_sampling_ratio"].copy_(weights_BC)
        return result

    monkeypatch.setattr(trainer, "_get_per_token_logps_and_entropies", then_fill)
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    mask_BC = inputs["completion_mask"] * inputs["tool_mask"]
    weighed_BC = weights_BC * inputs["advantages"][:, None]  # the ratio to the old policy is 1
    expected = -((weighed_BC * mask_BC).sum(1) / mask_BC.sum(1)).mean()
    loss, change = trainer._compute_loss(trainer.model, inputs).detach(), "weighs otherwise than with use_vllm=True"
    assert_close(loss, expected, msg=lambda text: moved("GRPOTrainer._compute_loss", f"{change}: {text}", LOSS))


def test_the_log_probability_function_that_we_replace(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL 1.15 needs a replacement on a CPU; both versions call it with the same nine arguments."""
    name = "trl.trainer.utils._ChunkedLogProbFunction"
    original = getattr(trl_utils, "_ChunkedLogProbFunction", None)
    replaced = original is trl_compat.TorchLogProbs
    needed = Version(trl.__version__) < Version(trl_compat.FIXED_IN) and not torch.cuda.is_available()
    assert replaced == needed, moved(name, "is replaced where it need not be, or not where it must be", ON_CPU)

    calls: list[tuple[Any, ...]] = []

    class Recording:
        @staticmethod
        def apply(*arguments: Any) -> Any:
            calls.append(arguments)
            return trl_compat.TorchLogProbs.apply(*arguments)

    monkeypatch.setattr(trl_utils, "_ChunkedLogProbFunction", Recording)
    ids = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
    with torch.no_grad():
        logprobs_BC, entropies_BC, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, torch.ones_like(ids), 3, compute_entropy=True
        )
        all_logprobs_BCV = trainer.model(input_ids=ids).logits[:, 1:-1].log_softmax(-1)
    expected = len(inspect.signature(trl_compat.TorchLogProbs.apply).parameters)
    counts = [len(arguments) for arguments in calls]
    assert counts == [expected], moved(name, f"is called with {counts} arguments, not {expected}", ON_CPU)
    assert_close(logprobs_BC, all_logprobs_BCV.gather(2, ids[:, 2:, None])[..., 0])
    assert_close(entropies_BC, -(all_logprobs_BCV.exp() * all_logprobs_BCV).sum(-1))
    if not replaced and original is not None:
        assert_close(trl_compat.TorchLogProbs.apply(*calls[0])[0], original.apply(*calls[0])[0])


def test_a_function_can_take_the_place_of_trls_log_probabilities(trainer: Any) -> None:
    """For the tokens of completions that are not masked, row by row: `kept_log_probs` counts on this order."""
    name = "trl.trainer.utils._ChunkedLogProbFunction"
    original, asked = trl_utils._ChunkedLogProbFunction, []

    class Zeros:
        @staticmethod
        def apply(hidden: Any, weight: Any, bias: Any, targets: Any, *_: Any) -> Any:
            assert (len(hidden), hidden.shape[1]) == (len(targets), weight.shape[1])
            asked.append(targets.tolist())
            return 0.0 * hidden.sum(-1) - 7.0, None, None, None, None

    ids, mask = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]), torch.ones(3, 4).long()
    mask[1, 3] = 0
    with trl_compat.log_probs_by(lambda function: Zeros):
        logprobs_BC, *_ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 2, batch_size=2)
    assert asked == [[3, 4, 7], [11, 12]], moved(name, f"gets the tokens {asked}", ON_CPU, LOSS)
    assert logprobs_BC.tolist() == [[-7.0, -7.0], [-7.0, 0.0], [-7.0, -7.0]], moved(name, "is not TRL's", ON_CPU, LOSS)
    assert trl_utils._ChunkedLogProbFunction is original
    if Version(trl.__version__) >= Version("1.16"):
        assert not trl_utils._use_triton(torch.device("cpu")), moved("trl.trainer.utils._use_triton", "changed", ON_CPU)


def test_the_head_that_zero3_shards_is_gathered_as_trl_gathers_it() -> None:
    arguments = list(inspect.signature(trl_utils.maybe_gather_lm_head_ctx).parameters.values())
    assert arguments[0].kind is inspect.Parameter.VAR_POSITIONAL, moved("maybe_gather_lm_head_ctx", "changed", ON_CPU)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"reward_weights": [0.5, 2.0], "scale_rewards": "none"},
        {"scale_rewards": "batch"},
        {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 3.0]},
    ],
)
@pytest.mark.parametrize("odd", [2.0, math.inf])
def test_advantages_of_an_archive_are_those_of_trl(tmp_path: Path, changes: dict[str, Any], odd: float) -> None:
    def sometimes(completions: list[Any], target: list[int], **_: Any) -> list[float | None]:
        if target[0] == 3:
            return [odd, *[1.0] * (len(completions) - 1)]
        return [None if index % 3 else float(len(text)) for index, text in enumerate(completions)]

    run = InProcessRun(lambda: build_trainer(tmp_path, reward_funcs=[letters, sometimes], **changes)).train()
    told = hyperparameters(run.trainer, TrainingSettings())
    rule = AdvantageRule.from_record(told)
    for batch, inputs in zip(run.batches, run.inputs, strict=True):
        ours = torch.cat([torch.from_numpy(it) for it in rule.advantages([group.rewards for group in batch])])
        assert_close(ours.float(), inputs["advantages"].cpu(), msg=lambda text: f"{INSTALLED}: advantages.py: {text}")
    assert told["reward_functions"] == ["letters", "sometimes"]


def test_a_tokenizer_encodes_in_the_one_method_that_threads_take_turns_in(trainer: Any) -> None:
    name, calls = "PreTrainedTokenizerFast._encode_plus", []

    class Recording(PreTrainedTokenizerFast):
        def _encode_plus(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return super()._encode_plus(*args, **kwargs)

        def set_truncation_and_padding(self, *args: Any, **kwargs: Any) -> None:
            calls.append(2)
            super().set_truncation_and_padding(*args, **kwargs)

    tokenizer = trainer.processing_class
    tokenizer.__class__ = Recording
    tokenizer(text=["a", "bc"], padding=True)
    tokenizer.apply_chat_template(chat_rows(1)[0]["prompt"], chat_template=QWEN3_CHAT_TEMPLATE)
    assert calls == [1, 2, 1, 2], moved(name, "is not where padding is set", THREADS)


def test_hyperparameters_hold_no_secret(tmp_path: Path) -> None:
    private = {"api_key": "secret", "passphrase": "secret", "max_tokens": 3, "proxies": ["http://me:secret@proxy:80"]}
    trainer = build_trainer(
        tmp_path, hub_token="hf_secret", model_init_kwargs=private, run_name="https://me:secret@host.example/project"
    )
    told = json.dumps(hyperparameters(trainer, TrainingSettings()))
    assert "secret" not in told and '"max_tokens": 3' in told
    assert "host.example/project" in told and str(tmp_path) in told


# --- Engines ----------------------------------------------------------------------------------------------


def test_a_file_with_use_vllm_is_built_without_an_engine(tmp_path: Path) -> None:
    with engines_left_to_workers():
        trainer = build_trainer(tmp_path, use_vllm=True, vllm_gpu_memory_utilization=0.7)
    assert wants_vllm(trainer)
    assert not trainer.use_vllm
    assert trainer.args.vllm_gpu_memory_utilization == 0.7, "its settings are for the workers' engines"
    assert trainer.generation_config is not None, "evaluation generates with transformers"
