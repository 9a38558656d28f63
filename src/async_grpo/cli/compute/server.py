"""`async-grpo server`: the parameter server alone, with workers started by hand."""

from __future__ import annotations

import argparse
import os

from async_grpo.cli import options
from async_grpo.cli.compute.modes import refuse_without_effect
from async_grpo.cli.compute.trl import use_arguments
from async_grpo.cli.parser import Parser
from async_grpo.rundir import summary
from async_grpo.rundir.paths import RunDir
from async_grpo.rundir.run_plan import RunPlan
from async_grpo.settings import TrainingSettings, log_level
from async_grpo.setup.devices import check_weights, choose_device

EXAMPLES = """\
  async-grpo server --config my_trainer.py -d 0        then, in other terminals:
  async-grpo worker -d 1
  async-grpo server --resume                           continue the run in worker/ with its own options
  accelerate launch --config_file fsdp2.yaml -m async_grpo.cli server --config my_trainer.py
                                                       a trainer of several GPUs"""


def build_parser() -> Parser:
    parser = options.parser("server", "Train on what the workers deliver, and publish every new policy.", EXAMPLES)
    options.add_config(parser)
    device = "GPU index or 'cpu' (default: GPU 0 where there is one)"
    parser.add_argument("--device", "-d", dest="master_device_id", metavar="DEVICE", help=device)
    options.add_training_options(parser)
    options.add_distributed_options(parser)
    options.add_run_options(parser)
    options.add_launched_option(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    from async_grpo.setup.process import rank_of_launch

    rank, ranks = rank_of_launch(os.environ)
    by_hand = args.launched_by is None
    if by_hand:
        use_arguments(args, begun := options.run_to_resume(args))
        if begun is not None:
            if (found := options.resumed(args, begun)) is None:
                return 0
            args = found
        plan = _plan(args, ranks)
        if rank == 0:
            _prepare(args, plan)
    else:
        plan = RunDir(args.run_dir).state_of(None).plan
        args.log_level = plan.launch.log_level
    options.become_role(args, plan.master_device, fast_inference="0", one_device=ranks == 1)

    from async_grpo.roles.parameter_server import ServerOptions, run_parameter_server

    level = log_level(args.log_level) if by_hand else None
    server_options = ServerOptions(run_dir=args.run_dir, plan=plan, log_level=level, rank=rank)
    if plan.models:
        from async_grpo.roles.answering import serve_answers

        serve_answers(server_options)
        return 0
    run_parameter_server(server_options)
    if by_hand and rank == 0:
        summary.show(RunDir(args.run_dir))
    return 0


def _plan(args: argparse.Namespace, ranks: int) -> RunPlan:
    """The plan of a server that was started by hand."""
    refuse_without_effect(args)
    options.gathered(TrainingSettings, args).check()
    device = choose_device(args.master_device_id)
    check_weights(args.weights, device)
    return options.planned(args, master_device=device, weights=args.weights, ranks=ranks)


def _prepare(args: argparse.Namespace, plan: RunPlan) -> None:
    from async_grpo.rundir.lifecycle import prepare
    from async_grpo.setup.setup_file import check_setup_file

    check_setup_file(args.config)
    prepare(args.run_dir, plan, say=print)
