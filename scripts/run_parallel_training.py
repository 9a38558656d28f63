"""Train a setup file on several seeds side by side: `async-grpo sweep` under the name that users of GRAIL know.

    python scripts/run_parallel_training.py --dataset gsm8k --num-instances 4 --eval-every 40

All options are those of `async-grpo sweep`; without `--seeds` it takes `SEEDS`, the first `--num-instances` of them.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from async_grpo.cli import main
from async_grpo.cli.compute.sweep import build_parser
from async_grpo.sweeps.plan import DEFAULT_SEEDS

SEEDS = list(DEFAULT_SEEDS)


def command(given: list[str]) -> list[str]:
    """The arguments of `async-grpo`."""
    args = build_parser().parse_args(given)
    seeds = [] if args.seeds or args.resume else ["--seeds", ",".join(map(str, SEEDS[: args.num_instances]))]
    return ["sweep", *given, *seeds]


if __name__ == "__main__":
    sys.exit(main(command(sys.argv[1:])))
