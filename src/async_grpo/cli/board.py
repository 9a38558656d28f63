"""`async-grpo board DIR`: a run's curves in TensorBoard."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from async_grpo.cli import common
from async_grpo.errors import UsageError

EXAMPLES = """\
  async-grpo board worker               the run in worker/
  async-grpo board worker --port 6007   on another port"""


def build_parser() -> argparse.ArgumentParser:
    parser = common.parser("board", "Open a run's curves in TensorBoard, on this machine only.", EXAMPLES)
    parser.add_argument("directory", type=Path, nargs="?", default=common.DEFAULT_RUN_DIR, help="default: worker/")
    parser.add_argument("--port", type=common.positive, default=6006)
    return parser


def run(args: argparse.Namespace) -> int:
    if not args.directory.is_dir():
        raise UsageError(f"{args.directory} is no directory. Give a run directory, such as worker/.")
    if not any(args.directory.rglob("events.out.tfevents.*")):
        raise UsageError(f"{args.directory} holds no TensorBoard events (yet): no training step has been logged.")
    command = [
        sys.executable,
        "-m",
        "tensorboard.main",
        "--logdir",
        str(args.directory),
        "--port",
        str(args.port),
    ]
    os.execv(sys.executable, command)
