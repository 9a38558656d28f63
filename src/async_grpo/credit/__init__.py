"""Credit for each turn of a dialogue, or for each token: trainers for setup files, and the advantages they make.

`TurnGRPOTrainer` and `PPOTrainer` take the place of TRL's `GRPOTrainer` in a setup file, also in plain TRL. `formulas`
has the advantages of a group, `gae` those of a critic, with their sources. How turn rewards travel is
the queue's matter (`RolloutGroup.turn_rewards`).
"""

from async_grpo.credit.formulas import CREDITS, Credit
from async_grpo.credit.ppo import PPOTrainer
from async_grpo.credit.ppo_config import PPOConfig
from async_grpo.credit.trainer import TurnGRPOTrainer

__all__ = ["CREDITS", "Credit", "PPOConfig", "PPOTrainer", "TurnGRPOTrainer"]
