"""GRPO: this system. A round is a run of `async-grpo train` in a child process, on the model of the round before.

GRPO-HF is GRPO whose reward is a proxy that was trained on the best and the worst of each group.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from async_grpo.api import AsyncGRPO
from async_grpo.errors import UsageError
from async_grpo.rundir.files import write_json
from async_grpo.rundir.reading import read_object
from async_grpo.rundir.shape import as_json, shaped
from async_grpo_experiments.algorithms.protocols import GRPO_RUN, AlgorithmSettings, Continuations, Cut, Plan, Trained
from async_grpo_experiments.algorithms.proxy import ProxySettings, proxy_of_round
from async_grpo_experiments.algorithms.rows import NO_ROWS, Rows, best_and_worst, number_of_problems

SETUP_FILE = '''"""The setup file that GRPO wrote for one round."""

from pathlib import Path

from async_grpo_experiments.algorithms.grpo import trainer_of


def get_trainer():
    return trainer_of(Path(__file__).with_name("round.json"))
'''


@dataclass(frozen=True, kw_only=True)
class GRPOSettings(AlgorithmSettings):
    samples_per_prompt: int = 4  # completions of a group
    kl_coef: float = 0.05  # weight of the divergence from the reference; TRL's `beta`
    max_new_tokens: int = 256  # the most tokens of a completion
    workers: int = 2  # processes that sample


@dataclass(frozen=True, kw_only=True)
class GRPORound:
    """What the processes of a round's run read."""

    settings: GRPOSettings
    model: str
    problems: list[dict[str, Any]]
    reward: str
    output: str


class GRPO:
    """GRPO on the problems themselves: it asks for no completions beforehand.

    Args:
        problems: rows of the dataset, with `prompt` and the columns that the reward reads.
        reward: `package.module:function`, or the folder of a proxy.
    """

    def __init__(self, settings: GRPOSettings, problems: Sequence[dict[str, Any]], reward: str) -> None:
        self.settings = settings
        self._problems, self._reward = list(problems)[: settings.max_examples], reward

    def plan(self, problems: int, round_number: int = 1) -> Plan:
        """Ask for nothing: workers sample while it trains."""
        yield from ()

    def rows(self, continuations: Sequence[Continuations], round_number: int = 1) -> Rows:
        return NO_ROWS

    def train(self, rows: Rows = NO_ROWS, start: Path | None = None, *, out: Path) -> Trained:
        """Run `async-grpo train` on the model of the round before, and save the model in `out/model`.

        A run that was interrupted in `out` is continued. `Trained.seconds` are from the first to the last step.
        """
        if (out / "model").exists():
            raise UsageError(f"{out / 'model'} holds what another training left: name another folder, or move it away.")
        out.mkdir(parents=True, exist_ok=True)
        round_ = GRPORound(
            settings=self.settings,
            model=str(start or self.settings.reference),
            problems=self._problems,
            reward=self._reward,
            output=str(out),
        )
        write_json(out / "round.json", as_json(round_))
        (out / "setup.py").write_text(SETUP_FILE)
        run = out / GRPO_RUN
        result = AsyncGRPO(out / "setup.py", workers=self.settings.workers, run_dir=run, resume=run.exists()).train()
        result.model().save_pretrained(out / "model")
        AutoTokenizer.from_pretrained(self.settings.reference).save_pretrained(out / "model")
        metrics = result.metrics
        return Trained(
            steps=len(metrics),
            loss=float(metrics["loss"].mean()),
            seconds=float(metrics["monotonic_s"].max() - metrics["monotonic_s"].min()),
            folder=out / "model",
        )


def trainer_of(path: Path) -> Any:
    """The trainer of a round, in each process of its run. The divergence is from the original reference."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from async_grpo_experiments.algorithms.training import arguments, load_policy

    round_ = shaped(GRPORound, read_object(path))
    settings, out = round_.settings, Path(round_.output)
    tokenizer = AutoTokenizer.from_pretrained(settings.reference)
    keys = arguments(settings, out) | {
        "gradient_checkpointing": settings.gradient_checkpointing,
        "num_generations": settings.samples_per_prompt,
        "max_completion_length": settings.max_new_tokens,
        "temperature": settings.temperature,
        "beta": settings.kl_coef,
        "logging_steps": 1,
    }
    trainer = GRPOTrainer(
        load_policy(round_.model, settings),
        _reward_of(round_),
        args=GRPOConfig(**keys),
        train_dataset=Dataset.from_list(round_.problems),
        processing_class=tokenizer,
    )
    if trainer.ref_model is not None:
        trainer.ref_model.load_state_dict(load_policy(settings.reference, settings).state_dict())
    return trainer


def _reward_of(round_: GRPORound) -> Any:
    module, colon, function = round_.reward.rpartition(":")
    if colon:
        return getattr(importlib.import_module(module), function)
    from async_grpo_experiments.algorithms.proxy import reward_of

    return reward_of(Path(round_.reward), round_.settings.reference)


@dataclass(frozen=True, kw_only=True)
class GRPOHFSettings(GRPOSettings, ProxySettings):
    """Keys of GRPO-HF: `epochs`, `max_steps` and `lr` are of the policy, and `proxy` has those of the proxy."""


class GRPOHF:
    """GRPO from preferences, by a proxy that round 1 trains."""

    def __init__(self, settings: GRPOHFSettings, problems: Sequence[dict[str, Any]]) -> None:
        self.settings = settings
        self._problems = problems

    def plan(self, problems: int, round_number: int = 1) -> Plan:
        """`samples_per_prompt` completions of each problem, in round 1 alone: later ones have their proxy."""
        wanted = range(number_of_problems(self.settings, problems) if round_number == 1 else 0)
        yield [Cut(problem=problem, count=self.settings.samples_per_prompt) for problem in wanted]

    def rows(self, continuations: Sequence[Continuations], round_number: int = 1) -> Rows:
        """A pair of the best and the worst of each group. Groups of equal rewards are dropped and counted."""
        return best_and_worst(continuations, self.settings) if continuations else NO_ROWS

    def train(self, rows: Rows, start: Path | None = None, *, out: Path) -> Trained:
        """Train the proxy, in round 1, and run GRPO with its scores as rewards."""
        settings = self.settings
        proxy = proxy_of_round(settings, rows, start, out)
        online = GRPOSettings(**{key.name: getattr(settings, key.name) for key in fields(GRPOSettings)})
        return GRPO(online, self._problems, str(proxy)).train(NO_ROWS, start, out=out)
