"""Questions that are answered by searching, with credit for each turn (MT-GRPO).

MODEL: a model of the hub or a path; `tiny` is a random one of this folder, which needs no download and learns nothing
in a short run. CALLS: how it calls the tool; `tokenizer` (its chat template has tools) or `tags` (any chat template).
DATASET: `facts` (generated, no download), TriviaQA of the hub (`mandarjoshi/trivia_qa`) or a folder with a copy of it,
or a file (JSON Lines, Parquet) with `question` and either TriviaQA's `answer` or a list of `aliases`. INDEX: a folder
with an index of bm25s, for what is not `facts`.
"""

import os
import sys
from pathlib import Path

from datasets import Dataset, load_dataset
from transformers import AutoTokenizer
from trl import GRPOConfig

from async_grpo.credit import TurnGRPOTrainer
from async_grpo.envs import SearchEnv, generated_facts, with_tags
from async_grpo.rewards.questions import OUTCOME_REWARDS, TURN_REWARDS

sys.path.insert(0, str(Path(__file__).parent))  # for tiny
TASK = (
    "Answer the question. In each message, think first: <reasoning>…</reasoning>. Then either call the tool search, or "
    "answer with nothing but the answer: <answer>…</answer>.\n\n"
)
HELD_OUT = 40  # facts that are not trained on


class Search(SearchEnv):
    index = os.environ.get("INDEX")


def rows(name: str) -> Dataset:
    """`prompt`, and `aliases`: the answers that count."""
    if name != "facts" and not Search.index:
        raise ValueError("DATASET asks for more than the generated facts: set INDEX to a folder with passages for it.")
    if name == "facts":
        asked = [{"question": fact.question, "aliases": [fact.answer]} for fact in generated_facts()[:-HELD_OUT]]
        dataset = Dataset.from_list(asked)
    elif Path(name).is_file():
        kind = "parquet" if name.endswith(".parquet") else "json"
        dataset = load_dataset(kind, data_files=name, split="train")
    else:
        dataset = load_dataset(name, "rc.nocontext", split="train")
    if "aliases" not in dataset.column_names:
        dataset = dataset.map(lambda row: {"aliases": row["answer"]["normalized_aliases"]})
    prompts = dataset.map(lambda row: {"prompt": [{"role": "user", "content": TASK + row["question"]}]})
    return prompts.select_columns(["prompt", "aliases"])


def get_trainer() -> TurnGRPOTrainer:
    name = os.environ.get("MODEL", "Qwen/Qwen3-1.7B")
    if name == "tiny":
        from tiny import build_model, build_tokenizer

        tokenizer = build_tokenizer()
        model = build_model(tokenizer)
    else:
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
        model = name
    if os.environ.get("CALLS", "tokenizer") == "tags":
        tokenizer = with_tags(tokenizer)
    return TurnGRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=list(OUTCOME_REWARDS),
        turn_reward_funcs=list(TURN_REWARDS),
        credit="turn",
        environment_factory=Search,
        train_dataset=rows(os.environ.get("DATASET", "facts")),
        args=GRPOConfig(
            output_dir="outputs/triviaqa_search",
            max_steps=300,
            per_device_train_batch_size=16,
            num_generations=8,
            max_completion_length=64 if name == "tiny" else 1024,
            max_tool_calling_iterations=2,
            learning_rate=1e-6,
            beta=0.0,
            logging_steps=1,
            bf16=name != "tiny",
            report_to="none",
        ),
    )
