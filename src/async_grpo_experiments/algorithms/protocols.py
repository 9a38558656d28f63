"""What an algorithm asks for, what it gets, and what it leaves; and the settings that all of them have.

    plan = algorithm.plan(problems)        # a generator: it yields waves of cuts, and is sent their continuations
    rows = algorithm.rows(continuations)   # those of the last wave
    trained = algorithm.train(rows, out=folder)

Token ids are those that were sampled: nothing is tokenised twice.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar

from async_grpo.errors import BadFileError, UsageError
from async_grpo.rundir.shape import shaped
from async_grpo_experiments.guidance.strength import one_eta

GRPO_RUN = "run"  # what GRPO trains in, below the folder of a training

if TYPE_CHECKING:
    from async_grpo_experiments.algorithms.rows import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Asks for continuations of a problem's completion from a cut on, sampled or greedy."""

    problem: int  # index of the problem in the dataset
    prefix: tuple[int, ...] = ()  # tokens that the completion begins with; none: from its beginning
    count: int = 1  # continuations to sample
    greedy: bool = False  # the likeliest token each time, where all continuations are equal
    guided: bool = False  # decode with the head of the round before; otherwise it is the reference that samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuations:
    """What was sampled for a cut, scored."""

    cut: Cut
    prompt: tuple[int, ...]  # token ids of the problem, as the sampler saw them
    completions: tuple[tuple[int, ...], ...]  # `cut.count`, behind the prefix, with the end token where it was sampled
    rewards: tuple[float, ...]  # one for each whole text
    correct: tuple[bool, ...] = ()  # where the dataset can be verified; preferences then prefer what is right
    scores: tuple[float, ...] = ()  # of a reward model, for preferences; none: rewards, or 0 where `correct` says more


Plan: TypeAlias = Generator[list[Cut], Sequence[Continuations], None]


def collect(plan: Plan, answer: Callable[[list[Cut]], Sequence[Continuations]]) -> list[Continuations]:
    """The continuations of a plan's last wave; `answer` samples those of one wave, in the order of its cuts."""
    continuations: list[Continuations] = []
    wave = next(plan, None)
    while wave is not None:
        continuations = list(answer(wave))
        try:
            wave = plan.send(continuations)
        except StopIteration:
            wave = None
    return continuations


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a training leaves."""

    steps: int  # optimizer steps
    loss: float  # mean over the steps
    seconds: float  # of the training, without loading
    folder: Path  # the head, or the model; `start` of the next round


class PostTraining(Protocol):
    """An algorithm: DPO, GRPO and GRPO-HF change the weights of the policy, `heads.ValueGuided` trains a value head."""

    def plan(self, problems: int, round_number: int = 1) -> Plan:
        """The waves of cuts of one round, for this many problems."""

    def rows(self, continuations: Sequence[Continuations], round_number: int = 1) -> Rows:
        """The rows of one round, made of the plan's last wave. Another round draws other preferences."""

    def train(self, rows: Rows, start: Path | None = None, *, out: Path) -> Trained:
        """Train on the rows of all rounds so far.

        Args:
            start: `Trained.folder` of the round before; None in the first round.
            out: a folder for what is trained; it must not hold another training.
        """


@dataclass(frozen=True, kw_only=True)
class AlgorithmSettings:
    """Keys that every algorithm has; the names and defaults are those of the original."""

    reference: str  # folder or name of the model that samples
    temperature: float = 1.0  # T of the reference as it samples; nothing is truncated
    batch_size: int = 24  # rows in an optimizer step
    micro_batch_size: int = 4  # rows in a forward pass. It divides `batch_size`, and a group fits into it.
    num_workers: int = 4  # processes that load data
    epochs: float = 3
    max_steps: int = -1  # optimizer steps, whatever `epochs`; -1: as many as `epochs` needs
    lr: float = 2e-5
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    gradient_checkpointing: bool = True
    attn_impl: str = "eager"
    save_steps: int = 0  # steps between checkpoints; 0: none
    clear_cache_interval: int = 10  # steps between two times that the GPU's cache is emptied; 0: never
    seed: int = 42
    max_examples: int | None = None  # problems of the dataset that are used; None: all

    def __post_init__(self) -> None:
        _check_over_0(self, "temperature", "batch_size", "micro_batch_size", "epochs", "lr", "grad_clip")
        if self.batch_size % self.micro_batch_size:
            lower = self.batch_size // self.micro_batch_size * self.micro_batch_size
            near = [str(size) for size in (lower, lower + self.micro_batch_size) if size]
            raise UsageError(
                f"batch_size {self.batch_size} must be a multiple of micro_batch_size {self.micro_batch_size}, which "
                f"is what one forward pass takes: set batch_size to {' or '.join(near)}."
            )


@dataclass(frozen=True, kw_only=True)
class PreferenceSettings(AlgorithmSettings):
    """Keys of the algorithms that learn from pairs."""

    samples_per_example: int = 4  # cuts of a problem, or continuations of its cut: what the algorithm says
    bradley_terry_beta: float = 1.0  # β of P(b ≻ a) = σ(β·(r_b − r_a)), per unit of the reward
    bradley_terry_sampling: bool = True  # draw the preferred one by P; else labels are P, and pairs go by the reward
    correctness_bonus: float = 5.0  # added to r of what is right, where the dataset can be verified

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_over_0(self, "samples_per_example", "bradley_terry_beta")


@dataclass(frozen=True, kw_only=True)
class GuidanceSettings:
    """How a head decodes."""

    eta: float | None = None  # in units of the reward, as in the papers
    inverse_eta: float | None = None  # 1/η, which the original calls `eta`
    mode: Literal["bernoulli", "histogram", "expectation", "log_odds", "contrastive", "disabled"] = "histogram"
    top_k: int = 20  # candidates that are scored; -1: all
    use_cache: bool = True  # keep the keys and values of the prefix

    def __post_init__(self) -> None:
        _ = self.strength  # refuses what is none

    @property
    def strength(self) -> float:
        """η, .2 by default."""
        return 0.2 if self.eta is None and self.inverse_eta is None else one_eta(self.eta, self.inverse_eta)

    def keywords(self) -> dict[str, Any]:
        return {"eta": self.strength, "mode": self.mode, "top_k": self.top_k, "use_cache": self.use_cache}


@dataclass(frozen=True, kw_only=True)
class HeadSettings(AlgorithmSettings):
    """Keys of the algorithms that train a value head."""

    value: str | None = None  # the model whose backbone the head begins from; None: the reference
    loss_type: Literal["bce", "mse", "mle", "bradley_terry"] = "mle"  # one that the algorithm knows
    num_atoms: int = 11  # levels of the return from `V_min` to `V_max`, of loss_type mle
    V_min: float = 0.0
    V_max: float = 1.0
    guidance: GuidanceSettings = field(default_factory=GuidanceSettings)
    samples_per_example: int = 4  # cuts of a problem, or continuations of its cut: what the algorithm says

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_over_0(self, "samples_per_example")
        if self.num_atoms < 2:
            raise UsageError(f"num_atoms must be at least 2, for V_min and V_max, got {self.num_atoms}.")
        if self.V_max <= self.V_min:
            raise UsageError(f"V_max {self.V_max:g} must be over V_min {self.V_min:g}: they bound the reward.")


def _check_over_0(settings: AlgorithmSettings, *names: str) -> None:
    for name in names:
        if not getattr(settings, name) > 0:
            raise UsageError(f"{name} must be over 0, got {getattr(settings, name)}.")


_Settings = TypeVar("_Settings", bound=AlgorithmSettings)


def configured(kind: type[_Settings], values: Mapping[str, Any]) -> _Settings:
    """The settings that `values` gives, e.g. one algorithm's part of a file; `UsageError` names a key that is wrong."""
    try:
        return shaped(kind, dict(values), kind.__name__.removesuffix("Settings"))
    except BadFileError as error:
        raise UsageError(f"{error}.") from error
