"""The configuration of `PPOTrainer`: TRL's, with the fields of a critic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trl import GRPOConfig
from trl.trainer.base_config import _BaseConfig

from async_grpo.credit.gae import KL_PENALTIES


@dataclass
class _OneCompletion(_BaseConfig):
    """Comes between `GRPOConfig` and its base: TRL refuses groups of one completion, which a critic does not need."""

    _groups_of_one = False

    def __post_init__(self) -> None:
        super().__post_init__()  # the number of processes is known from here on
        config: Any = self  # the fields of TRL's, which this class has none of
        if config.num_generations == 1:
            passes = config.steps_per_generation or config.gradient_accumulation_steps
            size = config.generation_batch_size or config.per_device_train_batch_size * config.world_size * passes
            if size < 2:
                raise ValueError(
                    "PPO scales advantages over its generation batch, and one completion has no spread. Raise "
                    "per_device_train_batch_size or gradient_accumulation_steps."
                )
            self._groups_of_one, self._evaluated = True, config.num_generations_eval
            # The whole batch as one group passes TRL's check, whatever the other numbers are.
            config.num_generations, config.num_generations_eval = size, self._evaluated or 1


@dataclass
class PPOConfig(GRPOConfig, _OneCompletion):
    """TRL's `GRPOConfig`, and what a critic needs. `num_generations=1` is allowed, and the default.

    Raises:
        ValueError: a value is out of its range, or two exclude each other.
    """

    num_generations: int | None = field(default=1, metadata={"help": "Completions of each prompt."})
    delta: float | None = field(
        default=3.0,
        metadata={"help": "Bound of the ratio where the advantage is negative: the dual clip. Over 1 + epsilon_high."},
    )
    gamma: float = field(default=1.0, metadata={"help": "Discount of a reward for each token that it comes later."})
    lam: float = field(default=1.0, metadata={"help": "Lambda of generalised advantage estimation; 1: no bootstrap."})
    critic_model: str | None = field(
        default=None, metadata={"help": "Path or hub name that the critic's body is loaded from; None: the policy's."}
    )
    critic_learning_rate: float = field(default=1e-5, metadata={"help": "Of the critic; constant."})
    critic_max_grad_norm: float = field(default=1.0, metadata={"help": "The critic's gradient is clipped to it."})
    cliprange_value: float = field(default=0.5, metadata={"help": "How far a value counts as moved in one batch."})
    kl_in_reward: bool = field(
        default=False, metadata={"help": "beta * KL is taken off the reward of each token, and the loss has none."}
    )
    kl_penalty: str = field(default="kl", metadata={"help": f"Estimator of that KL: {', '.join(KL_PENALTIES)}."})
    kl_ctrl: str = field(default="fixed", metadata={"help": "fixed, or adaptive: beta follows target_kl."})
    target_kl: float = field(default=0.1, metadata={"help": "What an adaptive beta steers KL to."})
    horizon: int = field(default=10000, metadata={"help": "Completions over which an adaptive beta follows."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self._groups_of_one:
            self.num_generations, self.num_generations_eval = 1, self._evaluated
        high = 1.0 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)
        positive = ("critic_learning_rate", "critic_max_grad_norm", "cliprange_value", "target_kl", "horizon")
        for name, allowed, must in (
            *((name, 0.0 <= getattr(self, name) <= 1.0, "be from 0 to 1") for name in ("gamma", "lam")),
            *((name, getattr(self, name) > 0, "be over 0") for name in positive),
            ("delta", self.delta is None or self.delta > high, f"be over 1 + epsilon_high, which is {high:g}"),
            ("kl_penalty", self.kl_penalty in KL_PENALTIES, f"be one of {', '.join(KL_PENALTIES)}"),
            ("kl_ctrl", self.kl_ctrl in ("fixed", "adaptive"), "be fixed or adaptive"),
            ("kl_ctrl", self.kl_in_reward or self.kl_ctrl == "fixed", "be fixed without kl_in_reward=True"),
            ("beta", self.beta or not self.kl_in_reward, "not be 0 with kl_in_reward=True; verl has 0.001"),
            ("fp16", not self.fp16, "be False, as policy and critic would share one loss scale: take bf16"),
        ):
            if not allowed:
                raise ValueError(f"{name} must {must}, got {getattr(self, name)!r}.")
