"""What TRL's trainer can do in one process, it can do with rollouts from workers, with the same result.

Most tests run a trainer asynchronously with fresh weights for each batch (staleness 0), then give the recorded
completions to plain TRL and compare all that both have logged.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from in_process import (
    PROMPTS,
    QWEN3_CHAT_TEMPLATE,
    TIMES,
    InProcessRun,
    ScriptedGenerator,
    build_model,
    build_tokenizer,
    build_trainer,
    chat_rows,
    length,
    letters,
    plain_rows,
    replay_with_trl,
    text_of,
    training_logs,
)
from peft import LoraConfig
from transformers import Qwen3ForSequenceClassification, TrainerCallback
from trl import GRPOTrainer

from async_grpo.errors import UnsupportedError
from async_grpo.rollout.trl_trainer import make_rollout_trainer
from async_grpo.training.prompts import prompt_rows, refuse_images
from async_grpo.training.trl_trainer import refuse_unsupported

pytestmark = pytest.mark.integration

TOLERANCE = 1e-5
LOSS_TYPES = ("grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model on disk, from where TRL loads a reference model, too."""
    folder = tmp_path_factory.mktemp("model")
    build_model(build_tokenizer()).save_pretrained(folder)
    return str(folder)


# --- Comparing with TRL -----------------------------------------------------------------------------------


def largest_difference(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> float:
    """Between the logs of two runs, over all of TRL's metrics but times; relative where a value exceeds 1."""
    assert len(ours) == len(theirs) > 0
    largest = 0.0
    for our_entry, their_entry in zip(ours, theirs, strict=True):
        assert own_names(our_entry) == set(their_entry)
        for name in set(their_entry) - set(TIMES):
            mine, reference = our_entry[name], their_entry[name]
            if mine is None or reference is None:
                assert mine == reference, name
                continue
            difference = abs(mine - reference) / max(1.0, abs(reference))
            assert difference <= TOLERANCE, f"{name} of step {their_entry['step']}: {mine}, but TRL has {reference}"
            largest = max(largest, difference)
    return largest


def own_names(entry: dict[str, Any]) -> set[str]:
    """The names of a logged entry without ours."""
    return {name for name in entry if not name.startswith("async/")}


def run_as_trl_would(get_trainer: Callable[..., GRPOTrainer], **options: Any) -> tuple[InProcessRun, GRPOTrainer]:
    """Run with fresh weights for each batch, then plain TRL on the same completions: all that they log is equal."""
    run = InProcessRun(get_trainer, **options).train()
    plain = replay_with_trl(get_trainer, run.batches)
    largest_difference(run.logs, training_logs(plain))
    return run, plain


def settings(output_dir: Path, given: dict[str, Any] | None = None, **changes: Any) -> Callable[..., GRPOTrainer]:
    """A `get_trainer()` that builds the same trainer each time; a test may add to its arguments.

    Args:
        given: arguments of the trainer, e.g. `peft_config`.
        changes: of the rest, as for `build_trainer`.
    """

    def get_trainer(arguments: dict[str, Any] | None = None, **more: Any) -> GRPOTrainer:
        return build_trainer(output_dir, arguments={**(given or {}), **(arguments or {})}, **{**changes, **more})

    return get_trainer


# --- The key property: staleness 0 is TRL -----------------------------------------------------------------

SCHEDULES = {
    "dapo": {"loss_type": "dapo"},
    "grpo with beta": {"loss_type": "grpo", "beta": 0.1},
    "GSPO": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_twenty_steps_at_staleness_zero_equal_trl(
    name: str, tmp_path: Path, model_folder: str, record_property: Any
) -> None:
    get_trainer = settings(tmp_path, model=model_folder, max_steps=20, reward_funcs=[letters], **SCHEDULES[name])
    run = InProcessRun(get_trainer).train()
    plain = replay_with_trl(get_trainer, run.batches)

    assert len(run.logs) == 20
    taken = zip(run.batches, run.versions, strict=True)
    assert all(group.policy_version == version for batch, version in taken for group in batch)
    assert sum(entry["grad_norm"] > 0.1 for entry in run.logs) > 10, "the comparison must see gradients"
    record_property("largest_difference", largest_difference(run.logs, training_logs(plain)))
    weights = zip(run.trainer.model.parameters(), plain.model.parameters(), strict=True)
    record_property("largest_weight_difference", max((a - b).abs().max().item() for a, b in weights))


def test_the_comparison_sees_stale_groups(tmp_path: Path) -> None:
    """Plain TRL takes stale completions for fresh ones, so the comparison must fail: else it would show nothing."""
    get_trainer = settings(tmp_path, max_steps=3)
    run = InProcessRun(get_trainer, fresh_every=3).train()
    plain = replay_with_trl(get_trainer, run.batches)
    with pytest.raises(AssertionError, match="but TRL has"):
        largest_difference(run.logs, training_logs(plain))


# --- Losses and schedules ---------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_type(loss_type: str, tmp_path: Path) -> None:
    run_as_trl_would(settings(tmp_path, loss_type=loss_type))


@pytest.mark.parametrize("correction", ["decoupled", "tis", "icepop", "none"])
@pytest.mark.parametrize("loss_type", ["dapo", "vespo"])
def test_corrections_change_nothing_of_fresh_groups(loss_type: str, correction: str, tmp_path: Path) -> None:
    run_as_trl_would(settings(tmp_path, loss_type=loss_type), correction=correction)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_type_on_stale_groups(loss_type: str, tmp_path: Path) -> None:
    run = InProcessRun(settings(tmp_path, loss_type=loss_type, max_steps=4, learning_rate=1e-2), fresh_every=3)
    logs = run.train().logs
    assert [entry["async/staleness_max"] for entry in logs] == [0, 1, 2, 0]
    assert all(math.isfinite(entry["loss"]) and math.isfinite(entry["grad_norm"]) for entry in logs)


def test_the_ratio_of_a_stale_group_is_against_the_policy_that_sampled_it(tmp_path: Path) -> None:
    run = InProcessRun(settings(tmp_path, max_steps=3, learning_rate=3e-2), fresh_every=3).train()
    clipped = [entry["clip_ratio/region_mean"] for entry in run.logs]
    assert clipped[0] == 0
    assert clipped[2] > 0


SCHEDULING = {
    "several iterations": {"num_iterations": 2, "max_steps": 4},
    "accumulation": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
    "generation for several steps": {
        "steps_per_generation": 4,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 2,
        "max_steps": 4,
    },
    "all of it": {
        "num_iterations": 2,
        "steps_per_generation": 4,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 2,
        "max_steps": 8,
    },
    "logging every other step": {"logging_steps": 2, "max_steps": 4},
}


@pytest.mark.parametrize("name", SCHEDULING)
@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_schedules(name: str, loss_type: str, tmp_path: Path) -> None:
    run, _ = run_as_trl_would(settings(tmp_path, loss_type=loss_type, **SCHEDULING[name]))
    arguments = run.trainer.args
    micro_steps = arguments.max_steps * arguments.gradient_accumulation_steps
    assert len(run.batches) == micro_steps / (arguments.steps_per_generation * arguments.num_iterations)


def test_a_reference_model(tmp_path: Path, model_folder: str) -> None:
    run, _ = run_as_trl_would(settings(tmp_path, model=model_folder, beta=0.1))
    assert run.trainer.ref_model is not None
    assert run.worker.ref_model is None
    assert run.logs[1]["kl"] > 0


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_lora(beta: float, tmp_path: Path) -> None:
    peft = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    run, _ = run_as_trl_would(settings(tmp_path, {"peft_config": peft}, beta=beta))
    fresh = settings(tmp_path, {"peft_config": peft})().model.state_dict()
    changed = {name for name, value in run.trainer.model.state_dict().items() if not value.equal(fresh[name])}
    assert changed
    assert all("lora" in name for name in changed)


def test_truncated_completions_are_masked(tmp_path: Path) -> None:
    run, _ = run_as_trl_would(settings(tmp_path, mask_truncated_completions=True, seed=0, max_steps=4))
    end = run.trainer.eos_token_ids
    for groups, inputs in zip(run.batches, run.inputs, strict=True):
        lengths = [size for group in groups for size in group.completion_lengths.tolist()]
        last = [ids[size - 1] for ids, size in zip(inputs["completion_ids"].tolist(), lengths, strict=True)]
        kept = [size if token in end else 0 for token, size in zip(last, lengths, strict=True)]
        assert inputs["completion_mask"].sum(1).tolist() == kept
    assert any(0 < entry["completions/clipped_ratio"] < 1 for entry in run.logs)


# --- Rewards ----------------------------------------------------------------------------------------------


async def async_letters(completions: list[Any], **columns: Any) -> list[float]:
    await asyncio.sleep(0)
    return letters(completions, **columns)


def test_weighted_rewards_sync_and_async(tmp_path: Path) -> None:
    run, _ = run_as_trl_would(
        settings(tmp_path, reward_funcs=[letters, async_letters, length], reward_weights=[1.0, 0.5, 0.1])
    )
    assert run.groups[0].reward_names == ("letters", "async_letters", "length")
    assert all((group.rewards[:, 0] == group.rewards[:, 1]).all() for group in run.groups)


@pytest.mark.parametrize("chat_template", [None, QWEN3_CHAT_TEMPLATE], ids=["plain", "conversational"])
def test_reward_functions_get_prompts_and_dataset_columns(chat_template: str | None, tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []

    def reaches_target(
        prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], target: list[int], **_: Any
    ) -> list[float]:
        seen.extend((text_of(prompt), number) for prompt, number in zip(prompts, target, strict=True))
        texts = [text_of(completion) for completion in completions]
        return [-abs(len(t) - n) + len(ids) / 10 for t, n, ids in zip(texts, target, completion_ids, strict=True)]

    run_as_trl_would(settings(tmp_path, chat_template=chat_template, reward_funcs=reaches_target))
    assert seen
    assert all(number == len(text) for text, number in seen)


def test_what_reward_functions_log_reaches_the_trainer(tmp_path: Path) -> None:
    def logging_reward(completions: list[str], log_extra: Any, log_metric: Any, **_: Any) -> list[float]:
        log_extra("first_letter", [completion[:1] for completion in completions])
        log_metric("digits", sum(c.isdigit() for completion in completions for c in completion) / len(completions))
        return letters(completions)

    run, plain = run_as_trl_would(settings(tmp_path, reward_funcs=logging_reward))
    assert all("digits" in entry for entry in run.logs)
    assert run.trainer._logs["extra"] == plain._logs["extra"]
    assert len(run.trainer._logs["extra"]["first_letter"]) == 8
    assert run.trainer._logs["completion"] == plain._logs["completion"]
    assert run.trainer._logs["prompt"] == plain._logs["prompt"]


def test_rewards_of_none(tmp_path: Path) -> None:
    def only_even(completions: list[str], target: list[int], **_: Any) -> list[float | None]:
        return [None if n % 2 else score for n, score in zip(target, letters(completions), strict=True)]

    def only_short(completions: list[str], target: list[int], **_: Any) -> list[float | None]:
        return [None if n > 1 else 1.0 - score for n, score in zip(target, letters(completions), strict=True)]

    run, _ = run_as_trl_would(settings(tmp_path, reward_funcs=[only_even, only_short], max_steps=3))
    for group in run.groups:
        target = group.job.row["target"]
        assert torch.from_numpy(group.rewards).isnan()[0].tolist() == [target % 2 == 1, target > 1]
    unscored = [group for group in run.groups if torch.from_numpy(group.rewards).isnan().all()]
    assert unscored, "some group must have had no reward at all"


def test_reward_functions_see_the_version_that_generated(tmp_path: Path) -> None:
    steps: list[int] = []

    def note_step(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
        steps.append(trainer_state.global_step)
        return letters(completions)

    run = InProcessRun(settings(tmp_path, reward_funcs=note_step, max_steps=4), fresh_every=2).train()
    assert steps == [group.policy_version for group in run.groups]
    assert sorted(set(steps)) == [0, 2]


def test_a_reward_model(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    config = build_model(tokenizer).config
    config.num_labels = 1
    torch.manual_seed(0)
    judge = Qwen3ForSequenceClassification(config).eval()
    run, _ = run_as_trl_would(
        settings(tmp_path, {"reward_processing_classes": [tokenizer, None]}, reward_funcs=[judge, letters])
    )
    assert len({group.rewards[0, 0].item() for group in run.groups}) > 1


# --- Around the training step -----------------------------------------------------------------------------


def test_callbacks_run_in_the_trainer_only(tmp_path: Path) -> None:
    class Counter(TrainerCallback):
        def __init__(self) -> None:
            self.begun = self.steps = self.logged = self.ended = 0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.begun += 1

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.steps += 1

        def on_log(self, *_: Any, **__: Any) -> None:
            self.logged += 1

        def on_train_end(self, *_: Any, **__: Any) -> None:
            self.ended += 1

    counters: list[Counter] = []

    def get_trainer() -> GRPOTrainer:
        counters.append(Counter())
        return build_trainer(tmp_path, arguments={"callbacks": [counters[-1]]})

    InProcessRun(get_trainer).train()
    of_trainer, of_worker = counters
    assert (of_trainer.begun, of_trainer.steps, of_trainer.ended) == (1, 2, 1)
    assert of_trainer.logged == 3  # two steps and the summary
    assert of_worker.begun == of_worker.steps == of_worker.logged == of_worker.ended == 0


def test_evaluation_generates_in_the_trainer(tmp_path: Path) -> None:
    get_trainer = settings(
        tmp_path,
        {"eval_dataset": plain_rows(4)},
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=4,
        eval_on_start=True,
    )
    run = InProcessRun(get_trainer).train()
    plain = get_trainer()
    plain.train()
    ours, theirs = (
        [entry for entry in trainer.state.log_history if "eval_reward" in entry] for trainer in (run.trainer, plain)
    )
    assert [entry["step"] for entry in ours] == [0, 1, 2]
    assert [set(entry) for entry in ours] == [set(entry) for entry in theirs]
    assert len(run.batches) == 2, "evaluation must take no group from the workers"
    assert ours[0]["eval_reward"] == pytest.approx(theirs[0]["eval_reward"])  # same weights, same seed
    assert len(run.logs) == 2


def test_checkpoints_are_told_and_rotated(tmp_path: Path) -> None:
    run = InProcessRun(settings(tmp_path, save_strategy="steps", save_steps=1, save_total_limit=1, max_steps=3)).train()
    assert run.checkpoints == [1, 2, 3]
    assert [folder.name for folder in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]
    assert run.trainer.args.save_total_limit == 1


NAMES_OF = {
    "default": {},
    "beta and several rewards": {"beta": 0.1, "reward_funcs": [letters, length]},
    "cispo": {"loss_type": "cispo"},
    "vespo": {"loss_type": "vespo"},
    "entropy bonus": {"entropy_coef": 0.01},
    "conversational": {"chat_template": QWEN3_CHAT_TEMPLATE},
    "several iterations": {"num_iterations": 2, "steps_per_generation": 2, "per_device_train_batch_size": 4},
}


@pytest.mark.parametrize("name", NAMES_OF)
def test_metrics_have_the_names_that_trl_gives_them(name: str, tmp_path: Path, model_folder: str) -> None:
    get_trainer = settings(tmp_path, model=model_folder, **NAMES_OF[name])
    plain = get_trainer()
    plain.train()
    ours, theirs = InProcessRun(get_trainer).train().logs, training_logs(plain)
    assert [own_names(entry) for entry in ours] == [set(entry) for entry in theirs]
    assert {name for entry in ours for name in entry if name.startswith("async/")} >= {
        "async/staleness_mean",
        "async/staleness_max",
        "async/rollouts_per_second",
        "async/trainer_wait_fraction",
    }


def test_a_subclass_of_the_user_keeps_its_own_methods(tmp_path: Path) -> None:
    class Doubled(GRPOTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().compute_loss(*args, **kwargs)

    doubled = InProcessRun(settings(tmp_path, trainer_class=Doubled, max_steps=1)).train().logs[0]
    single = InProcessRun(settings(tmp_path, max_steps=1)).train().logs[0]
    assert doubled["loss"] == pytest.approx(2 * single["loss"], rel=1e-5)


# --- Tools and environments -------------------------------------------------------------------------------

TOOL_CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
BAD_CALL = '<tool_call>\n{"name": "divide", "arguments": {}}\n</tool_call>'
TOOL_RESULT = "\n<|im_start|>user\n<tool_response>\n12\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first.
        b: The second.

    Returns:
        Their product.
    """
    return a * b


def calls_multiply(prompt: str, place: int) -> str:
    """Calls the tool in every second completion, and uses its result."""
    if "<tool_response>" in prompt:
        return "twelve"
    return f"let me see{TOOL_CALL}" if place % 2 == 0 else "eleven"


class ScriptedTRL(GRPOTrainer):
    """Plain TRL whose model writes what a script says."""

    script: ScriptedGenerator

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return self.script.generate(prompt_ids)


def plain_scripted(get_trainer: Callable[..., GRPOTrainer], reply: Callable[[str, int], str]) -> GRPOTrainer:
    trainer: Any = get_trainer(trainer_class=ScriptedTRL)
    trainer.script = ScriptedGenerator(trainer.processing_class, reply)
    trainer.train()
    return trainer


def scripted(get_trainer: Callable[..., GRPOTrainer], reply: Callable[[str, int], str]) -> InProcessRun:
    tokenizer = build_tokenizer(QWEN3_CHAT_TEMPLATE)
    return InProcessRun(get_trainer, generator=ScriptedGenerator(tokenizer, reply)).train()


def says_twelve(completions: list[Any], **_: Any) -> list[float]:
    return [float(completion[-1]["content"] == "twelve") for completion in completions]


def counts_tool_results(completions: list[Any], **_: Any) -> list[float]:
    return [float(sum(message["role"] == "tool" for message in completion)) for completion in completions]


def assert_same_counts(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """All metrics are equal that do not depend on the log-probabilities, which a script cannot know."""
    for mine, reference in zip(ours, theirs, strict=True):
        assert own_names(mine) == set(reference)
        for name, value in reference.items():
            if name.startswith(("reward", "completions/", "tools/", "num_tokens", "frac_reward")):
                assert mine[name] == pytest.approx(value), name


def test_tools(tmp_path: Path) -> None:
    get_trainer = settings(
        tmp_path,
        {"tools": [multiply]},
        chat_template=QWEN3_CHAT_TEMPLATE,
        reward_funcs=[says_twelve, counts_tool_results],
        max_completion_length=256,
    )
    run = scripted(get_trainer, calls_multiply)
    assert_same_counts(run.logs, training_logs(plain_scripted(get_trainer, calls_multiply)))
    assert run.logs[0]["tools/call_frequency"] == 0.5
    assert run.logs[0]["tools/failure_frequency"] == 0
    assert run.logs[0]["rewards/says_twelve/mean"] == 0.5
    assert run.trainer.tools == [multiply], "the trainer needs them again for evaluation"

    tokenizer = run.trainer.processing_class
    inputs = run.inputs[0]
    for ids, mask, tool_mask in zip(
        inputs["completion_ids"], inputs["completion_mask"], inputs["tool_mask"], strict=True
    ):
        model_wrote = tokenizer.decode(ids[(mask * tool_mask).bool()])
        tool_wrote = tokenizer.decode(ids[(mask * (1 - tool_mask)).bool()])
        if tool_wrote:
            assert tool_wrote == TOOL_RESULT
            assert model_wrote == f"let me see{TOOL_CALL}<|im_end|>twelve<|im_end|>"
        else:
            assert model_wrote == "eleven<|im_end|>"
    called = run.groups[0].completions[0]
    assert [message["role"] for message in called] == ["assistant", "tool", "assistant"]
    assert called[1] == {"role": "tool", "name": "multiply", "content": "12"}


def test_failing_tool_calls_are_counted(tmp_path: Path) -> None:
    get_trainer = settings(
        tmp_path,
        {"tools": [multiply]},
        chat_template=QWEN3_CHAT_TEMPLATE,
        reward_funcs=[length],
        max_completion_length=256,
    )

    def calls_divide(prompt: str, place: int) -> str:
        return "sorry" if "<tool_response>" in prompt else (BAD_CALL if place % 4 == 0 else "no")

    run = scripted(get_trainer, calls_divide)
    assert_same_counts(run.logs, training_logs(plain_scripted(get_trainer, calls_divide)))
    assert run.logs[0]["tools/call_frequency"] == 0.25
    assert run.logs[0]["tools/failure_frequency"] == 1


class Counting:
    """An environment: adds up what the model tells it to."""

    made = 0

    def __init__(self) -> None:
        Counting.made += 1

    def reset(self, **row: Any) -> str:
        self.total = 0
        self.target = row.get("target", 5)
        return f" Reach {self.target}."

    def add(self, number: int) -> int:
        """Add to the total.

        Args:
            number: How much.

        Returns:
            The new total.
        """
        self.total += number
        return self.total

    def get_reward(self) -> float:
        return -float(abs(self.total - self.target))


def adds_three(prompt: str, place: int) -> str:
    if "<tool_response>" in prompt:
        return "done"
    assert " Reach " in prompt, "the observation of reset() must be in the prompt"
    return '<tool_call>\n{"name": "add", "arguments": {"number": 3}}\n</tool_call>' if place % 2 else "nothing"


@pytest.mark.parametrize("with_eval", [False, True], ids=["training", "training and evaluation"])
def test_an_environment(with_eval: bool, tmp_path: Path) -> None:
    evaluation = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2} if with_eval else {}
    get_trainer = settings(
        tmp_path,
        {"environment_factory": Counting, **({"eval_dataset": chat_rows(2)} if with_eval else {})},
        chat_template=QWEN3_CHAT_TEMPLATE,
        reward_funcs=[length],
        train_dataset=chat_rows(),
        max_completion_length=200,
        **evaluation,
    )
    run = scripted(get_trainer, adds_three)
    if not with_eval:  # the plain trainer would evaluate with its script
        assert_same_counts(run.logs, training_logs(plain_scripted(get_trainer, adds_three)))
    for group in run.groups:
        target = group.job.row["target"]
        assert group.rewards[:, 1].tolist() == [-target, -abs(3 - target)]
    assert run.logs[0]["rewards/Counting/mean"] < 0
    assert run.trainer.environment_factories is not None
    assert len([entry for entry in run.trainer.state.log_history if "eval_reward" in entry]) == 2 * with_eval


def test_environments_that_bring_their_own_prompts(tmp_path: Path) -> None:
    get_trainer = settings(
        tmp_path,
        {"environment_factory": {"count": Counting}},
        chat_template=QWEN3_CHAT_TEMPLATE,
        reward_funcs=[length],
        train_dataset=Dataset.from_list([{"environment": "count", "target": n} for n in range(8)]),
        max_completion_length=200,
    )
    run = scripted(get_trainer, adds_three)
    assert_same_counts(run.logs, training_logs(plain_scripted(get_trainer, adds_three)))


def test_a_rollout_func_of_the_user_runs_in_the_worker(tmp_path: Path) -> None:
    calls: list[Any] = []

    def rollout_func(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        calls.append(trainer)
        ids = trainer.processing_class([f"{place % 2}xy" for place in range(len(prompts))])["input_ids"]
        return {
            "prompt_ids": trainer.processing_class(prompts)["input_ids"],
            "completion_ids": ids,
            "logprobs": [[-1.0] * len(row) for row in ids],
            "env_mask": [[1, 0, 1] for _ in ids],
            "score": [float(place % 2) for place in range(len(prompts))],
        }

    def given(completions: list[str], score: list[float], **_: Any) -> list[float]:
        return score

    run = InProcessRun(settings(tmp_path, {"rollout_func": rollout_func}, reward_funcs=given)).train()
    assert calls == [run.worker] * 2
    assert run.groups[0].rewards[:, 0].tolist() == [0, 1]
    assert run.inputs[0]["tool_mask"].tolist() == [[1, 0, 1]] * 8
    assert (run.inputs[0]["old_per_token_logps"] == -1).all()


# --- The sampler's log-probabilities ----------------------------------------------------------------------

SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature 0.7": {"temperature": 0.7},
    "LoRA": {"given": {"peft_config": LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)}},
}


@pytest.mark.parametrize("name", SAMPLING)
def test_logprobs_of_worker_and_trainer_agree_at_equal_weights(name: str, tmp_path: Path, record_property: Any) -> None:
    run = InProcessRun(settings(tmp_path, **SAMPLING[name], max_completion_length=32)).train()
    trainer: Any = run.trainer
    inputs = trainer._generate_and_score_completions([])  # one more batch, at the weights of now
    with torch.no_grad():
        logprobs_BC, *_ = trainer._get_per_token_logps_and_entropies(
            trainer.model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].shape[1],
        )
    assert not inputs["prompt_mask"].all(), "the prompts must differ in length, so that some are padded"
    differences = (logprobs_BC - inputs["sampling_per_token_logps"])[inputs["completion_mask"].bool()].abs()
    record_property("largest_difference", differences.max().item())
    assert differences.max() < TOLERANCE
    assert logprobs_BC.std() > 0.5, "the comparison must see a distribution that is not uniform"


# --- Prompts ----------------------------------------------------------------------------------------------

ORDERS: dict[str, dict[str, Any]] = {
    "one batch a step": {"per_device_train_batch_size": 8, "max_steps": 8},
    "not shuffled": {"per_device_train_batch_size": 8, "max_steps": 8, "shuffle_dataset": False},
    "iterations and steps per generation": {
        "per_device_train_batch_size": 2,
        "num_iterations": 2,
        "steps_per_generation": 4,
        "gradient_accumulation_steps": 4,
        "max_steps": 14,
    },
}


@pytest.mark.parametrize("streamed", [False, True], ids=["dataset", "iterable dataset"])
@pytest.mark.parametrize("name", ORDERS)
def test_prompts_come_in_the_order_of_trl(name: str, streamed: bool, tmp_path: Path) -> None:
    """More than two epochs of 14 rows, of which 3 batches of 4 prompts can be made."""
    drawn: list[str] = []

    def note_prompts(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        drawn.extend(prompts)
        return letters(completions)

    def get_trainer() -> GRPOTrainer:
        rows = plain_rows()
        rows = rows.to_iterable_dataset() if streamed else rows
        return build_trainer(
            tmp_path, train_dataset=rows, reward_funcs=note_prompts, max_completion_length=1, **ORDERS[name]
        )

    plain = get_trainer()
    plain.train()
    expected = drawn[:: plain.num_generations]
    assert plain.state.epoch > 2
    assert set(expected) <= set(PROMPTS)

    rows = list(islice(prompt_rows(get_trainer()), len(expected)))
    assert [row["prompt"] for row in rows] == expected
    assert all(row["target"] == len(row["prompt"]) for row in rows)
    for start in (1, 5, 13, 20):
        later = islice(prompt_rows(get_trainer(), start=start), len(expected) - start)
        assert list(later) == rows[start:]


def test_too_few_rows_for_a_batch(tmp_path: Path) -> None:
    for rows in (plain_rows(3), plain_rows(3).to_iterable_dataset()):
        trainer = build_trainer(tmp_path, train_dataset=rows, per_device_train_batch_size=8)
        with pytest.raises(UnsupportedError, match="fewer than one generation batch"):
            next(prompt_rows(trainer))


def test_a_sampler_that_does_not_repeat_rows_is_refused(tmp_path: Path) -> None:
    class Unrepeated(GRPOTrainer):
        def _get_train_sampler(self, dataset: Any = None) -> Iterator[int]:
            return iter(range(100))

    trainer = build_trainer(tmp_path, trainer_class=Unrepeated)
    with pytest.raises(UnsupportedError, match=r"Unrepeated.*num_generations=2"):
        next(prompt_rows(trainer))


# --- Refusals ---------------------------------------------------------------------------------------------


def stand_in(**changes: Any) -> Any:
    """What `refuse_unsupported` looks at, of a trainer that needs no such hardware to be built."""
    values = {"use_vllm": False, "deepspeed": False, "fsdp": None, **changes}
    return SimpleNamespace(
        args=SimpleNamespace(use_vllm=values["use_vllm"]),
        is_deepspeed_enabled=values["deepspeed"],
        is_fsdp_enabled=values["fsdp"] is not None,
        accelerator=SimpleNamespace(is_fsdp2=values["fsdp"] == 2),
    )


@pytest.mark.parametrize(
    ("changes", "setting", "way_out"),
    [
        ({"deepspeed": True}, "DeepSpeed", "Use FSDP2 instead"),
        ({"fsdp": 1}, "FSDP of version 1", "`fsdp_version: 2`"),
        ({"use_vllm": True}, "use_vllm=True", "give it to the GRPOConfig"),
    ],
)
def test_refusals_name_the_setting_and_the_way_out(changes: dict[str, Any], setting: str, way_out: str) -> None:
    with pytest.raises(UnsupportedError) as refusal:
        refuse_unsupported(stand_in(**changes))
    assert setting in str(refusal.value)
    assert way_out in str(refusal.value)


def test_a_real_trainer_is_not_refused(tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path)
    refuse_unsupported(trainer)
    refuse_images(trainer)


def test_a_worker_refuses_vllm_that_is_asked_for_too_late(tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path)
    trainer.args.use_vllm = True
    with pytest.raises(UnsupportedError, match=r"use_vllm=True.*give it to the GRPOConfig"):
        make_rollout_trainer(trainer)


@pytest.mark.parametrize("column", ["image", "images"])
def test_images_are_refused(column: str, tmp_path: Path) -> None:
    rows = Dataset.from_list([{"prompt": "a", column: "a.png"}] * 8)
    with pytest.raises(UnsupportedError) as refusal:
        refuse_images(build_trainer(tmp_path, train_dataset=rows))
    assert f"'{column}'" in str(refusal.value)
    assert "without --distributed" in str(refusal.value)


def test_a_rollout_func_without_logprobs_is_refused(tmp_path: Path) -> None:
    def rollout_func(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        ids = [[1, 2, 3] for _ in prompts]
        return {"prompt_ids": ids, "completion_ids": ids, "logprobs": None}

    run = InProcessRun(settings(tmp_path, {"rollout_func": rollout_func}))
    with pytest.raises(UnsupportedError, match=r"rollout_func.*'logprobs'"):
        run.train()
