"""Recipe: GRPO with LoRA on GSM8K, grade school word problems. Copy it, then change it.

The model works the problem out between tags and gives the answer in another pair:

    <start_working_out> 16 - 3 - 4 = 9 eggs, 9 * 2 = 18 <end_working_out><SOLUTION>18</SOLUTION>

The prompt already ends with the first tag. Four reward functions score the format and the answer; together
they give from -7.5 to 13 points.

Environment:
    MODEL_PATH      a directory or a hub name; Qwen/Qwen3-1.7B-Base if not set
    GSM8K_PATH      a directory with train.jsonl and test.jsonl; the hub's openai/gsm8k if not set
    FAST_INFERENCE  1: Unsloth generates with the vLLM inside its model; 0 or not set: it does not

On a GPU with Unsloth installed, Unsloth loads the model; everywhere else transformers and peft do.
"""

import importlib.util
import json
import os
import re
from pathlib import Path

import torch

if torch.cuda.is_available() and importlib.util.find_spec("unsloth"):
    from unsloth import FastLanguageModel  # it patches TRL, so it must be imported first
else:
    FastLanguageModel = None

from datasets import Dataset, load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

DEFAULT_MODEL = "Qwen/Qwen3-1.7B-Base"
HUB_DATASET = "openai/gsm8k"

# GSM8K's longest problem and its longest worked answer have about 1,000 and 1,250 characters, some 300 tokens each.
# Other recipes reserve 8,192 tokens: that costs memory, and an answer that never ends holds up its group for as long.
MAX_COMPLETION_TOKENS = 1024
MAX_SEQUENCE_TOKENS = 2048
LORA_RANK = 16
LORA_ALPHA = 32
LORA_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SEED = 3407

# --- The format -----------------------------------------------------------------------------------

WORK_START, WORK_END = "<start_working_out>", "<end_working_out>"
SOLUTION_START, SOLUTION_END = "<SOLUTION>", "</SOLUTION>"

SYSTEM_PROMPT = (
    "You are given a problem. Think about it and write down how you work it out, "
    f"between {WORK_START} and {WORK_END}. "
    f"Then give the solution, a number and nothing else, between {SOLUTION_START} and {SOLUTION_END}."
)

# For models that have no chat template of their own: one text after the other.
PLAIN_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% else %}{{ '\n\n' }}{% endif %}"
    "{% endfor %}"
)

# The whole answer: work, one solution, end of text (decoding usually skips its token).
ANSWER = re.compile(
    rf"{WORK_END}.*?{SOLUTION_START}((?:(?!</?SOLUTION>).)+){SOLUTION_END}\s*(?:<\|\w+\|>)?\s*\Z", re.DOTALL
)
NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|[-+]?\.\d+")


def as_number(text: str) -> float | None:
    """`"1,000"` -> 1000.0; None for any text that is not exactly one number."""
    return float(text.strip().replace(",", "")) if NUMBER.fullmatch(text.strip()) else None


def texts(completions: list[list[dict[str, str]]]) -> list[str]:
    """The texts of completions in TRL's conversational form."""
    return [completion[-1]["content"] for completion in completions]


# --- The four rewards -----------------------------------------------------------------------------


def match_format_exactly(completions, **_) -> list[float]:
    """3 points if the completion is work and solution, and nothing else."""
    return [3.0 if ANSWER.search(text) else 0.0 for text in texts(completions)]


def match_format_approximately(completions, **_) -> list[float]:
    """For each of the three tags half a point if it occurs exactly once, else minus one."""
    tags = (WORK_END, SOLUTION_START, SOLUTION_END)
    return [sum(0.5 if text.count(tag) == 1 else -1.0 for tag in tags) for text in texts(completions)]


def check_answer(completions, answer, **_) -> list[float]:
    """Points for the solution, if the format is right: 5 for the exact one, fewer for a close one."""
    return [score_solution(ANSWER.search(text), gold) for text, gold in zip(texts(completions), answer)]


check_answer.success_threshold = 3.5  # of an evaluation by the workers: the right number, in the right form


def score_solution(found: re.Match | None, gold: str) -> float:
    if found is None:
        return -2.0
    solution = found[1]
    number, gold_number = as_number(solution), as_number(gold)
    if solution.strip() == gold.strip() or (number is not None and number == gold_number):
        return 5.0 if solution == solution.strip() else 3.5
    if number is None or gold_number is None:
        return -4.5
    ratio = number / gold_number if gold_number else float("inf")
    if 0.9 <= ratio <= 1.1:
        return 2.0
    if 0.8 <= ratio <= 1.2:
        return 1.5
    return -2.5


def check_numbers(completions, answer, **_) -> list[float]:
    """Points for the first number after the solution's tag, independently of the format."""
    return [score_first_number(text, gold) for text, gold in zip(texts(completions), answer)]


def score_first_number(text: str, gold: str) -> float:
    _, _, solution = text.partition(SOLUTION_START)
    first = NUMBER.search(solution)
    if first is None:
        return -2.5
    gold_number = as_number(gold)
    if gold_number is None:
        return 0.0
    return 3.5 if as_number(first[0]) == gold_number else -1.5


# --- The data -------------------------------------------------------------------------------------


def load_gsm8k(split: str) -> Dataset:
    """Rows of `prompt` (a conversation) and `answer` (only the number, as text) of "train" or "test"."""
    folder = os.environ.get("GSM8K_PATH")
    rows = read_rows(Path(folder), split) if folder else load_dataset(HUB_DATASET, "main", split=split)
    return Dataset.from_list([as_example(row["question"], row["answer"]) for row in rows])


def read_rows(folder: Path, split: str) -> list[dict[str, str]]:
    file = folder / f"{split}.jsonl"
    if not file.is_file():
        raise FileNotFoundError(
            f"GSM8K file not found: {file}. Set GSM8K_PATH to a directory with train.jsonl and test.jsonl, "
            f"or unset it to load {HUB_DATASET} from the Hugging Face hub."
        )
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def as_example(question: str, worked_answer: str) -> dict:
    """A GSM8K answer is the work, then `####`, then the number."""
    return {
        "prompt": [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": question},
        ],
        "answer": worked_answer.rpartition("####")[2].strip(),
    }


# --- The model ------------------------------------------------------------------------------------


def load_model():
    """The model, its tokenizer, and the LoRA configuration for TRL to apply (None: Unsloth has applied it)."""
    name = os.environ.get("MODEL_PATH") or DEFAULT_MODEL
    check_model_path(name)
    if FastLanguageModel is not None:
        return *load_with_unsloth(name), None
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        dtype = torch.bfloat16 if can_use_bf16() else torch.float32
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    except OSError as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"No model could be loaded from {name!r} (set by MODEL_PATH): {reason}") from error
    lora = LoraConfig(r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules=LORA_MODULES, task_type="CAUSAL_LM")
    return model, tokenizer, lora


def load_with_unsloth(name: str):
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=name,
        max_seq_length=MAX_SEQUENCE_TOKENS,
        load_in_4bit=False,
        fast_inference=os.environ.get("FAST_INFERENCE", "0") == "1",
        max_lora_rank=LORA_RANK,
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=LORA_RANK,
        lora_alpha=LORA_ALPHA,
        target_modules=LORA_MODULES,
        use_gradient_checkpointing="unsloth",
        random_state=SEED,
    )
    return model, tokenizer


def check_model_path(name: str) -> None:
    """A hub name is `model` or `owner/model`; any other name must be a directory with a model in it."""
    looks_like_hub_name = re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name)
    if Path(name).is_dir():
        problem = None if (Path(name) / "config.json").is_file() else "that directory has no config.json"
    else:
        problem = None if looks_like_hub_name else "there is no such directory"
    if problem:
        raise FileNotFoundError(
            f"MODEL_PATH is {name!r}, but {problem}. Set it to a directory with a model, "
            f"or a model on the Hugging Face hub such as {DEFAULT_MODEL}."
        )


def can_use_bf16() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported()


def with_working_out(tokenizer) -> str:
    """The chat template with the tag that starts the work at the end of the prompt.

    The turns of a base model's template may not end with its end-of-text token; such a model would never stop.
    It gets the plain template, like a model without one.
    """
    template = tokenizer.chat_template or ""
    if WORK_START in template:
        return template  # this recipe saved it
    if "eos_token" not in template and (tokenizer.eos_token or "eos_token") not in template:
        template = PLAIN_CHAT_TEMPLATE
    return template + "{% if add_generation_prompt %}" + WORK_START + "{% endif %}"


# --- The trainer ----------------------------------------------------------------------------------


def get_trainer() -> GRPOTrainer:
    train_dataset, test_dataset = load_gsm8k("train"), load_gsm8k("test")
    model, tokenizer, lora = load_model()
    tokenizer.chat_template = with_working_out(tokenizer)
    return GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=[match_format_exactly, match_format_approximately, check_answer, check_numbers],
        train_dataset=train_dataset,
        eval_dataset=test_dataset,  # of 1,319 rows; a distributed run evaluates on it (--eval-every)
        peft_config=lora,
        args=GRPOConfig(
            output_dir="outputs/gsm8k",
            seed=SEED,
            max_steps=1000,
            # 4 prompts a step, 4 completions of each; one prompt's completions at a time on the device.
            per_device_train_batch_size=4,
            gradient_accumulation_steps=4,
            num_generations=4,
            max_completion_length=MAX_COMPLETION_TOKENS,
            temperature=1.0,
            learning_rate=5e-6,
            weight_decay=0.01,
            lr_scheduler_type="linear",
            warmup_steps=0.1,  # a tenth of all steps
            save_steps=100,
            logging_steps=1,
            report_to="none",
            bf16=can_use_bf16(),
            use_cpu=not torch.cuda.is_available(),
        ),
    )
