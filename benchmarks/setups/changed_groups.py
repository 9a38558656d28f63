"""The tiny recipe, with workers that change some of the groups that they hand in: see `benchmarks/fuzz_groups.py`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src" / "app"), str(ROOT / "tests")]  # before the imports that are found there

import trainer_setup_tiny  # noqa: E402

from async_grpo.queue import worker as queue  # noqa: E402
from async_grpo.queue.codec import encode_group  # noqa: E402
from async_grpo.records import RolloutGroup  # noqa: E402
from kit.changed_groups import changed  # noqa: E402

SHARE = float(os.environ.get("CHANGED_SHARE", "0.3"))


def get_trainer() -> Any:
    random = Random(os.getpid())

    def encode(group: RolloutGroup) -> bytes:
        return encode_group(changed(group, random) if random.random() < SHARE else group)

    vars(queue)["encode_group"] = encode  # of this process: the server hands in nothing
    return trainer_setup_tiny.get_trainer()
