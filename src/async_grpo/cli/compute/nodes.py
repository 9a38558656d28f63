"""`async-grpo nodes`: claims jobs for the workers of other machines. `train --ray` starts it as its child."""

from __future__ import annotations

import argparse

from async_grpo.cli import options
from async_grpo.rundir.paths import RunDir
from async_grpo.setup.devices import CPU

EXAMPLES = "  async-grpo train my_trainer.py --ray auto --nodes 4      starts it"


def build_parser() -> argparse.ArgumentParser:
    parser = options.parser("nodes", "Claim jobs for the workers of other machines, which Ray reaches.", EXAMPLES)
    options.add_run_options(parser)
    options.add_launched_option(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    plan = RunDir(args.run_dir).state_of(None).plan
    args.log_level = plan.launch.log_level
    options.become_role(args, CPU if plan.weights == "host" else plan.master_device, fast_inference="0")

    from async_grpo.nodes.gate import run_gate

    run_gate(args.run_dir)
    return 0
