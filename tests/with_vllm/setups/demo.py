"""The demo recipe, with heads as wide as vLLM's CPU build wants."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "src" / "app"))
import trainer_setup_tiny

trainer_setup_tiny.MODEL["head_dim"] = 32
get_trainer = trainer_setup_tiny.get_trainer
