"""LoRA on a model in a folder: the server publishes the base once, and after each step only the adapter."""

import sys
from pathlib import Path

from datasets import Dataset
from filelock import FileLock
from peft import LoraConfig
from trl import GRPOTrainer

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tiny_model
from tiny_model import build_model, build_tokenizer, small_config

MODEL = Path("outputs/tiny_model").absolute()  # yours: "Qwen/Qwen3-1.7B-Base", or a folder of your own


def make_model() -> None:
    """Write the tiny model once; several processes may ask for it."""
    MODEL.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(MODEL.with_suffix(".lock")):
        if not (MODEL / "tokenizer_config.json").exists():
            tokenizer = build_tokenizer()
            build_model(tokenizer).save_pretrained(MODEL)
            tokenizer.save_pretrained(MODEL)


def spaces(completions: list[str], **_) -> list[float]:
    return [completion.count(" ") / 16 for completion in completions]


def get_trainer() -> GRPOTrainer:
    make_model()
    return GRPOTrainer(
        model=str(MODEL),
        reward_funcs=[spaces],
        train_dataset=Dataset.from_dict({"prompt": ["a", "b c", "d e f", "g"]}),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
        args=small_config("outputs/lora", learning_rate=1e-2, model_init_kwargs={"dtype": "float32"}),
    )
