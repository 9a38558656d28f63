"""PPO on top of TRL's trainer: a critic gives the advantages of tokens in place of a comparison within a group.

All else is TRL's: generation, rewards, masks, the clipped loss, the reference model, logging. `gae` has the formulas,
`critic` the critic.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from async_grpo.credit import critic as critics
from async_grpo.credit.critic import Critic
from async_grpo.credit.gae import (
    adapted,
    explained_variance,
    gae,
    kl_penalties,
    rewards_of_tokens,
    value_losses,
    whitened,
)
from async_grpo.credit.ppo_config import PPOConfig
from async_grpo.credit.rarely_timed import RarelyTimed
from async_grpo.credit.trainer import TurnGRPOTrainer
from async_grpo.records import RolloutGroup
from async_grpo.settings import NO_PADDING, PADDING_OF_TRL
from async_grpo.setup.algorithm import Algorithm
from async_grpo.setup.generator_choice import has_images
from async_grpo.setup.pieces import Pieces

_OF_GROUPS = ("credit", "turn_advantage_coef", "turn_discount", "no_turn_reward", "original")
_SAME = {  # verl's name of a figure, and TRL's
    "response_length/mean": "completions/mean_length",
    "response_length/max": "completions/max_length",
    "response_length/min": "completions/min_length",
    "response_length/clip_ratio": "completions/clipped_ratio",
}


class PPOTrainer(RarelyTimed, TurnGRPOTrainer, Algorithm):
    """A `GRPOTrainer` whose advantages are those of a critic, which is trained beside the policy.

    Args:
        args: a `PPOConfig`.
        critic: a module that is called with `input_ids` and `attention_mask` and returns `logits` [B, T, 1]; None: one
            is made when the training starts (`critic_model`).
        turn_reward_funcs: as for `TurnGRPOTrainer`. The reward of a turn is at its last token; `reward_funcs` reward
            the last token of the completion.

    Raises:
        ValueError: an argument is of a comparison within groups, or the critic does not fit the policy.
    """

    token_columns = ("values", "returns", "value_mask")
    compares_groups = False

    args: PPOConfig
    kl_coef: float  # beta, where KL is in the reward
    _critic: Critic | None = None  # from the start of the training

    def __init__(self, *args: Any, critic: nn.Module | None = None, **kwargs: Any) -> None:
        if of_groups := [name for name in _OF_GROUPS if name in kwargs]:
            raise ValueError(
                f"{of_groups[0]} is of advantages that compare the completions of a group, and those of PPOTrainer are "
                "its critic's. Leave it out, or take TurnGRPOTrainer."
            )
        super().__init__(*args, **kwargs)
        _refuse(self, critic)
        self._own_critic = critic
        self._seconds: defaultdict[str, float] = defaultdict(float)  # of this optimizer step
        # of this step as well: value loss, clipped tokens, tokens, all tokens read
        self._sums = torch.zeros(4, dtype=torch.float64, device="cpu")
        self.kl_coef = float(self.args.beta)
        self.beta = self._beta_of_loss

    @property
    def _beta_of_loss(self) -> float:
        return 0.0 if self.args.kl_in_reward else float(self.args.beta)

    def teaches_nothing(self, group: RolloutGroup) -> bool:
        return False

    def trained_besides(self) -> int:
        return critics.parameters_of(self.model, self._own_critic, self.args.critic_model, self.args.model_init_kwargs)

    # The start of a training, and its checkpoints

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        args = self.args
        module: Any = self._own_critic
        if module is None:
            module = critics.made_for(self.model, args.critic_model, args.model_init_kwargs, args.seed)
            if args.gradient_checkpointing:
                module.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        rate, norm = args.critic_learning_rate, args.critic_max_grad_norm
        pieces = Pieces(self.accelerator) if getattr(self, "padding", PADDING_OF_TRL) == NO_PADDING else None
        self._critic = Critic(module, self.accelerator, learning_rate=rate, max_grad_norm=norm, pieces=pieces)
        if resume_from_checkpoint is not None:
            coefficient = self._critic.load(Path(resume_from_checkpoint))
            self.kl_coef = coefficient if args.kl_ctrl == "adaptive" else self.kl_coef
        return prepared

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with self.timed_rarely("save_checkpoint"):
            super()._save_checkpoint(model, trial)
            if not self.args.save_only_model:
                folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
                self.critic.save(folder, self.kl_coef)

    @property
    def critic(self) -> Critic:
        assert self._critic is not None, "there is a critic from the start of the training"
        return self._critic

    # Advantages

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        started, before = time.perf_counter(), sum(self._seconds.values())
        self.beta = self.args.beta  # TRL computes the reference where beta is not 0
        try:
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        finally:
            self.beta = self._beta_of_loss
        if self.model.training:
            others = sum(self._seconds.values()) - before
            self._seconds["gen"] += time.perf_counter() - started - others
            metrics = self._metrics["train"]
            for name, of_trl in _SAME.items():
                metrics[name].append(metrics[of_trl][-1])
            if self.num_generations == 1:  # of groups of one it says nothing
                del metrics["frac_reward_zero_std"]
        return output

    def token_advantages(self, output: dict[str, Any], turns: list[list[float]], masks: list[list[int]]) -> Tensor:
        """Advantages [B, T], scaled over the generation batch; adds what the critic is trained with to `output`."""
        size, width = output["completion_ids"].shape
        own = slice(self.accelerator.process_index * size, (self.accelerator.process_index + 1) * size)
        outcomes, totals = self._outcome_and_total(self.batch_rewards)
        self._report(outcomes, totals, [len(row) for row in turns])
        with self._timed("values"):
            values = self.critic.old_values(output, self.args.per_device_train_batch_size)
        with self._timed("adv"):
            has_reward = ~(outcomes.isnan() & totals.isnan())[own].to(values.device)
            mask = output["completion_mask"] * output.get("tool_mask", 1) * has_reward[:, None]
            scores = rewards_of_tokens(outcomes[own].to(values), turns[own], masks[own], width)
            rewards = (scores - self._penalty(output, mask)) * mask
            advantages, returns = gae(rewards, values, mask, gamma=self.args.gamma, lam=self.args.lam)
            advantages = whitened(advantages, mask, self._everywhere)
            counts, known = mask.bool(), mask.any(dim=1)
            self._note("score", scores.sum(dim=1)[known])
            self._note("rewards", rewards.sum(dim=1)[known])
            self._note("advantages", advantages[counts])
            of_all = {"returns": self._note("returns", returns[counts]), "values": self._note("values", values[counts])}
            self._metrics["train"]["critic/vf_explained_var"].append(explained_variance(**of_all))
        output |= {"values": values * mask, "returns": returns, "value_mask": mask}
        return advantages

    def _penalty(self, output: dict[str, Any], mask: Tensor) -> Tensor | float:
        """What KL to the reference takes off the rewards [B, T]; changes the coefficient for the next batch."""
        args = self.args
        if not args.kl_in_reward:
            return 0.0
        logprobs, reference = self._logprobs_of_sampler(output), output.pop("ref_per_token_logps")
        kl = kl_penalties(logprobs, reference, args.kl_penalty).nan_to_num(nan=0.0) * mask  # NaN: vLLM has not said
        tokens = mask.sum(dim=1)
        mean = float(self._everywhere((kl.sum(dim=1) / tokens.clamp(min=1))[tokens > 0]).mean())
        coefficient, completions = self.kl_coef, len(mask) * self.accelerator.num_processes
        self._metrics["train"]["actor/kl_coef"].append(coefficient)
        self._metrics["train"]["actor/reward_kl"].append(mean)
        if args.kl_ctrl == "adaptive" and mean == mean:
            self.kl_coef = adapted(
                coefficient, mean, target=args.target_kl, horizon=args.horizon, completions=completions
            )
        return coefficient * kl

    def _logprobs_of_sampler(self, output: dict[str, Any]) -> Tensor:
        for recorded in ("sampling_per_token_logps", "old_per_token_logps"):
            if recorded in output:
                return output[recorded]
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        attention_mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        rows, width = self.args.per_device_train_batch_size, output["completion_ids"].shape[1]
        with torch.no_grad():
            logprobs, *_ = self._get_per_token_logps_and_entropies(
                self.model, ids, attention_mask, width, batch_size=rows
            )
        return logprobs

    def _everywhere(self, values: Tensor) -> Tensor:
        """The values of all processes, [N], in the order of ranks."""
        if self.accelerator.num_processes == 1:
            return values
        return torch.cat(gather_object([values.cpu()])).to(values.device)

    def _note(self, name: str, values: Tensor) -> Tensor:
        """Log mean, maximum and minimum over all processes; returns all values."""
        known = self._everywhere(values.float())
        for what in ("mean", "max", "min") if len(known) else ():
            self._metrics["train"][f"critic/{name}/{what}"].append(float(getattr(known, what)()))
        return known

    # Steps

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        inputs = super()._prepare_inputs(generation_batch)
        self._prepared_at = time.perf_counter()
        return inputs

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """TRL's step on a micro-batch, then the critic's on the same one."""
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        self._seconds["update_actor"] += time.perf_counter() - self._prepared_at
        with self._timed("update_critic"):
            self._train_critic(self._buffered_inputs[(self._step - 1) % self.args.steps_per_generation])
        if self.accelerator.sync_gradients:
            self._log_step()
        return loss

    def _train_critic(self, batch: dict[str, Any]) -> None:
        is_last, mask = bool(self.accelerator.sync_gradients), batch["value_mask"]
        with self.critic.accumulating(last=is_last):
            values = self.critic.values(batch)
            losses, clipped = value_losses(values, batch["values"], batch["returns"], clip=self.args.cliprange_value)
            of_process = batch["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes  # as TRL's `dapo`
            of_step = of_process * self.current_gradient_accumulation_steps / self.args.steps_per_generation
            loss = (losses * mask).sum() / of_step
            self.accelerator.backward(loss)
        tokens = batch["prompt_mask"].sum() + batch["completion_mask"].sum()
        self._sums += torch.stack([loss.detach(), (clipped * mask).sum(), mask.sum(), tokens]).double().cpu()
        if is_last:
            self._metrics["train"]["critic/grad_norm"].append(self.critic.step())
            self._metrics["train"]["critic/lr"].append(self.critic.optimizer.param_groups[0]["lr"])

    def _log_step(self) -> None:
        """Log what was added up over the micro-batches of an optimizer step."""
        processes = self.accelerator.num_processes
        sums = self._sums.to(self.accelerator.device, torch.float32)
        loss, clipped, counted, tokens = self.accelerator.reduce(sums, reduction="sum").tolist()
        seconds = sum(self._seconds.values())
        figures = {
            "critic/vf_loss": loss / processes,
            "critic/vf_clipfrac": clipped / max(counted, 1.0),
            **{f"timing_s/{name}": spent for name, spent in self._seconds.items()},
            "timing_s/step": seconds,
            "perf/total_num_tokens": tokens,
            "perf/time_per_step": seconds,
            "perf/throughput": tokens / seconds / processes,
        }
        for name, value in figures.items():
            self._metrics["train"][name].append(value)
        self._seconds.clear()
        self._sums = torch.zeros_like(self._sums)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - started


def _refuse(trainer: Any, critic: nn.Module | None) -> None:
    """Raise `ValueError` for what cannot be trained with a critic."""
    args = trainer.args
    if not isinstance(args, PPOConfig):
        raise ValueError(f"PPOTrainer is configured by args=PPOConfig(...), got a {type(args).__name__}.")
    if trainer.is_deepspeed_enabled:
        raise ValueError(
            "DeepSpeed has one engine for one model, and PPO trains two. Take FSDP2 (fsdp in the accelerate "
            "configuration), or a GRPOTrainer."
        )
    if has_images(trainer):
        raise ValueError("The critic reads text, and the training data have images. Take a GRPOTrainer.")
    if critic is not None and args.critic_model is not None:
        raise ValueError("critic_model of the PPOConfig names a critic, and critic= is another. Leave one out.")
    if critic is not None:
        critics.refuse_unfit(critic)
    else:
        critics.refuse_another_text(trainer.model, trainer.processing_class, args.critic_model)
