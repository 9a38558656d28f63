"""Which options of `train` mean something in which mode. One that would change nothing is refused at the start."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from async_grpo.cli.options import gathered
from async_grpo.errors import UsageError
from async_grpo.settings import WorkerSettings, flag_name
from async_grpo.setup.generator_choice import ENGINES, HF, check_generator_options

IN_ONE_PROCESS = frozenset(
    (
        *("config", "trl_arguments", "device", "dry_run", "gpu_memory", "run_dir", "log_level"),
        *("steps", "seed", "set", "run_name", "run_group", "run_tags", "eval_every"),
        *("generator", "server_devices", "server_timeout", "delta_every", "delta_keep", "delta_dir"),
    )
)
"""What plain TRL in one process takes, by the names of the options; every other one belongs to a distributed run."""

_OF_EVALUATIONS = ("no_eval_first", "eval_replicates", "eval_k", "eval_temperature", "eval_top_p", "eval_top_k")


def refuse_in_one_process(args: argparse.Namespace) -> None:
    """Raise `UsageError` for what the command line gave and plain TRL in one process would not look at."""
    if unused := [name for name in vars(args) if name in args.given and name not in IN_ONE_PROCESS]:
        how = "add --distributed" if args.device is None else "take --distributed in place of --device"
        raise UsageError(
            f"{_flags(unused)}: for distributed runs only; plain TRL in one process would ignore it. Leave it out, or "
            f"{how}."
        )
    engine = ENGINES.get(args.generator, HF)
    if args.generator is not None and not engine.started:
        instead = "use_vllm=false" if engine == HF else "use_vllm=true --set vllm_mode=colocate"
        raise UsageError(
            f"--generator {args.generator}: in one process TRL itself generates, with what the GRPOConfig says. Take "
            f"--set {instead} in its place, or add --distributed."
        )
    given_to_server = WorkerSettings(server_devices=args.server_devices, server_timeout=args.server_timeout)
    check_generator_options(engine, given_to_server)


def refuse_without_effect(args: argparse.Namespace) -> None:
    """Raise `UsageError` for what the command line gave and a distributed run with its other options would not use."""
    for names, reason in _without_effect(args):
        if unused := [name for name in names if name in args.given and getattr(args, name) is not None]:
            raise UsageError(f"{_flags(unused)}: {reason}")
    if "generator" in args:  # the server's command has no workers
        is_known = args.generator is not None  # else the setup file and the machine decide: the worker looks again
        work = gathered(WorkerSettings, args)
        work = work if is_known else replace(work, in_flight_update="off")
        check_generator_options(ENGINES.get(args.generator, HF), work, deterministic=is_known and args.deterministic)


def _without_effect(args: argparse.Namespace) -> Iterator[tuple[Sequence[str], str]]:
    if not args.eval_every:
        yield _OF_EVALUATIONS, "--eval-every 0 evaluates nothing. Leave this out, or give --eval-every a number."
    if getattr(args, "ray", None) is None:
        of_any_machines = ("node_wait",) if getattr(args, "accelerate_config", None) is None else ()
        yield (
            ("nodes", "trainer_nodes", "workers_per_node", "node_dir", *of_any_machines),
            "without --ray all processes are here. Give --ray auto (or local, to try it), or leave this out.",
        )
        if getattr(args, "num_workers", None) == 0:
            yield ("num_workers",), "0 leaves nobody to generate, without --ray. Give it a number of at least 1."
    if args.deterministic:
        yield (
            ("groups_per_claim", "score_concurrency", "score_alone"),
            "--deterministic generates and scores each group alone, since what shares a batch changes the bits. Leave "
            "this out.",
        )


def _flags(names: Collection[str]) -> str:
    return ", ".join(map(flag_name, names))
