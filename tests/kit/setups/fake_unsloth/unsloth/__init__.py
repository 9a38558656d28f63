"""A stand-in for Unsloth, for tests: notes how it was imported, and does to TRL's trainer what Unsloth 2026.10.7 does.

Taken from its source (`models/rl_replacements.py`): `compute_loss` is replaced, so that TRL's `_compute_loss` is never
called, and it asks `_get_per_token_logps_and_entropies` with `compute_efficient=True`, whose answer is `(None, None)`.
"""

import json
import os
import sys
from pathlib import Path

NOTED = ("FAST_INFERENCE", "UNSLOTH_COMPILE_LOCATION")

with Path(os.environ["FAKE_UNSLOTH_NOTES"]).open("a") as notes:
    seen = {name: os.environ.get(name) for name in NOTED}
    imported_before = [name for name in ("trl", "transformers", "peft") if name in sys.modules]
    notes.write(json.dumps({**seen, "imported_before": imported_before}) + "\n")


def patched(trainer_class):
    """What Unsloth makes of `trl.GRPOTrainer`."""

    class UnslothGRPOTrainer(trainer_class):
        def _get_per_token_logps_and_entropies(self, *args, compute_efficient=False, **kwargs):
            if compute_efficient:
                return None, None
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            efficient = self._get_per_token_logps_and_entropies(model, None, None, 1, compute_efficient=True)
            assert efficient == (None, None)
            return trainer_class._compute_loss(self, model, inputs)

    return UnslothGRPOTrainer
