"""`async-grpo worker`: one rollout worker, which may join, leave or be killed at any time."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from async_grpo.cli import options
from async_grpo.rundir.paths import RunDir
from async_grpo.settings import WorkerSettings, log_level, positive
from async_grpo.setup.devices import CPU, choose_device
from async_grpo.setup.generated.trl_command import setup_file
from async_grpo.setup.generator_choice import ENGINES, VLLM, choose_generator, installed

EXAMPLES = """\
  async-grpo worker -d 1                    on GPU 1, for the run in worker/, with the server's setup file
  async-grpo worker -d cpu --id 2           as worker 2, on the CPU
  WORKER_DEVICE=3 async-grpo worker         the device from the environment"""


def build_parser() -> argparse.ArgumentParser:
    parser = options.parser(
        "worker",
        "Claim rollout jobs, generate, score, and hand the groups back. Waits for the parameter server.",
        EXAMPLES,
    )
    parser.add_argument("--device", "-d", help="GPU index or 'cpu' (default: $WORKER_DEVICE, else GPU 1, else cpu)")
    parser.add_argument("--config", type=Path, help="setup file (default: the parameter server's)")
    parser.add_argument("--id", type=positive, help="the worker's number in file names (default: the first free one)")
    options.add_worker_options(parser)
    options.add_run_options(parser)
    options.add_launched_option(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    if args.launched_by is None:
        device, settings = _by_hand(args)
    else:
        plan = RunDir(args.run_dir).state_of(None).plan
        device, settings, args.log_level = plan.worker_devices[args.id - 1], plan.work, plan.launch.log_level
    fast = os.environ.get("FAST_INFERENCE") or _fast_inference(settings.generator, device)
    options.become_role(args, device, fast_inference=fast)

    from async_grpo.roles.rollout_worker import WorkerOptions, run_worker

    run_worker(
        WorkerOptions(
            run_dir=args.run_dir,
            device=device,
            worker_id=args.id,
            config=args.config.absolute() if args.config else None,
            settings=settings,
            log_level=log_level(args.log_level) if args.launched_by is None else None,
            launched_by=args.launched_by,
        )
    )
    return 0


def _by_hand(args: argparse.Namespace) -> tuple[str, WorkerSettings]:
    """The device and the settings of a worker that no launcher has started."""
    device = choose_device(args.device or os.environ.get("WORKER_DEVICE"), default_gpu=1)
    if args.config is not None:
        from async_grpo.setup.setup_file import check_setup_file

        args.config = setup_file(args.config)
        check_setup_file(args.config)
    choose_generator(args.generator, None, on_gpu=False)  # is it installed? What the setup file asks for is seen later
    return device, options.gathered(WorkerSettings, args)


def _fast_inference(generator: str | None, device: str) -> str:
    """1 where Unsloth can generate with vLLM, for setup files that load their model so."""
    can = device != CPU and installed("unsloth") and installed("vllm")
    return "1" if can and ENGINES.get(generator or "", VLLM).package == VLLM.package else "0"
