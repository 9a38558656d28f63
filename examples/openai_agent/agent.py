"""An agent that knows nothing of training: it asks a model for vowels, twice, with the `openai` package."""

from openai import AsyncOpenAI

VOWELS = set("aeiou")
MOST_TOKENS = 12  # of an answer


def share_of_vowels(text: str) -> float:
    return sum(character in VOWELS for character in text) / max(1, len(text))


async def ask_twice(client: AsyncOpenAI, model: str, messages: list[dict]) -> list[float]:
    """The share of vowels in each of the two answers."""
    shares = []
    for _ in range(2):
        answer = await client.chat.completions.create(model=model, messages=messages, max_tokens=MOST_TOKENS)
        text = answer.choices[0].message.content or ""
        shares.append(share_of_vowels(text))
        messages = [
            *messages,
            {"role": "assistant", "content": text},
            {"role": "user", "content": f"{shares[-1]:.0%} vowels. more?"},
        ]
    return shares
