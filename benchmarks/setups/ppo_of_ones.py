"""The demo's task trained by PPO with groups of one completion: a setup file, for what a run costs beside its work."""

import sys
from pathlib import Path

from async_grpo.credit import PPOConfig, PPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src" / "app"))
import trainer_setup_tiny as tiny


def get_trainer() -> PPOTrainer:
    tokenizer = tiny.build_tokenizer()
    return PPOTrainer(
        model=tiny.build_model(tokenizer),
        processing_class=tokenizer,
        reward_funcs=[tiny.accuracy],
        train_dataset=tiny.as_dataset(tiny.split_problems()[0]),
        args=PPOConfig(
            output_dir="outputs",
            per_device_train_batch_size=128,
            max_completion_length=tiny.ANSWER_DIGITS + 1,
            temperature=1.0,
            learning_rate=4e-4,
            critic_learning_rate=1e-3,
            save_strategy="no",
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
        ),
    )
