"""Trains the agent of this folder as it is: what it asks goes to the policy."""

import sys
from pathlib import Path

from datasets import Dataset
from openai import AsyncOpenAI
from trl import GRPOTrainer

from async_grpo.envs import Endpoint, OpenAIHarness

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tiny_model
sys.path.insert(0, str(Path(__file__).parent))  # for agent
from agent import ask_twice
from tiny_model import build_model, build_tokenizer, small_config

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


async def agent(prompt: list[dict], endpoint: Endpoint) -> dict:
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        return {"shares": await ask_twice(client, endpoint.model, prompt)}


def vowels(completions, shares, **_) -> list[float]:
    """Count the vowels of both answers; an agent that ended with an error earns nothing."""
    return [sum(each) / len(each) if each else 0.0 for each in shares]


def get_trainer() -> GRPOTrainer:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    letters = "abcdefghijklmnopqrstuvwxyz"
    rows = [{"prompt": [{"role": "user", "content": f"{letter}?"}]} for letter in letters]
    return GRPOTrainer(
        model=build_model(tokenizer),
        processing_class=tokenizer,
        reward_funcs=vowels,
        rollout_func=OpenAIHarness(agent),
        train_dataset=Dataset.from_list(rows),
        args=small_config("outputs/openai_agent", max_completion_length=80),
    )
