"""`async-grpo doctor`: is this machine fit for a run, and what is a run doing that hangs."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from async_grpo.cli import options
from async_grpo.errors import UsageError
from async_grpo.settings import LaunchSettings, TrainingSettings
from async_grpo.setup.generated.trl_command import setup_file

EXAMPLES = """\
  async-grpo doctor                             this machine, and worker/ as the run directory
  async-grpo doctor --config my_trainer.py      also the trainer that the file returns: batches, lengths, memory
  async-grpo doctor --ray auto                  also the other machines of a Ray cluster: versions, token, a call
  async-grpo doctor --accelerate-config two.yaml --main-process gpu0:29500 --machine-rank 0
                                                on each machine of a trainer (0, 1, ...): who is there, and the link
  async-grpo doctor --json                      for scripts; exit code 1 where there is an error
  async-grpo doctor --dump worker               one archive about a run that hangs or failed, for a bug report"""


def build_parser() -> argparse.ArgumentParser:
    parser = options.parser(
        "doctor",
        "Look for what would stop or slow a run, and say how to fix it. "
        "Exit code 0: no errors; 1: errors; 2: input that cannot be used.",
        EXAMPLES,
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="also build this setup file's trainer, in a process of its own"
    )
    options.add_settings(parser, TrainingSettings, "set")
    options.add_gpu_memory(parser)
    options.add_settings(
        parser, LaunchSettings, "ray", "accelerate_config", "machine_rank", "main_process", "node_wait"
    )
    parser.add_argument(
        "--run-dir",
        type=Path,
        default=options.DEFAULT_RUN_DIR,
        help="check the disk that this is on (default: worker/)",
    )
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    parser.add_argument(
        "--dump",
        type=Path,
        metavar="RUN_DIR",
        help="instead: collect a run's stacks, logs, versions and queue state into one .tar.gz here; live run or not",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    return _dump(args.dump) if args.dump is not None else _check(args)


def _check(args: argparse.Namespace) -> int:
    from async_grpo.checks.doctor.checkup import findings
    from async_grpo.checks.doctor.finding import Asked, Level, line, verdict
    from async_grpo.launch.accelerate_entry import machine_of
    from async_grpo.rundir.run_plan import RunPlan

    if args.set and args.config is None:
        raise UsageError("--set is for the GRPOConfig of a setup file: add --config FILE.")
    if args.gpu_memory is not None and args.config is None:
        raise UsageError("--gpu-memory is for the model of a setup file: add --config FILE.")
    config = None if args.config is None else setup_file(args.config).absolute()
    machine = machine_of(RunPlan(config=Path(), launch=options.gathered(LaunchSettings, args)))
    if config is not None:
        print(
            f"The checks of {args.config} come last: its get_trainer() may take a while to load the model.",
            file=sys.stderr,
        )
    found = []
    asked = Asked(args.run_dir, config, args.set, args.gpu_memory, args.ray, machine, args.node_wait)
    for finding in findings(asked):
        found.append(finding)
        if not args.json:
            print(line(finding, colour=sys.stdout.isatty()), flush=True)
    code = int(any(finding.level is Level.ERROR for finding in found))
    if args.json:
        print(json.dumps({"ok": code == 0, "findings": [asdict(finding) for finding in found]}, indent=1))
    else:
        print(f"\n{verdict(found)}")
    return code


def _dump(root: Path) -> int:
    from async_grpo.checks.bug_report.dump import write_dump

    print(f"Looking at {root} and at this machine ...", file=sys.stderr)
    archive, names = write_dump(root, Path.cwd())
    print(f"{archive}\n")
    for name in names:
        print(f"  {name}")
    print(
        "\nOf the queue it has names, no prompts and no completions; secrets that could be recognised were removed.\n"
        "The logs hold what your code printed: look through them before you share the archive."
    )
    return 0
