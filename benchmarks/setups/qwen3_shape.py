"""A setup file with a randomly initialised model of Qwen3's shape: the speed of the real one, without its weights.

    QWEN3_SHAPE     tiny, small, 0.6B (default) or 1.7B
    PROMPT          tokens of each prompt (those of a short question)
    COMPLETION      tokens of a completion (256); a random model hardly ever ends by itself
    ROWS, GROUP     completions of a step (64; on a CPU 8) and of a prompt (8; on a CPU 4)
    MICRO_BATCH     completions of a forward and backward pass (all of a step)
    CONTINUOUS_BATCHING  1: TRL's own, where TRL samples
    STEPS           optimizer steps (10)
    SAVE_STEPS      steps from one checkpoint to the next (none)
    WAIT_AT_EVERY_TOKEN  1: workers wait for the GPU after each token, as they did until November 2026

`python benchmarks/setups/qwen3_shape.py FOLDER` saves model and tokenizer instead, for recipes that load one.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

SHAPES = {  # hidden size, intermediate size, layers, heads, key-value heads, head size, vocabulary
    "tiny": (64, 128, 2, 4, 2, 16, 512),
    "small": (256, 768, 4, 4, 2, 64, 2_048),
    "0.6B": (1024, 3072, 28, 16, 8, 128, 151_936),
    "1.7B": (2048, 6144, 28, 16, 8, 128, 151_936),
}
GPU = torch.cuda.is_available()
END = "<|endoftext|>"
SAVE_STEPS = int(os.environ.get("SAVE_STEPS", "0"))
ROWS = int(os.environ.get("ROWS", "64" if GPU else "8"))
CONTINUOUS_BATCHING = os.environ.get("CONTINUOUS_BATCHING") == "1"
MICRO_BATCH = int(os.environ.get("MICRO_BATCH", ROWS))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate([END, *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END, padding_side="left")


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    hidden, intermediate, layers, heads, kv_heads, head_dim, vocabulary = SHAPES[os.environ.get("QWEN3_SHAPE", "0.6B")]
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype=torch.bfloat16 if GPU else torch.float32,
    )
    with torch.device("cuda" if GPU else "cpu"):
        return Qwen3ForCausalLM(config).to(torch.bfloat16 if GPU else torch.float32)


def question(number: int) -> str:
    text = f"Question {number}: what is it?"
    return text.ljust(tokens := int(os.environ.get("PROMPT", len(text))), "?")[:tokens]


def distinct_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [len(set(ids)) / len(ids) for ids in completion_ids]


class StepLog(TrainerCallback):
    """One line a step into the file that STEP_LOG names: when, how many tokens so far, and this process's memory."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        file = os.environ.get("STEP_LOG")
        if file and logs and "num_tokens" in logs:
            memory = torch.cuda.max_memory_allocated() if GPU else 0
            line = {"time": time.time(), "step": state.global_step, "tokens": logs["num_tokens"], "memory": memory}
            with Path(file).open("a") as lines:
                lines.write(json.dumps(line) + "\n")


def wait_at_every_token() -> None:
    """Let workers that read weights in place ask whether these are intact as they once did."""
    from async_grpo_ipc import RemoteWeights

    intact = RemoteWeights.intact
    RemoteWeights.intact = lambda self, *, wait=True: intact(self, wait=True)  # type: ignore[method-assign]


def get_trainer() -> GRPOTrainer:
    if os.environ.get("WAIT_AT_EVERY_TOKEN") == "1":
        wait_at_every_token()
    tokenizer = build_tokenizer()
    return GRPOTrainer(
        model=build_model(tokenizer),
        processing_class=tokenizer,
        reward_funcs=[distinct_tokens],
        train_dataset=Dataset.from_dict({"prompt": [question(number) for number in range(1000)]}),
        callbacks=[StepLog()],
        args=GRPOConfig(
            output_dir="outputs/qwen3_shape",
            max_steps=int(os.environ.get("STEPS", "10")),
            per_device_train_batch_size=MICRO_BATCH // int(os.environ.get("WORLD_SIZE", "1")),
            gradient_accumulation_steps=ROWS // MICRO_BATCH,
            num_generations=int(os.environ.get("GROUP", "8" if GPU else "4")),
            max_completion_length=int(os.environ.get("COMPLETION", "256")),
            learning_rate=1e-6,
            **({"use_transformers_continuous_batching": True} if CONTINUOUS_BATCHING else {}),
            save_strategy="steps" if SAVE_STEPS else "no",
            save_steps=SAVE_STEPS or 500,
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            bf16=GPU,
            use_cpu=not GPU,
        ),
    )


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    saved = build_tokenizer()
    build_model(saved).save_pretrained(folder)
    saved.save_pretrained(folder)
