"""Train one run with plain TRL: `async-grpo train --device 0` under the name that users of GRAIL know.

    python scripts/train_trl_grpo.py --dataset gsm8k --seed 42 --run-suffix mine
    python scripts/train_trl_grpo.py --seed 42 --vllm-port 8000 --group-port 51216 --run-suffix mine

Checkpoints and metrics go to outputs/trl_DATASET_SUFFIX/, every version of the weights to
checkpoints/deltas_DATASET_SUFFIX/. A run that was stopped is continued; after one that has finished, the next goes
below run2/, run3/, ... With `--vllm-port`, TRL generates with the `vllm serve` of that port, which has to run already;
without it, as the setup file says. All other options are those of `train`.
"""

import argparse
import os
import sys
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from async_grpo.cli import main
from async_grpo.roles.plain_trl import read_progress
from async_grpo.rundir.paths import FINISHED
from async_grpo_experiments.cli.sweep import DATASET_SETUP, DATASETS

ROOT = Path(__file__).resolve().parents[1]
GROUP_PORT = 51216  # TRL's own default


def command() -> list[str]:
    """The arguments of `async-grpo`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--config", type=Path, default=ROOT / DATASET_SETUP, help=f"setup file (default: {DATASET_SETUP})"
    )
    parser.add_argument("--dataset", choices=DATASETS, default="gsm8k")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--device", default="0", help="GPU index or 'cpu' (default: 0)")
    parser.add_argument("--vllm-port", type=int, metavar="P", help="generate with the vLLM server of this port")
    parser.add_argument("--group-port", type=int, metavar="P", help=f"default: {GROUP_PORT}")
    parser.add_argument("--run-suffix", default="", metavar="S", help="ends the names of what is written")
    parser.add_argument("--base", type=Path, metavar="DIR", help="what is written goes below this folder")
    args, of_train = parser.parse_known_args()
    if args.group_port is not None and args.vllm_port is None:
        parser.error("--group-port is of a vLLM server: give --vllm-port, too")
    os.environ["DATASET"] = args.dataset
    data = "_".join(filter(None, (args.dataset, args.run_suffix)))
    name = f"trl_{data}"
    base = args.base or unfinished_base(name)
    output = base / "outputs" / name
    sets = {"output_dir": str(output)}
    if args.vllm_port is not None:
        server = {"vllm_server_port": args.vllm_port, "vllm_group_port": args.group_port or GROUP_PORT}
        sets |= {"use_vllm": "true", "vllm_mode": "server", **{key: str(value) for key, value in server.items()}}
    given = [text for key, value in sets.items() for text in ("--set", f"{key}={value}")]
    where = ["--device", args.device, "--seed", str(args.seed), "--run-dir", str(output / "run"), "--run-name", name]
    if not any(option.partition("=")[0] == "--delta-every" for option in of_train):
        where += ["--delta-every", "1", "--delta-dir", str(base / "checkpoints" / f"deltas_{data}")]
    return ["train", str(args.config), *where, *given, *of_train]


def unfinished_base(name: str) -> Path:
    """The first of this folder, run2/, run3/ ... whose run has not finished."""
    for number in count(1):
        base = Path() if number == 1 else Path(f"run{number}")
        progress = read_progress(base / "outputs" / name / "run")
        if progress is None or progress.state != FINISHED:
            return base
    raise AssertionError("the numbers do not end")


if __name__ == "__main__":
    sys.exit(main(command()))
