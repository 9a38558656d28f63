"""`async-grpo replay`: train again from the archived groups of a run, with other settings or the same."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from async_grpo.cli import options
from async_grpo.formatting import counted
from async_grpo.settings import CORRECTION_LEVELS, CORRECTIONS, LaunchSettings, log_level, not_negative_number, positive
from async_grpo.setup.devices import check_torch_sees, choose_device, hold_to_device

LOSS_TYPES = ("grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")
EXAMPLES = """\
  async-grpo replay worker                          the same settings: the same weights, bit for bit
  async-grpo replay worker --correction decoupled   another correction on identical data
  async-grpo replay worker --loss-type cispo --output-dir outputs/cispo"""


def build_parser() -> argparse.ArgumentParser:
    parser = options.parser("replay", "Train again from the archived groups of a run, without workers.", EXAMPLES)
    options.add_run_dir(parser)
    parser.add_argument("--correction", choices=CORRECTIONS, help="default: the run's, with its options")
    parser.add_argument("--correction-level", choices=CORRECTION_LEVELS, help="default: that of the correction")
    for bound in ("--correction-min", "--correction-max"):
        parser.add_argument(bound, type=not_negative_number, metavar="W", help="default: that of the correction")
    parser.add_argument("--loss-type", choices=LOSS_TYPES, help="default: the setup file's")
    parser.add_argument("--steps", "-s", type=positive, help="default: as many as the run did")
    parser.add_argument("--output-dir", type=Path, help="a new folder; default: outputs/replay-N, the next N")
    options.add_device_option(parser)
    options.add_settings(parser, LaunchSettings, "log_level")
    return parser


def run(args: argparse.Namespace) -> int:
    try:
        return _run(args)
    except KeyboardInterrupt:
        print("The replay was stopped before its first step: nothing was written.", file=sys.stderr)
        return 130


def _run(args: argparse.Namespace) -> int:
    from async_grpo.setup.process import set_up_log

    set_up_log(log_level(args.log_level))
    device = choose_device(args.device)
    hold_to_device(device, os.environ)
    os.environ["OMP_NUM_THREADS"] = "1"
    check_torch_sees(device)

    from async_grpo.deltas.chain import kept_of
    from async_grpo.roles.replay import ReplayOptions, ReplayStoppedError, run_replay

    try:
        outcome = run_replay(options.gathered(ReplayOptions, args))
    except ReplayStoppedError as stopped:
        print(stopped, file=sys.stderr)
        return stopped.exit_code
    print(f"{counted(outcome.steps, 'step')} replayed. The last: {', '.join(outcome.last_step)}")
    print(f"weights: {outcome.output_dir}, SHA-256 {outcome.digest}")
    if outcome.compared is not None:
        print("equal to" if outcome.same_as else "different from", outcome.compared)
    if told := kept_of(args.run_dir, outcome.sampled_by):
        print(told)
    return 0
