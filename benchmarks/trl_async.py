"""TRL's asynchronous trainer with its own rollout worker, the same with workers of this queue, and our own trainer.

Same model (1 M parameters), prompts, batch and longest completion, on a CPU. Run it with the Python of an environment
that has vLLM (`make test-vllm` makes .venv-vllm); without vLLM, TRL's own worker and the vLLM engines are left out.

    .venv-vllm/bin/python benchmarks/trl_async.py [--quick] [--json benchmarks/results/trl_async.json]

As it is, TRL's asynchronous trainer runs nowhere without a GPU: it loads its model for FlashAttention 3, asks CUDA for
the name of the device, and sends its weights over NCCL. Here all of its sides get torch's attention
(`async_grpo.trl_async.on_cpu`), and its own worker's vLLM server gets the weights through shared memory
(`SharedWeightTransfer`). The worker, the server and the trainer are TRL's and vLLM's.

A side's figure is samples trained on a second, from the end of the third step to the end of the last: imports and the
first rollouts are left out. Rewards are random, so completions keep their lengths.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.table import ROOT, Row, as_text, describe_machine, machine_line, row, write_json

sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "with_vllm" / "setups")]

BATCH, GROUP, TOKENS = 32, 4, 48
WARM_UP_STEPS = 3
RECORD = "BENCH_RECORD"  # the file that the ends of steps go into
TRLS_WORKER = "TRL's trainer, its own worker, one vLLM server"
SIDES = {  # name -> what generates: None needs no vLLM
    TRLS_WORKER: "server",
    "TRL's trainer, 2 workers of this queue, vLLM": "vllm",
    "TRL's trainer, 2 workers of this queue, transformers": "hf",
    "our trainer, 2 workers, vLLM": "vllm",
    "our trainer, 2 workers, transformers": "hf",
}


def rewards(completions: list[Any], **_: Any) -> list[float]:
    return [random.random() for _ in completions]


def dataset() -> Any:
    from datasets import Dataset

    pairs = [(a, b) for a in range(10) for b in range(10)]
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": f"{a}+{b}="}] for a, b in pairs]})


def model_folder() -> str:
    return os.environ["BENCH_MODEL"]


def write_model(folder: Path) -> None:
    import qwen3_1m
    from trl.chat_template_utils import qwen3_chat_template

    tokenizer = qwen3_1m.build_tokenizer()
    tokenizer.chat_template = qwen3_chat_template
    qwen3_1m.build_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def settings(steps: int) -> dict[str, Any]:
    return {
        "max_steps": steps,
        "per_device_train_batch_size": BATCH,
        "num_generations": GROUP,
        "max_completion_length": TOKENS,
        "learning_rate": 1e-5,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "bf16": False,
        "use_cpu": True,
    }


def step_ends() -> Any:
    """A callback that writes down when each optimizer step ended."""
    from transformers import TrainerCallback

    class StepEnds(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            with Path(os.environ[RECORD]).open("a") as record:
                record.write(f"{time.monotonic()}\n")

    return StepEnds()


def get_trainer() -> Any:
    """What workers load, and our own trainer trains."""
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig("worker_output", **settings(int(os.environ["BENCH_STEPS"])))
    return GRPOTrainer(model_folder(), rewards, args, dataset(), callbacks=[step_ends()])


def train(side: str, folder: Path) -> None:
    """One side, in a process of its own."""
    steps, engine = int(os.environ["BENCH_STEPS"]), SIDES[side]
    if side.startswith("our"):
        from async_grpo import AsyncGRPO

        options: Any = {"generator": engine, "eval_every": 0, "quiet": True}
        AsyncGRPO(get_trainer, workers=2, run_dir=folder / "run", **options).train()
        return
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    from async_grpo.settings import WorkerSettings
    from async_grpo.trl_async import FileQueueRolloutWorker
    from async_grpo.trl_async.on_cpu import let_trl_train_without_a_gpu

    let_trl_train_without_a_gpu()
    args = AsyncGRPOConfig(str(folder / "output"), token_budget=0, **settings(steps))
    given: dict[str, Any] = {}
    with vllm_server(folder) if engine == "server" else nullcontext() as url:
        if url is None:
            work = WorkerSettings(generator=engine)
            given["rollout_worker"] = FileQueueRolloutWorker(
                get_trainer, args, dataset(), workers=2, run_dir=folder / "run", work=work
            )
            given["weight_transfer"] = given["rollout_worker"].weights
        else:
            from async_grpo_ipc import SharedWeightTransfer

            args.vllm_server_base_url = url
            given |= {"weight_transfer": SharedWeightTransfer(url, folder / "handle.json"), "reward_funcs": rewards}
        AsyncGRPOTrainer(model_folder(), args=args, train_dataset=dataset(), callbacks=[step_ends()], **given).train()


@contextmanager
def vllm_server(folder: Path) -> Iterator[str]:
    """The address of a vLLM server that runs in this block."""
    from async_grpo.serving.vllm_server import ServerPlan, VLLMServerProcess

    # TRL seeds each request. vLLM's CPU build ends ("CPU Generator does not use offset") where a step computes only a
    # part of a seeded prompt, so no prompt may be cut.
    whole = ("--no-enable-chunked-prefill", "--max-model-len", "256", "--max-num-batched-tokens", "16384")
    arguments = ("--dtype", "float32", "--enforce-eager", *whole)
    plan = ServerPlan(model=model_folder(), port=8300, log=folder / "vllm.log", arguments=arguments)
    with VLLMServerProcess(plan) as server:
        server.wait_ready()
        yield server.base_url


def samples_per_second(side: str, steps: int, folder: Path, model: Path) -> float:
    folder.mkdir()
    env = {**os.environ, "BENCH_STEPS": str(steps), "BENCH_MODEL": str(model), RECORD: str(folder / "ends.txt")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "TRL_EXPERIMENTAL_SILENCE": "1"}
    log = folder / "log.txt"
    with log.open("wb") as output:
        done = subprocess.run(
            [sys.executable, __file__, "--side", side, "--folder", str(folder)],
            cwd=folder,
            env=env,
            stdout=output,
            stderr=output,
            timeout=900,
            check=False,
        )
    if done.returncode:
        sys.exit(f"{side}:\n{log.read_text()[-4000:]}")
    ends = [float(line) for line in (folder / "ends.txt").read_text().split()]
    return BATCH * (len(ends) - WARM_UP_STEPS) / (ends[-1] - ends[WARM_UP_STEPS - 1])


def measure(steps: int, repeats: int) -> list[Row]:
    can = [side for side, engine in SIDES.items() if engine == "hf" or find_spec("vllm")]
    figures: dict[str, list[float]] = {side: [] for side in can}
    with tempfile.TemporaryDirectory() as temporary:
        write_model(Path(temporary) / "model")
        for repeat in range(repeats):
            for number, side in enumerate(can):
                folder = Path(temporary) / f"{repeat}-{number}"
                figures[side].append(samples_per_second(side, steps, folder, Path(temporary) / "model"))
                print(f"{side}: {figures[side][-1]:.1f} samples/s", file=sys.stderr)
    rows = [row(side, values, "samples/s") for side, values in figures.items()]
    trls = figures.pop(TRLS_WORKER, [])
    return rows + [compared(side, values, trls) for side, values in figures.items() if trls]


def compared(side: str, values: list[float], trls: list[float]) -> Row:
    return row(f"{side}: over TRL's own worker", [one / other for one, other in zip(values, trls, strict=True)], "x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one repeat of 8 steps")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        train(args.side, args.folder)
        return
    load = os.getloadavg()
    rows = measure(8, 1) if args.quick else measure(40, 3)
    print(machine_line(describe_machine()))
    print(as_text(rows))
    if args.json:
        write_json(args.json, rows, load_before=load)


if __name__ == "__main__":
    main()
