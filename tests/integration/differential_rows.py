"""What is compared with plain TRL: a row is a trainer as a user may have it, and what shows that the row is at work.

`test_trl_differential` trains each row asynchronously, then with plain TRL on the same completions, and compares all
that both log. `trl_table` names the rows that show a field, an argument or a method at work. A row may hold much:
each reward function, field and method has a metric of its own that differs where it is not followed.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from types import MethodType
from typing import Any
from zlib import crc32

import matrix
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from datasets import Dataset
from peft import LoraConfig
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback
from trl import GRPOTrainer

from async_grpo.setup.overrides import check_overrides
from async_grpo.training.corrections.rule import rule
from async_grpo.training.padding import METRIC
from kit.compared_with_trl import BAD_CALL, TIMES, Reply, own_names
from kit.in_process import InProcessRun
from kit.own_code import Backwards, ReadsOldLogProbabilities, Shortened, judge
from kit.tiny_trainer import (
    QWEN3_CHAT_TEMPLATE,
    build_model,
    build_tokenizer,
    build_trainer,
    chat_rows,
    length,
    letters,
    text_of,
)
from kit.tools import TOOL_CALL, Adder, counts_tool_results, multiply, says_twelve

REFERENCE = "the model in a folder, from which TRL loads a reference model as well"
Shows = Callable[[InProcessRun], Any]
Held = list[Any]  # the trainer of a closure, once it is built


def trained(run: InProcessRun) -> bool:
    """Weights moved."""
    return any(entry["grad_norm"] > 0.01 for entry in run.logs)


@dataclass(frozen=True)
class Row:
    """One trainer that is compared.

    Args:
        changes: of `build_trainer`; `given` are those of TRL's trainer.
        own: more of `changes`, which each trainer has for itself.
        after: changes the trainer when it is built.
        patches: methods of classes of TRL's, and what is called in their place, with the method.
        reply: a script writes in the place of the model.
        stale: three batches are of the same weights, and TRL is told to take the policy that sampled for the old one.
        options: of the run: `correction`, `padding`.
        shows: is true where the row did what it is there for.
    """

    changes: Mapping[str, Any]
    own: Callable[[Held], dict[str, Any]] = lambda held: {}
    after: Callable[[Any], None] = lambda trainer: None
    patches: tuple[tuple[type, str, Callable[..., Any]], ...] = ()
    reply: Reply | None = None
    stale: bool = False
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    shows: Shows = trained

    def builder(self, folder: Path, model_folder: str) -> Callable[..., GRPOTrainer]:
        def get_trainer(arguments: dict[str, Any] | None = None, **more: Any) -> GRPOTrainer:
            held: Held = []
            changes = {**self.changes, **self.own(held), **more}
            if changes.get("model") is REFERENCE:
                changes["model"] = model_folder
            given = {**changes.pop("given", {}), **(arguments or {})}
            held.append(build_trainer(folder, arguments=given, **changes))
            self.after(held[0])
            check_overrides(held[0])
            return held[0]

        return get_trainer


def row(**both: Any) -> Row:
    named = {one.name: both.pop(one.name) for one in dataclasses.fields(Row) if one.name in both}
    return Row(both, **named)


# --- Losses and schedules ---------------------------------------------------------------------------------

ON_STALE_GROUPS: dict[str, dict[str, Any]] = {
    "dapo": {"epsilon": 0.02, "epsilon_high": 0.03},
    "grpo": {"importance_sampling_level": "sequence", "scale_rewards": "batch", "epsilon": 0.01},
    "bnpo": {"delta": 1.02, "epsilon_high": 0.5},
    "dr_grpo": {"scale_rewards": "none", "beta": 0.1, "model": REFERENCE},
    "cispo": {"epsilon_high": 0.02},
    "sapo": {"sapo_temperature_neg": 2.0, "sapo_temperature_pos": 1.5},
    "luspo": {"importance_sampling_level": "sequence", "top_entropy_quantile": 0.5},
    "vespo": {"vespo_k_pos": 1.0, "vespo_lambda_pos": 2.0, "vespo_k_neg": 2.0, "learning_rate": 3e-3},
}
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
ACCUMULATING = {"per_device_train_batch_size": 2, "steps_per_generation": 4, "gradient_accumulation_steps": 4}
TWICE = {"num_iterations": 2, "max_steps": 4}
UNEVEN = {"max_completion_length": 60, "max_steps": 3}
CORRECTIONS = [
    *map(rule, ("decoupled", "tis", "icepop", "none")),
    *(rule("tis", "sequence"), rule("icepop", "sequence"), rule("icepop", "geometric")),
]


def strays(run: InProcessRun) -> bool:
    """The policy that trains is not the one that sampled."""
    assert [entry["async/staleness_max"] for entry in run.logs] == [0, 1, 2, 0]
    return trained(run) and run.logs[2]["async/ratio_max"] > 1.05


def unpadded(run: InProcessRun) -> bool:
    return trained(run) and all(entry[METRIC] < 1.2 for entry in run.logs if entry["grad_norm"])


def only_the_adapter_moved(run: InProcessRun) -> bool:
    after, before = run.trainer.model.state_dict(), run.worker.model.state_dict()  # without the last step
    moved = [name for name in after if not after[name].equal(before[name])]
    return bool(moved) and all("lora" in name for name in moved)


def some_were_truncated(run: InProcessRun) -> bool:
    return any(0 < entry["completions/clipped_ratio"] < 1 for entry in run.logs)


def built_by_trl(run: InProcessRun) -> bool:
    assert run._working.calls._engine._config.cache_implementation == "dynamic"
    return {side.model.config._attn_implementation for side in (run.trainer, run.worker)} == {"eager"}


def mixture_of_experts(held: Held) -> dict[str, Any]:
    return {"model": matrix.build(matrix.Row(family="qwen3_moe", model={"output_router_logits": True}))}


def gradient_descent(held: Held) -> dict[str, Any]:
    model = build_model(build_tokenizer())
    return {"model": model, "given": {"optimizers": (torch.optim.SGD(model.parameters(), lr=0.5), None)}}


BUILT_BY_TRL = {"model_init_kwargs": {"attn_implementation": "eager"}, "cache_implementation": "dynamic"}
LOSSES: dict[str, Row] = {
    **{
        f"{loss} on stale groups": row(**{"max_steps": 4, "learning_rate": 1e-2, **it}, stale=True, shows=strays)
        for loss, changes in ON_STALE_GROUPS.items()
        for it in [{**changes, "loss_type": loss}]
    },
    **{f"{one} of fresh groups": row(options={"correction": one}, num_iterations=2) for one in CORRECTIONS},
    **{
        f"{one} of fresh groups, vespo": row(options={"correction": one}, loss_type="vespo")
        for one in CORRECTIONS
        if one.level == "token"  # it takes no other
    },
    "twenty steps": row(model=REFERENCE, max_steps=20, beta=0.1, loss_type="grpo"),
    "micro-batches without padding": row(**UNEVEN, **ACCUMULATING, options={"correction": "tis"}, shows=unpadded),
    "micro-batches with padding": row(
        **UNEVEN, **ACCUMULATING, options={"padding": "trl"}, shows=lambda run: trained(run) and not unpadded(run)
    ),
    "micro-batches that are generation batches": row(  # the fourth step ends an epoch, with two of them
        **{**UNEVEN, **ACCUMULATING, "steps_per_generation": 1, "max_steps": 5}, options={"correction": "tis"}
    ),
    "iterations without padding": row(
        **{**UNEVEN, **ACCUMULATING, "gradient_accumulation_steps": 2, "max_steps": 8},
        num_iterations=2,
        pad_to_multiple_of=8,
        model=REFERENCE,
        beta=0.05,
        loss_type="grpo",
        shows=unpadded,
    ),
    "an adapter": row(given={"peft_config": LORA}, beta=0.1, shows=only_the_adapter_moved),
    "truncated completions are masked": row(
        mask_truncated_completions=True, max_completion_length=20, seed=0, max_steps=4, shows=some_were_truncated
    ),
    "a mask of sequences": row(off_policy_mask_threshold=0.5, options={"correction": "tis"}),
    "a mixture of experts": row(
        own=mixture_of_experts, router_aux_loss_coef=0.1, shows=lambda run: run.logs[0]["aux_loss"] > 0
    ),
    "a model that TRL builds": row(model=REFERENCE, **BUILT_BY_TRL, trust_remote_code=True, shows=built_by_trl),
    "an optimizer": row(own=gradient_descent, shows=lambda it: type(it.trainer.optimizer.optimizer) is torch.optim.SGD),
}

# --- Rewards ----------------------------------------------------------------------------------------------


async def async_letters(completions: list[Any], **columns: Any) -> list[float]:
    await asyncio.sleep(0)
    return letters(completions, **columns)


def reaches_target(
    prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], target: list[int], **_: Any
) -> list[float]:
    assert [len(text_of(prompt)) for prompt in prompts] == target
    rows = zip(map(text_of, completions), target, completion_ids, letters(completions), strict=True)
    return [score - abs(len(text) - n) + len(ids) / 10 for text, n, ids, score in rows]


def logs_digits(completions: list[Any], log_extra: Any, log_metric: Any, **_: Any) -> list[float]:
    texts = [text_of(completion) for completion in completions]
    log_extra("first_letter", [text[:1] for text in texts])
    log_metric("digits", sum(c.isdigit() for text in texts for c in text) / len(texts))
    return letters(completions)


def only_even(completions: list[str], target: list[int], **_: Any) -> list[float | None]:
    return [None if n % 2 else score for n, score in zip(target, letters(completions), strict=True)]


def only_short(completions: list[str], target: list[int], **_: Any) -> list[float | None]:
    return [None if n > 1 else 1.0 - score for n, score in zip(target, letters(completions), strict=True)]


def odd(wrong: float) -> Any:
    def sometimes(completions: list[str], target: list[int], **_: Any) -> list[float]:
        return [wrong if n == 3 else score for n, score in zip(target, letters(completions), strict=True)]

    return sometimes


STATE = ("global_step", "max_steps", "epoch", "num_train_epochs", "train_batch_size", "is_world_process_zero")
THREAD = ThreadPoolExecutor(1)


def curriculum(completions: list[Any], trainer_state: Any, **_: Any) -> list[float]:
    place = sum((at + 1) * getattr(trainer_state, name) for at, name in enumerate(STATE))
    return [place * score for score in letters(completions)]


def in_threads(completions: list[Any], trainer_state: Any, **_: Any) -> list[float]:
    return [score + THREAD.submit(lambda: trainer_state.global_step).result() for score in letters(completions)]


async def in_coroutines(completions: list[Any], trainer_state: Any, **_: Any) -> list[float]:
    await asyncio.sleep(0)
    return [score * trainer_state.global_step for score in letters(completions)]


def reads_state(trainer: Any) -> float:
    state = trainer.state
    return float(state.global_step + state.epoch + 10 * trainer.is_in_train + 100 * trainer.model.training)


def reads_log(trainer: Any) -> float:
    """The log as it is, in a copy of the state, and in a dictionary of it."""
    state = trainer.state
    logs = state.log_history, copy.deepcopy(state).log_history, dataclasses.asdict(state)["log_history"]
    assert all(len(log) == state.global_step for log in logs)
    entries = [(at + 1, entry) for at, log in enumerate(logs) for entry in log]
    return sum(at * float(entry[name]) for at, entry in entries for name in own_names(entry) - {*TIMES})


def reads_levels(trainer: Any) -> float:
    return float(getattr(trainer.state, "level", 0) + (trainer.state.best_metric or 0) / 10)


def tests_what_is_there(trainer: Any) -> float:
    """What no worker has may be tested."""
    there = [getattr(trainer, name) for name in ("optimizer", "lr_scheduler", "ref_model")]
    return float(sum(bool(one) + 2 * (one is not None) + 4 * (one != None) for one in there))  # noqa: E711


def adds_to_metrics(trainer: Any) -> float:
    """Another number of values in each batch."""
    trainer._metrics["train"]["steps"] += [float(trainer.state.global_step)] * (1 + trainer.state.global_step)
    return 0.0


class Levels(TrainerCallback):
    """A curriculum of the user's, in the state. It is called after the jobs of the next step were issued."""

    def on_step_end(self, args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
        state.level = state.global_step // 2

    def on_log(self, args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
        state.best_metric = float(state.global_step)


def closures(held: Held) -> dict[str, Any]:
    """Rewards that read the trainer which they have in their closure."""

    def reading(look: Callable[[Any], float]) -> Any:
        def reward(completions: list[Any], **_: Any) -> list[float]:
            return [score + look(held[0]) for score in letters(completions)]

        reward.__name__ = look.__name__
        return reward

    looks = (reads_state, reads_log, reads_levels, tests_what_is_there, adds_to_metrics)
    return {"reward_funcs": [*map(reading, looks)], "given": {"callbacks": [Levels()]}}


def reward_model(held: Held) -> dict[str, Any]:
    return {"reward_funcs": [judge(), letters], "given": {"reward_processing_classes": [build_tokenizer(), None]}}


def rows_of_types() -> Dataset:
    columns = {
        "prompt": ["a", "bc"],
        "taken": [datetime(2026, 3, 1, 12, 30, 0, 17), None],
        "days": [[date(2026, 3, 1)], []],
        "read": [{"at": time(23, 59, 1), "after": timedelta(days=-1, microseconds=5)}, None],
        "price": [Decimal("1.50"), Decimal("-0.07")],
        "file": [b"\x00\xffpng", b""],
    }
    rows = Dataset.from_dict(columns)
    rows = rows.add_column("zone", pa.array([1, 2], pa.timestamp("ms", tz="Europe/Berlin")))
    return rows.add_column("exact", pa.array([1_000_000_001, None], pa.timestamp("ns")))


TYPED = rows_of_types()


def of_types(completions: list[Any], trainer_state: Any, log_extra: Any, **columns: Any) -> list[float]:
    """A number of all columns of a row, with their types."""
    names = [name for name in TYPED.column_names if name != "prompt"]
    told = [repr([columns[name][at] for name in names]) for at in range(len(completions))]
    log_extra("columns", told)
    return [crc32(text.encode()) % 97 + score for text, score in zip(told, letters(completions), strict=True)]


def scores_are_missing(run: InProcessRun) -> bool:
    nan = [np.isnan(group.rewards) for group in run.groups]
    return any(one.all() for one in nan) and any(one.any() and not one.all() for one in nan)


def some_reward_is_odd(run: InProcessRun) -> bool:
    return any(not np.isfinite(group.rewards).all() for group in run.groups)


def completions_are_written(run: InProcessRun) -> bool:
    """A file for each batch, with the rewards that workers gave."""
    files = sorted((Path(run.trainer.args.output_dir) / "completions").glob("*.parquet"))
    rewards = [reward for group in run.batches[0] for reward in group.rewards[:, 0]]
    return len(files) == len(run.batches) and np.allclose(pq.read_table(files[0])["letters"].to_pylist(), rewards)


EVERY = [letters, async_letters, length, reaches_target, logs_digits, curriculum, in_threads, in_coroutines]
WEIGHTS = [1.0, 0.5, 0.1, 0.3, 2.0, 0.01, 0.2, 0.4]
REWARDS: dict[str, Row] = {
    "reward functions": row(reward_funcs=EVERY, reward_weights=WEIGHTS, max_steps=5),
    "reward functions of conversations": row(
        reward_funcs=EVERY,
        reward_weights=WEIGHTS,
        multi_objective_aggregation="normalize_then_sum",
        chat_template=QWEN3_CHAT_TEMPLATE,
        max_steps=3,
    ),
    "reward functions of stale groups": row(reward_funcs=EVERY, max_steps=4, stale=True),
    "rewards of None": row(reward_funcs=[only_even, only_short], max_steps=3, shows=scores_are_missing),
    **{
        f"a reward of {wrong}": row(reward_funcs=odd(wrong), scale_rewards=scale, max_steps=3, shows=some_reward_is_odd)
        for wrong, scale in ((math.inf, "group"), (-math.inf, "batch"), (math.nan, "group"))
    },
    "a reward model": row(own=reward_model),
    "dates, times, decimals and bytes": row(train_dataset=TYPED, reward_funcs=of_types, per_device_train_batch_size=4),
    "rewards that read the trainer": row(own=closures, model=REFERENCE, beta=0.1, max_steps=4),
    "completions that are logged": row(
        log_completions=True, num_completions_to_print=1, log_multimodal=False, shows=completions_are_written
    ),
}

# --- Methods of the user's --------------------------------------------------------------------------------


class Doubling:
    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super()._calculate_rewards(*args, **kwargs)  # type: ignore[misc]


class Overriding(Doubling, GRPOTrainer):
    """Each method changes a metric of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.factor, self.made = 3.0, 0

    def get_train_dataloader(self) -> Any:
        self.made += 1
        return super().get_train_dataloader()

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, *args: Any) -> Any:
        for text in completions:
            self._metrics["train"]["rewards/characters"].append(len(text))
        self._metrics["train"].setdefault("reward_calls", []).extend([1.0])
        return self.factor * super()._calculate_rewards(inputs, prompts, completions, *args)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().compute_loss(*args, **kwargs)

    def _log_metric(self, name: str, value: float) -> None:
        super()._log_metric(f"mine/{name}", value)


class PerToken(GRPOTrainer):
    """Advantages of shape [B, C], as TRL's loss allows a subclass to give."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        places = torch.linspace(0.5, 1.5, output["completion_ids"].shape[1])
        return {**output, "advantages": output["advantages"][:, None] * places}


def doubled(method: Any, *args: Any, **kwargs: Any) -> Any:
    return 2 * method(*args, **kwargs)


def halved(method: Any, self: Any, inputs: Any) -> Any:
    output = method(self, inputs)
    return {**output, "advantages": output["advantages"] / 2}


def more_entropy(method: Any, *args: Any, **kwargs: Any) -> Any:
    logprobs, entropies, *rest = method(*args, **kwargs)
    return logprobs, entropies if entropies is None else 2 * entropies, *rest


def assigned_methods(trainer: Any) -> None:
    trainer.saved = saved = []
    mine = {
        "_compute_loss": doubled,
        "_get_per_token_logps_and_entropies": more_entropy,
        "log": lambda method, logs, *args: method({**logs, "mine": 1.0}, *args),
        "_save_checkpoint": lambda method, *args: (saved.append(trainer.state.global_step), method(*args)),
    }
    for name, around in mine.items():
        method = getattr(trainer, name)
        bound = lambda self, *args, method=method, around=around, **kwargs: around(method, *args, **kwargs)  # noqa: E731
        setattr(trainer, name, MethodType(bound, trainer))


def backwards(trainer: Any, dataset: Any) -> list[Any]:
    return [one for one in reversed(dataset) for _ in range(trainer.num_generations)]


def assigned_loader(trainer: Any) -> None:
    rows = backwards(trainer, list(trainer.train_dataset))
    trainer.get_train_dataloader = lambda: DataLoader(rows, batch_size=8, collate_fn=list)


def assigned_data(trainer: Any) -> None:
    trainer.data_collator = lambda rows: [{**one, "prompt": f"{one['prompt']}!"} for one in rows]
    trainer._get_train_sampler = lambda dataset=None: backwards(trainer, range(len(dataset or trainer.train_dataset)))


def assigned_ones_ran(run: InProcessRun) -> bool:
    assert run.trainer.saved == [1, 2] and run.checkpoints == ["checkpoint-1", "checkpoint-2"]
    return all("mine" in entry for entry in run.logs)


def prompts_of(run: InProcessRun) -> list[str]:
    return [group.job.row["prompt"] for group in run.groups]


def reads_backwards(run: InProcessRun) -> bool:
    """Twice, where it trains long enough."""
    prompts = prompts_of(run)
    return prompts[:4] == ["1+1", "zz", "y", "wx"] == (prompts[12:16] or prompts[:4])


def overridden_once(run: InProcessRun) -> bool:
    """In its second epoch, too, the prompts are TRL's: their order is drawn by an iteration of the loader's own."""
    assert run.trainer.made == 1 and len(run.groups) == 24
    assert prompts_of(run)[:12] != prompts_of(run)[12:]
    return [name for name in run.logs[0] if name.endswith("digits")] == ["mine/digits"]


def one_token_less(run: InProcessRun) -> bool:
    """Eight tokens are sampled, and the model seldom ends by itself."""
    return max(int(size) for group in run.groups for size in group.completion_lengths) == 7


PATCHES_OF_TRL = [
    (GRPOTrainer, name, around)
    for name, around in (("_calculate_rewards", doubled), ("_generate_and_score_completions", halved))
]
METHODS: dict[str, Row] = {
    "overrides": row(trainer_class=Overriding, reward_funcs=logs_digits, max_steps=6, shows=overridden_once),
    "patches": row(patches=(*PATCHES_OF_TRL, (Trainer, "training_step", doubled))),
    "assigned methods": row(after=assigned_methods, save_strategy="steps", save_steps=1, shows=assigned_ones_ran),
    "a dataloader": row(trainer_class=Backwards, num_iterations=2, max_steps=8, shows=reads_backwards),
    "a dataloader that is assigned": row(after=assigned_loader, max_steps=3, shows=reads_backwards),
    "a data collator and a sampler that are assigned": row(
        after=assigned_data, max_steps=3, shows=lambda run: prompts_of(run)[:4] == ["1+1!", "zz!", "y!", "wx!"]
    ),
    "a single turn": row(trainer_class=Shortened, max_completion_length=8, shows=one_token_less),
    "old log-probabilities": row(trainer_class=ReadsOldLogProbabilities, **TWICE),
    "advantages of each token": row(trainer_class=PerToken, **TWICE, options={"correction": "tis"}),
    "columns that are removed": row(
        remove_unused_columns=True,
        shows=lambda run: {name for group in run.groups for name in group.job.row} == {"prompt"},
    ),
}

# --- Tools, environments and a rollout_func ---------------------------------------------------------------


def calls_tools(prompt: str, index: int) -> str:
    """A tool, an async one, one that is not there, and none."""
    if "<tool_response>" in prompt:
        return "twelve"
    return (f"let me see{TOOL_CALL}", TOOL_CALL.replace("multiply", "later"), BAD_CALL, "eleven")[index % 4]


def adds_three(prompt: str, index: int) -> str:
    if "<tool_response>" in prompt:
        return "done"
    assert " Reach " in prompt, "the observation of reset() must be in the prompt"
    return '<tool_call>\n{"name": "add", "arguments": {"number": 3}}\n</tool_call>' if index % 2 else "nothing"


def noting_tools(held: Held) -> dict[str, Any]:
    """Tools that read the step, and add to the metrics."""

    def noted(a: int, b: int) -> int:
        held[0]._metrics["train"]["products"].append(12.0 + held[0].state.global_step)
        return a * b

    async def later(a: int, b: int) -> int:
        await asyncio.sleep(0)
        return noted(a, b)

    noted.__doc__ = later.__doc__ = multiply.__doc__
    noted.__name__ = "multiply"
    return {"given": {"tools": [noted, later]}}


def noting_environment(held: Held) -> dict[str, Any]:
    """An environment that is to come to a target."""

    class Counting(Adder):
        def reset(self, **row: Any) -> str:
            held[0]._metrics["train"]["resets"].append(held[0].state.global_step)
            self.total, self.target = 0, row.get("target", 5)
            return f" Reach {self.target}."

        def get_reward(self) -> float:
            return -float(abs(self.total - self.target))

    def totals(completions: list[Any], environments: list[Any], **_: Any) -> list[float]:
        return [float(one.total) for one, _ in zip(environments, completions, strict=True)]

    return {"given": {"environment_factory": Counting, "eval_dataset": chat_rows(2)}, "reward_funcs": [totals, length]}


def in_a_pool(held: Held) -> dict[str, Any]:
    given = noting_environment(held)["given"]
    return {"given": {"environment_factory": {"count": given["environment_factory"]}}, "reward_funcs": [length]}


def tools_ran(run: InProcessRun) -> bool:
    assert len(run.trainer.tools) == 2, "the trainer needs them again for evaluation"
    wrote = run.groups[0].completions[0]
    assert [message["role"] for message in wrote] == ["assistant", "tool", "assistant"]
    assert wrote[1] == {"role": "tool", "name": "multiply", "content": "12"}
    assert [round(3 * entry["tools/failure_frequency"]) for entry in run.logs] == [1, 1, 1]
    return [entry["products"] for entry in run.logs] == [12.0, 13.0, 14.0]


def one_call_each(run: InProcessRun) -> bool:
    completions = [completion for group in run.groups for completion in group.completions]
    return {sum(message["role"] == "tool" for message in one) for one in completions} == {1}


def environments_are_rewarded(run: InProcessRun) -> bool:
    evaluations = [entry for entry in run.trainer.state.log_history if "eval_reward" in entry]
    assert run.trainer.environment_factories is not None
    assert len(evaluations) == 2 and [entry["resets"] for entry in run.logs] == [0, 1]
    targets = [group.job.row["target"] for group in run.groups]
    return [group.rewards[:, -1].tolist() for group in run.groups] == [[-n, -abs(3 - n)] for n in targets]


def rollout_func(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
    ids = trainer.processing_class([f"{index % 2}xy" for index in range(len(prompts))])["input_ids"]
    return {
        "prompt_ids": trainer.processing_class(prompts)["input_ids"],
        "completion_ids": ids,
        "logprobs": [[-1.0] * len(row) for row in ids],
        "env_mask": [[1, 0, 1] for _ in ids],
        "score": [float(index % 2) for index in range(len(prompts))],
    }


def given_score(completions: list[str], score: list[float], **_: Any) -> list[float]:
    return score


DIALOGUE: dict[str, Any] = {"chat_template": QWEN3_CHAT_TEMPLATE, "max_completion_length": 256}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2}
OWN_PROMPTS = Dataset.from_list([{"environment": "count", "target": n} for n in range(8)])
DIALOGUES: dict[str, Row] = {
    "tools": row(
        **{**DIALOGUE, "reward_funcs": [says_twelve, counts_tool_results], "max_steps": 3, "num_generations": 4},
        own=noting_tools,
        reply=calls_tools,
        shows=tools_ran,
    ),
    "a limit of tool calls": row(
        **{**DIALOGUE, "given": {"tools": [multiply]}, "max_tool_calling_iterations": 1, "max_steps": 1},
        reply=lambda prompt, index: f"again{TOOL_CALL}",
        shows=one_call_each,
    ),
    "an environment": row(
        **{**DIALOGUE, **EVALUATED, "train_dataset": chat_rows()},
        own=noting_environment,
        reply=adds_three,
        shows=environments_are_rewarded,
    ),
    "environments that bring prompts": row(**DIALOGUE, own=in_a_pool, train_dataset=OWN_PROMPTS, reply=adds_three),
    "a rollout_func": row(given={"rollout_func": rollout_func}, reward_funcs=given_score),
}

ROWS: dict[str, Row] = {**LOSSES, **REWARDS, **METHODS, **DIALOGUES}
