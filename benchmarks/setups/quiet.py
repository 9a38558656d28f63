"""The `GRPOConfig` of a benchmark that trains in its own process: nothing is saved, logged or shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trl import GRPOConfig


def quiet_config(
    output_dir: Path, seed: int, steps: int, settings: dict[str, Any], kind: type[GRPOConfig] = GRPOConfig
) -> GRPOConfig:
    return kind(
        output_dir=str(output_dir),
        seed=seed,
        max_steps=steps,
        temperature=1.0,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        **settings,
    )
