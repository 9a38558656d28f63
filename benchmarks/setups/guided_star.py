"""A star graph's paths, decoded by a head: `reference` and `head` lie in the working directory.

`STAR` is the number of branches, of the nodes of each, and of all names: "3 3 12".
"""

import os

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from async_grpo_experiments.guidance import guided
from async_grpo_experiments.worlds.star import star_graphs, star_reward, star_rows


def get_trainer() -> GRPOTrainer:
    branches, length, nodes = map(int, os.environ.get("STAR", "3 3 12").split())
    rows = Dataset.from_list(star_rows([*star_graphs(branches, length, 200, nodes=nodes, seed=5)]))
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained("reference"),
        star_reward,
        args=GRPOConfig(
            output_dir="unused",
            per_device_train_batch_size=8,
            num_generations=8,
            max_completion_length=length + 1,
            beta=0.0,
            bf16=False,
            use_cpu=True,
            report_to="none",
        ),
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained("reference"),
    )
    return guided(trainer, head="head", eta=0.2)
