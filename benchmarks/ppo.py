"""What PPO with a critic reaches and costs on the demo's task, in TRL alone.

    python benchmarks/ppo.py [--seeds N] [--json FILE] [--update-docs]

Task, model and warm start are those of the recipe `src/app/trainer_setup_tiny.py`: 128 completions a step. PPO has one
completion of each of 128 prompts, and a fresh critic at a learning rate of 1e-3; GRPO has eight of each of 16. Accuracy
is that of answers sampled at temperature 1, eight to each of 300 problems that no training run saw. The cost of a step
is its CPU time over GRPO's with the same number of completions. For the explained variance half of the prompts have no
right answer, which a critic can know; on the demo's task itself it can know next to nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src" / "app"))

from benchmarks.table import Row, as_markdown, as_text, describe_machine, machine_line, row, update_docs, write_json

AFTER, LONG = 100, 200  # steps
ROUNDS = 5  # of the two whose steps are compared, which take turns
CRITIC_LEARNING_RATE = 1e-3
SAMPLES = 8


@dataclass(frozen=True, slots=True)
class Trained:
    """One training run."""

    accuracy: dict[int, float]  # held out, by step
    step_s: float  # CPU time of a step, median
    explained: float  # of the returns' variance, mean of the last ten steps; NaN without a critic
    first_pass: float  # of the critic over a batch, as a share of the step's seconds, median; NaN without a critic


def no_right_answer(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """The demo's reward, but 0 for every prompt whose first number is even."""
    given = zip(prompts, completions, answer, strict=True)
    return [float(text.strip() == right and int(prompt[:2]) % 2 == 1) for prompt, text, right in given]


def train(seed: int, *, critic: bool, steps: int, measured: Sequence[int] = (), hopeless: bool = False) -> Trained:
    import trainer_setup_tiny as recipe
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from async_grpo.credit import PPOConfig, PPOTrainer
    from async_grpo.setup.trl_compat import repair_trl

    repair_trl()
    tokenizer = recipe.build_tokenizer()
    training, held_out = recipe.split_problems()
    found: dict[int, float] = {}
    seconds: list[float] = []

    class Measure(TrainerCallback):
        started = 0.0

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.started = time.process_time()

        def on_step_end(self, args: Any, state: Any, *rest: Any, **kwargs: Any) -> None:
            seconds.append(time.process_time() - self.started)
            if state.global_step in measured:
                found[state.global_step] = held_out_accuracy(trainer, recipe.as_dataset(held_out))

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        given: dict[str, Any] = {
            "output_dir": folder,
            "seed": seed,
            "max_steps": steps,
            "per_device_train_batch_size": 128,
            "max_completion_length": recipe.ANSWER_DIGITS + 1,
            "temperature": 1.0,
            "learning_rate": 4e-4,
            "lr_scheduler_type": "linear",
            "warmup_steps": 5,
            "save_strategy": "no",
            "logging_steps": 1,
            "report_to": "none",
            "disable_tqdm": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "use_cpu": True,
        }
        kind: type[GRPOTrainer] = PPOTrainer if critic else GRPOTrainer
        args: GRPOConfig = (
            PPOConfig(**given, critic_learning_rate=CRITIC_LEARNING_RATE)
            if critic
            else GRPOConfig(**given, num_generations=8)
        )
        trainer: Any = kind(
            model=recipe.build_model(tokenizer),
            processing_class=tokenizer,
            reward_funcs=[no_right_answer if hopeless else recipe.accuracy],
            train_dataset=recipe.as_dataset(training),
            args=args,
        )
        trainer.add_callback(Measure())
        trainer.train()
    step_s = statistics.median(seconds)
    if not critic:
        return Trained(found, step_s, float("nan"), float("nan"))
    logs = [log for log in trainer.state.log_history if "critic/vf_explained_var" in log]
    explained = statistics.mean(log["critic/vf_explained_var"] for log in logs[-10:])
    first_pass = statistics.median(log["timing_s/values"] / log["timing_s/step"] for log in logs)
    return Trained(found, step_s, explained, first_pass)


def held_out_accuracy(trainer: Any, problems: Any) -> float:
    """Share of right answers that the model samples; the training's random numbers stay as they are."""
    import torch

    tokenizer, model = trainer.processing_class, trainer.model
    inputs = tokenizer(list(problems["prompt"]), return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    was_training = model.training
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model.eval()
        ids = model.generate(
            **inputs,
            do_sample=True,
            top_k=0,
            max_new_tokens=trainer.args.max_completion_length,
            num_return_sequences=SAMPLES,
        )
        model.train(was_training)
    texts = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    answers = [answer for answer in problems["answer"] for _ in range(SAMPLES)]
    return statistics.mean(float(text == answer) for text, answer in zip(texts, answers, strict=True))


def measure(seeds: int) -> list[Row]:
    trained = [train(seed, critic=True, steps=LONG, measured=(25, 50, AFTER, LONG)) for seed in range(1, seeds + 1)]
    hopeless = train(1, critic=True, steps=AFTER, hopeless=True)
    costs = [[train(1, critic=critic, steps=30) for critic in (True, False)] for _ in range(ROUNDS)]
    ratios = [of_ppo.step_s / of_grpo.step_s for of_ppo, of_grpo in costs]
    curves = [[round(one.accuracy[step], 3) for step in (25, 50, AFTER, LONG)] for one in trained]
    return [
        row(
            f"held-out accuracy after {AFTER} steps",
            [one.accuracy[AFTER] for one in trained],
            "share",
            target=">= 0.93",
            note=f"each seed after 25, 50, {AFTER}, {LONG}: {curves}",
        ),
        row(
            f"the worst seed after {LONG} steps", [min(one.accuracy[LONG] for one in trained)], "share", target=">= 0.9"
        ),
        row("CPU time of a step over GRPO's", ratios, "times", target="<= 1.8"),
        row("the critic's first pass over a batch, of a step", [of_ppo.first_pass for of_ppo, _ in costs], "share"),
        row(
            "explained variance where half of the prompts have no right answer",
            [hopeless.explained],
            "share",
            target=">= 0.3",
            note=f"{statistics.mean(one.explained for one in trained):.2f} on the demo's task",
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--update-docs", action="store_true")
    options = parser.parse_args()
    rows = measure(options.seeds)
    print(as_text(rows))
    if options.json:
        write_json(options.json, rows)
    if options.update_docs:
        update_docs("ppo", f"{machine_line(describe_machine())}\n\n{as_markdown(rows)}")


if __name__ == "__main__":
    main()
