"""`async-grpo train`: one process with plain TRL, or a parameter server and workers on every GPU."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from async_grpo.cli import options
from async_grpo.cli.compute.modes import refuse_in_one_process, refuse_without_effect
from async_grpo.cli.compute.trl import TrainParser, use_arguments
from async_grpo.cli.parser import Parser
from async_grpo.errors import UsageError
from async_grpo.launch.placement import choose_weights, plan_devices
from async_grpo.rundir.lifecycle import preview
from async_grpo.settings import LaunchSettings, TrainingSettings, log_level
from async_grpo.setup.accelerate_config import DEEPSPEED, AccelerateConfig
from async_grpo.setup.devices import CPU, check_torch_sees, check_weights, choose_device, hold_to_device
from async_grpo.setup.generator_choice import ENGINES, HF, choose_generator, refuse_own_server

if TYPE_CHECKING:
    from async_grpo.deltas.callback import DeltaCallback

IMPLY_DISTRIBUTED = {"distributed", "num_workers", "master_device_id", "worker_device_ids", "accelerate_config", "ray"}
EXAMPLES = """\
  async-grpo train my_trainer.py --device 0 --steps 50       one process, plain TRL
  async-grpo train my_trainer.py --device 0 --run-dir trl    the same, with its metrics in trl/, and continued by
                                                             the same command after Ctrl-C
  async-grpo train my_trainer.py --distributed               server on GPU 0, a worker on every other GPU
  async-grpo train my_trainer.py -n 2                        two workers (they share the GPU when there is one)
  async-grpo train my_trainer.py --worker-device-ids 1,2,3   workers on exactly these GPUs
  async-grpo train my_trainer.py --distributed --dry-run     what would run where, batches, memory; starts nothing
  async-grpo train my_trainer.py --accelerate-config fsdp2.yaml --worker-device-ids 2,3
                                                             the trainer itself on several GPUs
  async-grpo train my_trainer.py --ray auto --nodes 4        workers also on three other machines of a Ray cluster
  async-grpo train --resume                                  continue the run in worker/ with its own options
  async-grpo train grpo.yaml -n 2                            what `trl grpo --config grpo.yaml` trains
  async-grpo train --model_name_or_path M --dataset_name D --reward_funcs accuracy_reward -n 2"""


def build_parser() -> Parser:
    parser = options.parser("train", "Train the GRPOTrainer that a setup file returns.", EXAMPLES, TrainParser)
    parser.add_argument(
        "config",
        nargs="?",
        type=Path,
        default=options.DEFAULT_CONFIG,
        help=f"Python file with get_trainer(), or a YAML file of `trl grpo` (default: {options.DEFAULT_CONFIG}); "
        "instead of a file, or with the YAML file, the arguments of `trl grpo`",
    )
    parser.add_argument("--config", type=Path, default=argparse.SUPPRESS, help=argparse.SUPPRESS)  # as TRL names it
    parser.add_argument("--device", "-d", help="one process on this GPU index, or 'cpu'")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the plan of the run; start nothing, change no run"
    )
    options.add_gpu_memory(parser)
    options.add_training_options(parser)
    _add_processes(parser)
    options.add_distributed_options(parser)
    options.add_run_options(parser)
    return parser


def _add_processes(parser: Parser) -> None:
    """Which processes there are, on which devices, and how they end."""
    group = parser.add_argument_group("distributed", "a parameter server that trains, and workers that generate")
    group.add_argument("--distributed", action="store_true", help="implied by the next four options, and by --resume")
    elsewhere = ("overwrite", "log_level")
    options.add_settings(group, LaunchSettings, *(f.name for f in fields(LaunchSettings) if f.name not in elsewhere))
    options.add_worker_options(group)


def run(args: argparse.Namespace) -> int:
    from async_grpo.setup.setup_file import check_setup_file

    if args.resume and args.machine_rank and args.accelerate_config is None:  # what machine 0 recalls is not here
        raise UsageError("--machine-rank with --resume: name the setup file and --accelerate-config as well.")
    is_elsewhere = AccelerateConfig.read(args.accelerate_config).number_of(args.machine_rank) > 0  # the run directory
    use_arguments(args, begun := None if is_elsewhere else options.run_to_resume(args))
    if begun is not None:
        if (found := options.resumed(args, begun)) is None:
            return 0
        args = found
    if args.config == options.DEFAULT_CONFIG and not args.config.is_file():
        if args.resume:
            preview(args.run_dir, resume=True)  # where there is no run, that is what is wrong
        raise UsageError(
            f"No setup file was named, and the default, {args.config}, is not in this folder (it is the GSM8K recipe "
            "of a checkout). Name yours: async-grpo train my_trainer.py; `async-grpo init my_trainer.py` writes one."
        )
    if args.gpu_memory is not None and not args.dry_run:
        raise UsageError("--gpu-memory is for a plan of what would fit: add --dry-run.")
    check_setup_file(args.config)
    if args.resume or args.given & IMPLY_DISTRIBUTED:
        refuse_without_effect(args)
        return _distributed(args)
    refuse_in_one_process(args)
    return _single(args)


def _single(args: argparse.Namespace) -> int:
    from async_grpo.setup.process import keep_freed_memory, own_compile_cache, set_up_log

    options.gathered(TrainingSettings, args).check()
    device = choose_device(args.device)
    run_dir = args.run_dir.absolute() if "run_dir" in args.given else None
    eval_every = args.eval_every if "eval_every" in args.given else None
    serves = _has_its_own_server(args, run_dir, device)
    if args.dry_run:
        from async_grpo.checks.plan.dry_run import plan_single
        from async_grpo.checks.plan.trainer_facts import Question

        plan = options.planned(args, master_device=device)
        question = Question(plan=plan, distributed=False, eval_every=eval_every, serves=serves)
        plan_single(question, run_dir, args.gpu_memory)
        return 0
    where = "the CPU" if device == CPU else f"GPU {device}"
    how = "add -n 2" if args.device is None else "take -n 2 in place of --device"
    print(f"one process of plain TRL on {where}, without workers: {how} for a server and two of them", flush=True)
    set_up_log(log_level(args.log_level))
    hold_to_device(device, os.environ)
    if device == CPU:
        keep_freed_memory(os.environ)
    os.environ.setdefault("FAST_INFERENCE", "1")
    own_compile_cache("single", os.environ)
    check_torch_sees(device)
    _train_alone(args, run_dir, eval_every, serves=serves)
    return 0


def _train_alone(args: argparse.Namespace, run_dir: Path | None, eval_every: int | None, *, serves: bool) -> None:
    from async_grpo.roles import plain_trl
    from async_grpo.setup.needs import check_needs
    from async_grpo.setup.process import gc_paused
    from async_grpo.setup.sampling import refuse_guided
    from async_grpo.setup.setup_file import load_trainer
    from async_grpo.telemetry.trackers import name_for_wandb, name_run

    settings = options.gathered(TrainingSettings, args)
    name_for_wandb(settings, os.environ)
    with ExitStack() as entered:
        if run_dir is not None:
            entered.enter_context(plain_trl.held(run_dir))
        if serves and run_dir is not None:
            from async_grpo.roles.served_trl import own_server
            from async_grpo.serving.vllm_server import READY_S

            entered.enter_context(own_server(run_dir, args.server_devices, args.server_timeout or READY_S))
        try:
            with gc_paused():
                trainer = load_trainer(args.config.absolute(), steps=args.steps, seed=args.seed, config_values=args.set)
        except KeyboardInterrupt:
            print("stopped, nothing was trained", file=sys.stderr)
            raise
        if serves:
            refuse_own_server(use_vllm=trainer.args.use_vllm)
        check_needs(trainer)
        refuse_guided(trainer)
        if settings.delta_every:
            trainer.add_callback(_keeper(settings, run_dir, Path(trainer.args.output_dir)))
        name_run(trainer, settings)
        if eval_every is not None:
            plain_trl.evaluate_every(trainer, eval_every)
        if run_dir is None:
            trainer.train()
        else:
            plain_trl.train(trainer, run_dir)


def _keeper(settings: TrainingSettings, run_dir: Path | None, output: Path) -> DeltaCallback:
    """Keeps the versions of plain TRL. A run that is continued goes on in its chain."""
    from async_grpo.deltas.callback import DeltaCallback

    name = settings.run_name or (run_dir or output).absolute().name
    folder = settings.delta_dir or f"checkpoints/deltas_{name}"
    return DeltaCallback(folder, every=settings.delta_every, keep=settings.delta_keep, run_id=name)


def _has_its_own_server(args: argparse.Namespace, run_dir: Path | None, device: str) -> bool:
    """Whether the run starts a vLLM server for TRL (`--generator vllm-server`). `UsageError`: it cannot."""
    if not ENGINES.get(args.generator, HF).started:
        return False
    if run_dir is None:
        raise UsageError("--generator vllm-server with plain TRL: say where the server's output goes, --run-dir DIR.")
    if device != CPU and args.server_devices is None:
        raise UsageError(
            "--generator vllm-server with plain TRL: TRL sends weights with NCCL, which wants the server on another "
            "GPU than the trainer. Name it: --server-devices 1."
        )
    choose_generator(args.generator, None, on_gpu=device != CPU)  # is it installed?
    return True


def _distributed(args: argparse.Namespace) -> int:
    from async_grpo.launch.accelerate_entry import join, machine_of
    from async_grpo.launch.launcher import launch

    if args.device is not None:
        raise UsageError("--device is for one process. Distributed: --master-device-id and --worker-device-ids.")
    ranks = _ranks(args)
    choose_generator(args.generator, None, on_gpu=False)  # is it installed? What the setup file asks for is seen later
    master, workers = plan_devices(args.master_device_id, args.worker_device_ids, args.num_workers)
    check_weights(args.weights, master)
    options.gathered(TrainingSettings, args).check()
    exporting = ranks.gpus[0] if ranks.gpus and master != CPU else master
    plan = options.planned(
        args,
        master_device=master,
        worker_devices=workers,
        weights=choose_weights(args.weights, exporting, workers, args.server_devices),
        ranks=ranks.processes,
    )
    if plan.launch.ray is not None:
        from async_grpo.nodes.request import check_request

        check_request(plan)
    here = machine_of(plan)
    log_level(args.log_level)
    if args.dry_run:
        from async_grpo.checks.plan.dry_run import plan_distributed

        plan_distributed(args.run_dir.absolute(), plan, args.gpu_memory)
        return 0
    if here is not None and here.number > 0:
        return join(args.run_dir.absolute(), plan, here)
    return launch(args.run_dir.absolute(), plan)


def _ranks(args: argparse.Namespace) -> AccelerateConfig:
    """The processes of the trainer. `UsageError`: they cannot be had here, or leave the workers' GPUs open."""
    ranks = AccelerateConfig.read(args.accelerate_config)
    if ranks.kind == DEEPSPEED and find_spec("deepspeed") is None:
        raise UsageError(
            f"{args.accelerate_config} asks for DeepSpeed, which is not installed here: pip install "
            "'async-grpo[deepspeed]' (it is built from its sources). Without it, FSDP2 shards weights, gradients and "
            "optimizer state as ZeRO-3 does: --accelerate-config examples/accelerate/fsdp2.yaml."
        )
    open_gpus = args.worker_device_ids is None and args.num_workers != 0
    if args.accelerate_config is not None and open_gpus and choose_device(args.master_device_id) != CPU:
        raise UsageError(
            "The trainer takes the GPUs that the accelerate configuration names (gpu_ids), so say which are left for "
            "the workers: --worker-device-ids 2,3."
        )
    return ranks
