"""What the rows of `one_gpu.py` do that need no server: `one_gpu_work.py card|worker|training|trl`.

Each writes a line of JSON at each step into the file that STEP_LOG names, as benchmarks/setups/qwen3_shape.py does.
Its environment says the rest, and PROMPTS and COMPLETIONS the tokens of each prompt, and of each completion.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from benchmarks.roofline import Model, measure_card
from benchmarks.setups.qwen3_shape import GPU, ROWS, build_model, build_tokenizer, get_trainer

from async_grpo.setup.trl_compat import repair_trl

DEVICE = "cuda" if GPU else "cpu"
STEPS = int(os.environ["STEPS"])


def log(**line: object) -> None:
    with Path(os.environ["STEP_LOG"]).open("a") as lines:
        lines.write(json.dumps({"time": time.time(), **line}) + "\n")


def lengths(name: str) -> list[int]:
    return [int(length) for length in os.environ[name].split(",")]


def card() -> None:
    model = build_model(build_tokenizer())
    measured = measure_card(DEVICE, model.dtype)
    name = torch.cuda.get_device_name() if GPU else "a CPU"
    log(card=asdict(measured), model=asdict(Model.of(model.config, value_bytes=model.dtype.itemsize)), name=name)


def worker() -> None:
    """Sample batches with a worker's engine; the prompts of a batch are one to a group."""
    from async_grpo.engines import PreparedGroup
    from async_grpo.records import Job
    from async_grpo.rollout.engine_choice import transformers_engine
    from async_grpo.rollout.trl_trainer import RolloutTrainer

    trainer, prompts, chance = get_trainer(), lengths("PROMPTS"), random.Random(0)
    engine = transformers_engine(RolloutTrainer(trainer), deterministic="WITHOUT_GRAPHS" in os.environ)
    size, made = ROWS // len(prompts), 0
    for step in range(1, STEPS + 1):
        waiting: list[PreparedGroup] = []
        for length in prompts:
            seq, ids = len(waiting), chance.choices(range(1, 257), k=length)
            job = Job(run_id="", seq=seq, row={}, num_generations=size, seed=step, born_version=0, min_version=0)
            waiting.append(PreparedGroup(job=job, version=0, prompt_ids=[ids] * size))
        sampled = engine.sample(waiting)
        while len(sampled) < len(prompts):
            sampled += engine.sample([])
        for group in sampled:
            if group.error is not None:
                raise group.error
        made += sum(len(tokens) for group in sampled for tokens in group.tokens)
        log(step=step, tokens=made)


def training() -> None:
    """Compute the loss and its gradients of the same micro-batch, with PADDING as `--padding` has it."""
    from benchmarks.padding import checkpoint, micro_batch, timed_pass, trainer_of

    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(os.environ["QWEN3_SHAPE"], DEVICE, Path(folder))
        checkpoint(trainer, "with")  # as TRL does by default
        completions, device = lengths("COMPLETIONS"), trainer.accelerator.device
        batch = micro_batch(completions, trainer.model.config.vocab_size, device, prompts=lengths("PROMPTS"))
        for step in range(1, STEPS + 1):
            timed_pass(trainer, batch, os.environ["PADDING"])
            log(step=step, tokens=step * sum(completions))


def trl() -> None:
    repair_trl()
    get_trainer().train()


if __name__ == "__main__":
    if os.environ["CUDA_VISIBLE_DEVICES"] and not GPU:
        sys.exit("torch sees no GPU")
    {"card": card, "worker": worker, "training": training, "trl": trl}[sys.argv[1]]()
