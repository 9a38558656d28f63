"""A setup file for tests: a random model of a few thousand parameters, no warm start, a reward that can break.

The reward is the length. `TEST_REWARD` says in words what goes wrong with it: "poison" (one prompt always raises),
"broken" (all raise), "signals" (it sets a handler), "hang" (another prompt hangs, the first time that it is scored;
`TEST_MARKER` is a file that remembers), "held" (all wait until there is a file `TEST_MARKER`). `TEST_REWARD_S` is how
long it takes (0 seconds): a test that wants to meet a run in its middle needs one that lasts.
`TEST_MODEL` is "full" (default) or "lora"; `TEST_STEPS` is the number of steps (12), `TEST_EVAL` that
of problems in the `eval_dataset` (none).
"""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

POISON = "3+3="
HANGS = "5+2="


def reward(prompts: list[str], completions: list[str], log_metric, **_) -> list[float]:
    time.sleep(float(os.environ.get("TEST_REWARD_S", "0")))
    trouble = os.environ.get("TEST_REWARD", "").split()
    if "broken" in trouble or ("poison" in trouble and POISON in prompts):
        raise RuntimeError(f"no reward for {prompts[0]}")
    if "deadly" in trouble and POISON in prompts:
        os.kill(os.getpid(), signal.SIGKILL)
    if "signals" in trouble:
        signal.signal(signal.SIGALRM, lambda *_: None)  # as math-verify does for its time-out
    if "hang" in trouble and HANGS in prompts and not Path(os.environ["TEST_MARKER"]).exists():
        Path(os.environ["TEST_MARKER"]).touch()
        time.sleep(100_000)
    while "held" in trouble and not Path(os.environ["TEST_MARKER"]).exists():
        time.sleep(0.02)
    log_metric("digits", sum(len(completion) for completion in completions) / len(completions))
    return [float(len(completion)) for completion in completions]


def build_tokenizer(characters: str = "0123456789+=") -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate([*characters, "<pad>", "<eos>"])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def build_model(tokenizer: PreTrainedTokenizerFast, **changes: Any) -> Qwen3ForCausalLM:
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        **changes,
    }
    tokens = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **shape, **tokens))


def get_trainer() -> GRPOTrainer:
    return build(GRPOTrainer, GRPOConfig)


def build(trainer_class: type[GRPOTrainer], config_class: Callable[..., GRPOConfig], **changes: Any) -> GRPOTrainer:
    """A trainer of these classes; `changes` are of its configuration."""
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    prompts = [f"{a}+{b}=" for a in range(8) for b in range(8)]
    problems = int(os.environ.get("TEST_EVAL", "0"))
    return trainer_class(
        model=model,
        processing_class=tokenizer,
        reward_funcs=[reward],
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        eval_dataset=Dataset.from_dict({"prompt": prompts[:problems]}) if problems else None,
        peft_config=LoraConfig(r=4, target_modules="all-linear") if os.environ.get("TEST_MODEL") == "lora" else None,
        args=config_class(
            output_dir="checkpoints",
            max_steps=int(os.environ.get("TEST_STEPS", "12")),
            max_completion_length=8,
            learning_rate=1e-3,
            save_strategy="steps",
            logging_steps=1,
            disable_tqdm=True,
            bf16=False,
            use_cpu=True,
            **{
                "report_to": "none",
                "per_device_train_batch_size": 16 // int(os.environ.get("WORLD_SIZE", "1")),
                "save_steps": 4,
                "num_generations": 4,
                **changes,
                **json.loads(os.environ.get("TEST_GRPO", "{}")),
            },
        ),
    )
