"""From finished groups to figures, and `evaluations.jsonl`, which has one line an evaluation."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from async_grpo.archive.advantages import AdvantageRule
from async_grpo.evals.estimators import Answers, Estimate, are_right_or_wrong, differences, estimates
from async_grpo.records import DIVERGENCE, RolloutGroup
from async_grpo.rundir.files import LineFile, write_lines
from async_grpo.rundir.shape import shaped_lines

SUCCESS = 1.0  # the total reward from which on a completion succeeds, where no reward function says otherwise
WORDS = {"success_rate": "success rate", "reward_mean": "mean reward"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """How rewards become successes and completions become final answers.

    A reward function may carry two attributes: `success_threshold`, a number, and `final_answer`, a function from a
    completion to a text or None.
    """

    rule: AdvantageRule
    thresholds: Mapping[int, float] = field(default_factory=dict)  # index of a reward function -> success from here on
    final_answer: Callable[[Any], str | None] | None = None

    @classmethod
    def of(cls, functions: Sequence[Any], rule: AdvantageRule) -> Judge:
        """The judge by the attributes of the trainer's reward functions."""
        thresholds = {
            index: float(function.success_threshold)
            for index, function in enumerate(functions)
            if getattr(function, "success_threshold", None) is not None
        }
        finals = [found for function in functions if (found := getattr(function, "final_answer", None)) is not None]
        return cls(rule=rule, thresholds=thresholds, final_answer=finals[0] if finals else None)

    def answers(self, group: RolloutGroup) -> Answers:
        """What a group says of its problem. `ValueError`: a completion has no reward, or an infinite one."""
        totals = self.rule.totals(group.rewards).tolist()
        if any(map(math.isnan, totals)):
            raise ValueError("no reward function gave a reward for a completion")
        if any(map(math.isinf, totals)):
            raise ValueError("the reward of a completion is infinite")
        if self.thresholds:
            successes = [all(row[index] >= least for index, least in self.thresholds.items()) for row in group.rewards]
        else:
            successes = [total >= SUCCESS for total in totals]
        finals = None if self.final_answer is None else [_text(self.final_answer(one)) for one in group.completions]
        source = group.job.row.get("data_source")
        named = {"task": group.job.task, "source": source if isinstance(source, str) else ""}
        return Answers(
            rewards=totals,
            successes=successes,
            finals=finals,
            divergences=group.metrics.get(DIVERGENCE),
            lengths=group.completion_lengths.tolist(),
            **named,
        )


def _text(final: Any) -> str | None:
    return None if final is None else str(final)


class Means(NamedTuple):
    """Means over the completions of one problem."""

    success: float
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """What one evaluation found: a line of `evaluations.jsonl`."""

    run_id: str
    step: int  # the policy version that sampled every completion
    seconds: float
    replicates: int  # completions a problem
    sampling: dict[str, Any]
    first_seq: int  # of its groups, which have consecutive sequence numbers in the order of the problems
    figures: dict[str, Estimate]
    tasks: dict[str, dict[str, Estimate]]  # of each task, where problems have some
    sources: dict[str, dict[str, Estimate]] = field(default_factory=dict)  # of each TASK/SOURCE, by `data_source`
    failed: dict[str, str]  # problem, by its index in the dataset -> why it has no answers
    by_problem: dict[str, Means] = field(default_factory=dict)
    knows_success: bool = False  # a reward function has a threshold, or all rewards are 0 or 1

    @property
    def headline(self) -> str:
        """The figure to show first: the mean reward, unless it is known what success is."""
        return "success_rate" if self.knows_success else "reward_mean"

    def in_words(self) -> str:
        """`mean reward 0.712 (95% interval 0.681 … 0.743), best@5 0.98 (…), sampled with temperature 0.6, …`."""
        if not self.figures:
            return "no problem could be evaluated"
        k = max(int(name.removeprefix("pass@")) for name in self.figures if name.startswith("pass@"))
        of_rewards, of_success = ["reward_mean", f"best@{k}"], ["success_rate", f"pass@{k}", "reward_mean"]
        names = of_success if self.knows_success else of_rewards
        shown = [f"{WORDS.get(name, name)} {self.figures[name]}" for name in names if not name.endswith("@1")]
        shown += [f"{name} {self.figures[name]}" for name in ("avg_kl",) if name in self.figures]
        first = shown[0].replace("(", "(95% interval ", 1)
        of_tasks = ", ".join(f"{task} {figures[names[0]].value:.2f}" for task, figures in self.tasks.items())
        by_task = [f"by task: {of_tasks}"] if len(self.tasks) > 1 else []
        return ", ".join([first, *shown[1:], *by_task, f"sampled with {sampling_in_words(self.sampling)}"])


def sampling_in_words(sampling: Mapping[str, Any]) -> str:
    """`temperature 0.6, top_p 0.95, top_k 20`."""
    return ", ".join(f"{name} {value}" for name, value in sampling.items())


def evaluated(
    answers: Mapping[int, Answers],
    failed: Mapping[int, str],
    *,
    ks: Sequence[int],
    has_threshold: bool = False,
    **about: Any,
) -> Evaluated:
    """Sum up the answers, by problem. `about`: the other fields of `Evaluated`."""
    problems = [answers[index] for index in sorted(answers)]
    tasks = _apart(problems, lambda one: one.task)
    sources = _apart(problems, lambda one: one.source and f"{one.task}/{one.source}".lstrip("/"))
    every_reward = (reward for one in problems for reward in one.rewards)
    return Evaluated(
        knows_success=has_threshold or are_right_or_wrong(every_reward),
        figures=estimates(problems, ks) if problems else {},
        tasks={task: estimates(own, ks) for task, own in tasks.items()},
        sources={source: estimates(own, ks) for source, own in sources.items()},
        failed={str(problem): reason for problem, reason in failed.items()},
        by_problem={str(problem): _means(answers[problem]) for problem in sorted(answers)},
        **about,
    )


def _apart(problems: Sequence[Answers], name_of: Callable[[Answers], str]) -> dict[str, list[Answers]]:
    """The problems by a name, sorted; those without one are left out."""
    names = sorted({name_of(one) for one in problems} - {""})
    return {name: [one for one in problems if name_of(one) == name] for name in names}


def _means(answers: Answers) -> Means:
    return Means(round(fmean(answers.successes), 6), round(fmean(answers.rewards), 6))


def compare(ours: Mapping[int, Answers], theirs: Mapping[int, Answers], *, ks: Sequence[int]) -> dict[str, Estimate]:
    """One model less another: the paired differences over the problems that both answered, by figure.

    Raises:
        ValueError: no problem was answered by both.
    """
    both = sorted(ours.keys() & theirs.keys())
    if not both:
        raise ValueError("no problem was answered by both models")
    return differences([ours[one] for one in both], [theirs[one] for one in both], ks)


class EvaluationLedger(LineFile):
    """`evaluations.jsonl`: what was evaluated in a run, each version once with each way of sampling.

    Args:
        resumed_from: the step of the checkpoint that this process continues from. Later versions have not happened:
            their lines are removed.
    """

    def __init__(self, path: Path, run_id: str, resumed_from: int) -> None:
        kept = [one for one in read(path) if one.run_id == run_id and one.step <= resumed_from]
        write_lines(path, [_line(one) for one in kept])
        self.steps = {one.step for one in kept}
        super().__init__(path)

    def add(self, one: Evaluated) -> None:
        self.steps.add(one.step)
        self.append(_line(one))


def read(path: Path) -> list[Evaluated]:
    """The evaluations of a run, in order; lines that cannot be read are left out."""
    return [*shaped_lines(Evaluated, path)]


def before_and_after(path: Path) -> dict[str, Any]:
    """What `summary.json` has of the evaluations of a run: the headline of the first and of the last one.

    Where that is a success rate, it is also there as `accuracy_before` and `accuracy_after`.
    """
    found = [one for one in read(path) if one.figures]
    if len(found) < 2:
        return {}
    first, last = found[0], found[-1]
    figure = first.headline if first.headline == last.headline else "reward_mean"
    before, after = (round(one.figures[figure].value, 4) for one in (first, last))
    accuracy = {"accuracy_before": before, "accuracy_after": after} if figure == "success_rate" else {}
    names = {"evaluated": figure, "evaluated_before": before, "evaluated_after": after}
    return {**names, "evaluated_with": sampling_in_words(last.sampling), **accuracy}


def _line(one: Evaluated) -> str:
    return json.dumps(asdict(one))
