"""Recipe: teach a tiny language model to add, on a CPU, in seconds. Copy it, then change it.

The task: sums of two numbers below 50, in fixed width. The prompt is `07+41=`, the right completion `048`.

The model: Qwen3 architecture, about 0.2 M parameters, one token a character, nothing to download.

The warm start: GRPO can only reinforce answers that a model already gives sometimes. So the model is first
trained on correct answers, and then on answers with more and more wrong tens, up to 70 % of them. The likeliest
answer of the resulting model is right, but most of its sampled answers are wrong. The warm start takes seconds,
happens once, and is then read from the user's cache directory.

GRPO sharpens this policy. The reward is only "right" or "wrong", and the accuracy of answers sampled at
temperature 1 rises from about 0.3 to about 0.95, on 300 problems that neither the warm start nor GRPO trained on.
They are the `eval_dataset`: a distributed run evaluates on it (`--eval-every`).
"""

import hashlib
import json
import os
import random
import time
from pathlib import Path

import torch
from datasets import Dataset
from filelock import FileLock, Timeout
from safetensors.torch import load_model, save_model
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

# The cached warm start is named after these constants. If one changes, it is trained again.
TASK = {"numbers_below": 50, "held_out": 300, "split_seed": 0}
MODEL = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 24,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}
WARM_START = {
    "seed": 0,
    "batch_size": 64,
    "clean_steps": 800,
    "clean_learning_rate": 4e-3,
    "noisy_steps": 300,
    "noisy_learning_rate": 1e-3,
    "wrong_answers": 0.70,
}

PROGRESS = "progress.txt"  # of the warm start, in its folder

SYMBOLS = "0123456789+="
ANSWER_DIGITS = 3


# --- The task -------------------------------------------------------------------------------------


def split_problems() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Training and held-out problems (a, b). `b+a` is held out along with `a+b`, because it has the same answer."""
    numbers = range(TASK["numbers_below"])
    ascending = [(a, b) for a in numbers for b in numbers if a < b]
    chosen = random.Random(TASK["split_seed"]).sample(ascending, TASK["held_out"] // 2)
    held_out = [problem for a, b in chosen for problem in ((a, b), (b, a))]
    unseen = set(held_out)
    return [(a, b) for a in numbers for b in numbers if (a, b) not in unseen], held_out


def as_dataset(problems: list[tuple[int, int]]) -> Dataset:
    """Rows of `prompt`, which the model sees, and `answer`, which TRL passes to the reward function."""
    return Dataset.from_list([{"prompt": f"{a:02}+{b:02}=", "answer": f"{a + b:03}"} for a, b in problems])


def accuracy(completions: list[str], answer: list[str], **_) -> list[float]:
    """1 for exactly the right digits, else 0."""
    return [float(completion == right) for completion, right in zip(completions, answer, strict=True)]


# --- The model ------------------------------------------------------------------------------------


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, plus padding and end of text."""
    vocabulary = {token: index for index, token in enumerate([*SYMBOLS, "<pad>", "<eos>"])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """The warm-started model, bit for bit the same in every process that calls this."""
    config = Qwen3Config(
        **MODEL,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(WARM_START["seed"])
        model = Qwen3ForCausalLM(config)
    load_warm_start(model, tokenizer)
    return model


# --- The warm start -------------------------------------------------------------------------------


def load_warm_start(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Load the weights from the cache. If it has none, one process trains them and the others wait."""
    folder = warm_start_folder()
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / "model.safetensors"
    lock = FileLock(folder / "training.lock")
    if not weights.exists():
        wait_for(lock)
        try:
            if not weights.exists():
                train_warm_start(model, tokenizer, folder / PROGRESS)
                unfinished = folder / "unfinished.safetensors"
                save_model(model, str(unfinished))
                unfinished.replace(weights)
        finally:
            lock.release()
    load_model(model, weights)
    print(f"warm start: loaded from {weights}", flush=True)


def warm_start_folder() -> Path:
    """A folder named after the recipe's constants, in `$XDG_CACHE_HOME` or `~/.cache`."""
    constants = json.dumps([TASK, MODEL, WARM_START, SYMBOLS, ANSWER_DIGITS], sort_keys=True)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "async-grpo" / f"tiny-{hashlib.sha256(constants.encode()).hexdigest()[:12]}"


def wait_for(lock: FileLock, say_every_s: float = 10, at_most_s: float = 600) -> None:
    """Take the lock, and print how far the process that has it is. The kernel releases the lock of one that dies."""
    started = time.monotonic()
    while True:
        try:
            lock.acquire(timeout=say_every_s)
            return
        except Timeout:
            waited_s = time.monotonic() - started
            so_far = read_progress(Path(lock.lock_file).with_name(PROGRESS))
            if waited_s > at_most_s:
                raise TimeoutError(
                    f"warm start: process {os.getpid()} has waited {waited_s:.0f} s for another process to train it "
                    f"({so_far}). It holds {lock.lock_file}: end it, and start again."
                ) from None
            print(f"warm start: another process trains it: {so_far} ({waited_s:.0f} s)", flush=True)


def read_progress(file: Path) -> str:
    try:
        return file.read_text()
    except FileNotFoundError:  # before it begins, and after its end
        return "it begins or ends"


def train_warm_start(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, progress: Path) -> None:
    """Supervised learning on the answers' tokens: first on correct answers, then on noisy ones.

    The file `progress` says how far it is, for processes that wait for it.
    """
    phases = [
        (WARM_START["clean_steps"], WARM_START["clean_learning_rate"], 0.0),
        (WARM_START["noisy_steps"], WARM_START["noisy_learning_rate"], WARM_START["wrong_answers"]),
    ]
    print("warm start: training, once; it takes 10 to 60 s on two cores", flush=True)
    progress.unlink(missing_ok=True)  # of a process that was killed
    started = time.monotonic()
    prompts, answers = teacher_tokens(tokenizer)
    randomness = torch.Generator().manual_seed(WARM_START["seed"])
    for number, (steps, learning_rate, wrong_answers) in enumerate(phases, start=1):
        optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            learning_rate,
            total_steps=steps,
            pct_start=0.05,
            anneal_strategy="linear",
            cycle_momentum=False,
            final_div_factor=100,
        )
        for step in range(1, steps + 1):
            rows = torch.randint(len(prompts), (WARM_START["batch_size"],), generator=randomness)
            prompt = prompts[rows]
            answer = with_errors(answers[rows], wrong_answers * step / steps, randomness)
            logits = model(torch.cat([prompt, answer[:, :-1]], dim=1), use_cache=False).logits
            cross_entropy(logits[:, prompt.shape[1] - 1 :].flatten(0, 1), answer.flatten()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if step % 100 == 0:
                progress.write_text(f"part {number} of {len(phases)}, step {step} of {steps}")
                print(f"warm start: {progress.read_text()}", flush=True)
    progress.unlink(missing_ok=True)
    print(f"warm start: trained in {time.monotonic() - started:.0f} s", flush=True)


def teacher_tokens(tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids of all training problems: prompts [problems, 6], answers with end of text [problems, 4]."""
    rows = as_dataset(split_problems()[0])
    prompts = tokenizer(list(rows["prompt"]))["input_ids"]
    answers = tokenizer([answer + tokenizer.eos_token for answer in rows["answer"]])["input_ids"]
    return torch.tensor(prompts), torch.tensor(answers)


def with_errors(answers: torch.Tensor, wrong_answers: float, randomness: torch.Generator) -> torch.Tensor:
    """The answers, with wrong tens in the given share of them."""
    tens = answers[:, -3]
    errs = torch.rand(tens.shape, generator=randomness) < wrong_answers
    shifts = torch.randint(1, 10, tens.shape, generator=randomness)
    other_digits = (tens + shifts) % 10  # a digit's token id is its value
    taught = answers.clone()
    taught[:, -3] = torch.where(errs, other_digits, tens)
    return taught


# --- The trainer ----------------------------------------------------------------------------------


def get_trainer() -> GRPOTrainer:
    tokenizer = build_tokenizer()
    training_problems, held_out_problems = split_problems()
    return GRPOTrainer(
        model=build_model(tokenizer),
        processing_class=tokenizer,
        reward_funcs=[accuracy],
        train_dataset=as_dataset(training_problems),
        eval_dataset=as_dataset(held_out_problems),
        args=GRPOConfig(
            output_dir="outputs/tiny",
            max_steps=100,
            # 16 prompts, 8 completions of each. A completion is three digits and end of text.
            per_device_train_batch_size=128,
            num_generations=8,
            max_completion_length=ANSWER_DIGITS + 1,
            temperature=1.0,
            # 3e-4 is slower, 1e-3 noisier; this one is also stable at a staleness of 8.
            learning_rate=4e-4,
            lr_scheduler_type="linear",
            warmup_steps=5,
            # Also saved after the last step.
            save_strategy="steps",
            save_steps=25,
            save_total_limit=2,
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=not torch.cuda.is_available(),
        ),
    )
