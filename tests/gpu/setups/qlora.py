"""A setup file: the model in $MODEL_PATH, quantised to 4 bits while it is loaded, and an adapter that trains."""

import os

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import GRPOConfig, GRPOTrainer

GPU = torch.cuda.is_available()
DTYPE = torch.bfloat16 if GPU else torch.float32


def distinct_tokens(completion_ids: list[list[int]], **_) -> list[float]:
    return [len(set(ids)) / len(ids) for ids in completion_ids]


def get_trainer() -> GRPOTrainer:
    folder = os.environ["MODEL_PATH"]
    quantisation = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=DTYPE)
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=quantisation, device_map={"": torch.cuda.current_device() if GPU else "cpu"}
    )
    return GRPOTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(folder),
        reward_funcs=[distinct_tokens],
        train_dataset=Dataset.from_dict({"prompt": [f"Question {number}: what is it?" for number in range(100)]}),
        peft_config=LoraConfig(r=8, target_modules="all-linear", init_lora_weights="gaussian"),
        args=GRPOConfig(
            output_dir="outputs/qlora",
            max_steps=3,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=16,
            learning_rate=1e-2,
            save_strategy="no",
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            bf16=GPU,
            use_cpu=not GPU,
        ),
    )
