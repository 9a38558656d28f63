"""Train a setup file on several seeds side by side: `async-grpo sweep` under the name that users of GRAIL know.

    python scripts/run_parallel_training.py --dataset gsm8k --num-instances 4 --eval-every 40

All options are those of `async-grpo sweep`; without `--seeds` it takes `SEEDS`, the first `--num-instances` of them,
and without `--delta-every` it keeps every version. The first start writes to outputs/, checkpoints/ and logs/ of the
current folder, a later one below run2/, run3/, ...; with `--resume`, the one that it names is continued.
"""

import sys
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from async_grpo.cli import main
from async_grpo_experiments.cli.sweep import DATASET_SETUP, build_parser
from async_grpo_experiments.sweeps.plan import DEFAULT_OUTPUTS, DEFAULT_SEEDS, Sweep, name_of

ROOT = Path(__file__).resolve().parents[1]
SEEDS = list(DEFAULT_SEEDS)


def command(given: list[str]) -> list[str]:
    """The arguments of `async-grpo`."""
    args = build_parser().parse_args(given)
    if args.resume:
        return ["sweep", *given]
    names = {option.partition("=")[0] for option in given}
    seeds = tuple(args.seeds or SEEDS[: args.num_instances])
    setup = args.config or ROOT / DATASET_SETUP
    added = [] if args.config else [str(setup)]
    added += [] if args.seeds else ["--seeds", ",".join(map(str, seeds))]
    added += [] if "--delta-every" in names else ["--delta-every", "1"]
    if "--output-base" not in names:
        more: dict[str, Any] = {"run_prefix": args.run_prefix or "", "start_instance": args.start_instance}
        added += ["--output-base", str(free_base(name_of(setup, args.dataset), seeds, **more))]
    return ["sweep", *given, *added]


def free_base(name: str, seeds: tuple[int, ...], **more: Any) -> Path:
    """The first of outputs/, run2/outputs/, run3/outputs/ ... where none of the runs is."""
    for number in count(1):
        base = Path(DEFAULT_OUTPUTS) if number == 1 else Path(f"run{number}", DEFAULT_OUTPUTS)
        sweep = Sweep(setup="", seeds=seeds, name=name, output_base=str(base), **more)
        if not any(folder.exists() for folder in (sweep.folder, *(run.output for run in sweep.runs))):
            return base
    raise AssertionError("the numbers do not end")


if __name__ == "__main__":
    sys.exit(main(command(sys.argv[1:])))
