"""A setup file for tests with vLLM: a random Qwen3 of about 1 M parameters, with heads as wide as its CPU build wants.

`TEST_LORA=1` trains an adapter, `TEST_USE_VLLM=1` asks TRL for vLLM, `TEST_TOKENS` is the longest completion,
`TEST_SAVE=1` keeps checkpoints. It computes on the CPU, or in bf16 on the GPU that GPU_TESTS_DEVICE names: on a GPU,
vLLM's kernels for adapters take no fp32.
"""

import os
import sys
from pathlib import Path

from datasets import Dataset
from peft import LoraConfig
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

sys.path.append(str(Path(__file__).parents[2] / "kit" / "setups"))
import random_model

DEVICE = os.environ.get("GPU_TESTS_DEVICE", "cpu")
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789+= "


def even_share(completions: list[str], **_) -> list[float]:
    return [sum(letter in "02468" for letter in text) / max(1, len(text)) for text in completions]


def build_tokenizer() -> PreTrainedTokenizerFast:
    return random_model.build_tokenizer(LETTERS)


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    shape |= {"head_dim": 32, "max_position_embeddings": 512, "initializer_range": 0.1, "tie_word_embeddings": True}
    return random_model.build_model(tokenizer, **shape)


def get_trainer() -> GRPOTrainer:
    tokenizer = build_tokenizer()
    lora = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    return GRPOTrainer(
        model=build_model(tokenizer),
        processing_class=tokenizer,
        reward_funcs=[even_share],
        train_dataset=Dataset.from_dict({"prompt": [f"{a}+{b}=" for a in range(8) for b in range(8)]}),
        peft_config=lora if os.environ.get("TEST_LORA") else None,
        args=GRPOConfig(
            output_dir="checkpoints",
            max_steps=20,
            per_device_train_batch_size=16,
            num_generations=4,
            max_completion_length=int(os.environ.get("TEST_TOKENS", "16")),
            learning_rate=1e-3,
            use_vllm=bool(os.environ.get("TEST_USE_VLLM")),
            save_strategy="steps" if os.environ.get("TEST_SAVE") else "no",
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            bf16=DEVICE != "cpu",
            use_cpu=DEVICE == "cpu",
        ),
    )
