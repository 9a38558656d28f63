#!/usr/bin/env python3
"""Evaluate a model on the questions that were held out, with the hyperparameters of its job.

    python evaluate.py model --num_gpus 2 --eval-replicates 8

Without a folder of questions (`JOB_EVALUATION`, with `JOB_DATA` and `JOB_INDEX`), the 40 generated facts that no job
trains on. Options with a minus are those of `async-grpo evaluate`.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import hyperparameters
from hyperparameters import Refused

HERE = Path(__file__).resolve().parent


def command(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """`async-grpo evaluate`, and its environment."""
    if not arguments or arguments[0].startswith("--"):
        raise Refused("Name a model first: python evaluate.py MODEL [--num_gpus N] [options of async-grpo evaluate].")
    model, *options = arguments
    names = hyperparameters.names()
    own, others = _divided(options, names)
    values = hyperparameters.read([f"--model_name={model}", *own], {}, HERE)
    env = {**hyperparameters.environment(values), "JOB_CHECKPOINTS": "evaluation/trainer"}
    where = ["--master-device-id", "cpu"] if values.num_gpus == 0 else []
    program = [sys.executable, "-m", "async_grpo.cli", "evaluate", model, "--config", str(HERE / "my_trainer.py")]
    return [*program, *where, *others], env


def _divided(options: Sequence[str], names: Sequence[str]) -> tuple[list[str], list[str]]:
    """The hyperparameters, and the options of `async-grpo evaluate`."""
    own: list[str] = []
    others: list[str] = []
    kind = others
    for option in options:
        if option.startswith("--"):
            kind = own if option[2:].partition("=")[0] in names else others
        kind.append(option)
    return own, others


def main(arguments: Sequence[str]) -> int:
    try:
        line, env = command(arguments)
    except Refused as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    return subprocess.run(line, env={**os.environ, **env}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
