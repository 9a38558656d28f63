"""Credit for each turn of a dialogue: turn rewards, and the advantages that are made of them.

`TurnGRPOTrainer` takes the place of TRL's `GRPOTrainer` in a setup file, also in plain TRL. `formulas` has the
advantages of a group, with their sources. How turn rewards travel is the queue's matter (`RolloutGroup.turn_rewards`).
"""

from async_grpo.credit.formulas import CREDITS, Credit
from async_grpo.credit.trainer import TurnGRPOTrainer

__all__ = ["CREDITS", "Credit", "TurnGRPOTrainer"]
