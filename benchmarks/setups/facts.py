"""Questions about generated facts, and a tiny model that can search for them and seldom does.

160 of the facts of `SearchEnv` are trained on, 40 are held out. The rewards are those of examples/triviaqa_search.

Tokens: each phrase of questions, passages and messages is one; a name is three or four (syllables), a number two (pairs
of digits). Anything else is a character each.

The warm start is supervised, on other facts. First the model learns to search for the name in the question, and to copy
the answer from what it finds. Then it learns to do each of these seldom: `CALLS`, `QUERIES` and `COPIES` multiply to
.04, near the exact match that MT-GRPO starts from (.047, arXiv 2505.11821). So everything that is needed is in the
model, and reinforcement has to find it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from benchmarks.setups.warm import learn, load_warm_start
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig
from trl.chat_template_utils import qwen3_template

from async_grpo.credit import TurnGRPOTrainer
from async_grpo.envs import Fact, Passages, SearchEnv, generated_facts
from async_grpo.rewards.questions import OUTCOME_REWARDS, TURN_REWARDS

HELD_OUT = 40  # of the 200 facts
CALLS, QUERIES, COPIES = 0.2, 0.4, 0.5  # how often the warm start searches; for the right name; copies what it found
ANSWERS = 8  # to each question, in training and in evaluation
MODEL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
SHAPE = "-".join(str(size) for size in MODEL.values())
CLEAN_STEPS, NOISY_STEPS, WARM_BATCH = 1400, 300, 32
KINDS = 5  # of facts, in turn
TAUGHT_SEEDS = range(1, 301)  # of the facts of the warm start; 0 is that of the environment
ELSEWHERE_SEED = 1000  # of the facts that are found where the search is of no use

USER, ASSISTANT, TOOL, END = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_start|>tool\n", "<|im_end|>"
CALL, CALLED = '<tool_call>\n{"name": "search", "arguments": {"query": "', '"}}\n</tool_call>'
NOTHING = "Nothing was found."
_MARKS = [USER, ASSISTANT, TOOL, "<reasoning>", "</reasoning>", "<answer>", "</answer>", CALL, CALLED]
_THOUGHTS = ["I search.", "I know.", "I read."]
_ASKING = ["What is the capital of ", "Into which sea does the river ", " flow?", "In which year was ", " founded?"]
_ASKING += ["Where was the painter ", " born?", "How many metres high is Mount ", "?"]
_TELLING = ["The capital of ", " is ", "The river ", " flows into the ", " sea.", " was founded in the year "]
_TELLING += ["The painter ", " was born in ", "Mount ", " metres high.", ".", NOTHING]
_STARTS = ["b", "br", "d", "dr", "f", "g", "gr", "h", "k", "kl", "l", "m", "n", "p", "r", "s", "st", "t", "v", "z"]
_VOWELS = ["a", "e", "i", "o", "u", "ai", "ea", "io", "ou"]
_ENDS = ["l", "m", "n", "nd", "r", "rk", "s", "st", "t", "x"]
SYLLABLES = [start + vowel for start in _STARTS for vowel in _VOWELS]
_PAIRS = [f"{number:02}" for number in range(100)]
_NAMES = sorted([*SYLLABLES, *map(str.capitalize, SYLLABLES), *_ENDS, *_PAIRS], key=len, reverse=True)
TEMPLATE = f"""\
{{%- for message in messages -%}}
{{{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') -}}}}
{{%- for call in message.tool_calls or [] -%}}
{{{{- '<tool_call>\\n' + ((call.function or call) | tojson) + '\\n</tool_call>' -}}}}
{{%- endfor -%}}
{{{{- '{END}' -}}}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}{{{{- '<|im_start|>assistant\\n' -}}}}{{%- endif -%}}
"""


# --- Model and tokenizer ----------------------------------------------------------------------------------


def build_tokenizer() -> PreTrainedTokenizerFast:
    phrases = sorted([*_MARKS, *_THOUGHTS, *_ASKING, *_TELLING], key=len, reverse=True)
    pieces = dict.fromkeys([*phrases, *_NAMES, *map(chr, range(32, 127)), "\n", "<pad>", END])
    pattern = "|".join(re.escape(piece) for piece in [*phrases, *_NAMES])
    words = Tokenizer(models.WordLevel({piece: at for at, piece in enumerate(pieces)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(pattern + r"|[\s\S]"), behavior="isolated")
    words.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token=END, padding_side="left", chat_template=TEMPLATE
    )
    tokenizer.response_template = qwen3_template
    return tokenizer


def build_model(
    tokenizer: PreTrainedTokenizerFast, name: str, warm_up: Callable[[Any, Any], None]
) -> tuple[Qwen3ForCausalLM, float]:
    """The warm-started model, kept by this name, and the seconds that its warm start took."""
    config = Qwen3Config(
        **MODEL,
        head_dim=MODEL["hidden_size"] // MODEL["num_attention_heads"],
        num_key_value_heads=MODEL["num_attention_heads"],
        max_position_embeddings=256,
        tie_word_embeddings=True,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
        return model, load_warm_start(model, name, lambda: warm_up(model, tokenizer))


# --- The warm start ---------------------------------------------------------------------------------------


def warm_up(model: Any, tokenizer: Any) -> None:
    learn(model, _batches(tokenizer, 1.0, 1.0, 1.0), steps=CLEAN_STEPS, learning_rate=3e-3)
    learn(model, _batches(tokenizer, CALLS, QUERIES, COPIES), steps=NOISY_STEPS, learning_rate=5e-4)


def _batches(
    tokenizer: Any, calls: float, queries: float, copies: float
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Dialogues in which so many search, so many of these for the right name, and so many of these copy."""
    draw, facts = random.Random(0), [fact for seed in TAUGHT_SEEDS for fact in generated_facts(seed)]
    while True:
        told = []
        for _ in range(WARM_BATCH):
            at = draw.randrange(len(facts))
            fact, other = facts[at], facts[draw.randrange(at % KINDS, len(facts), KINDS)]  # of one kind
            if draw.random() >= calls:
                told.append([_asked(fact), *_answer("I know.", other.answer, taught=False)])
            elif draw.random() >= queries:
                query = slipped(subject(fact), draw)
                told.append([*_search(fact, query, NOTHING), *_answer("I read.", other.answer, taught=False)])
            else:
                answer = fact.answer if draw.random() < copies else slipped(fact.answer, draw)
                told.append([*_search(fact, subject(fact), fact.passage), *_answer("I read.", answer)])
        yield padded(tokenizer, told)


Parts = list[tuple[str, bool]]  # texts, and whether the model is to write them


def _asked(fact: Fact) -> tuple[str, bool]:
    return f"{USER}{fact.question}{END}{ASSISTANT}", False


def _search(fact: Fact, query: str, found: str) -> Parts:
    call = f"<reasoning>I search.</reasoning>{CALL}{query}{CALLED}{END}"
    return [_asked(fact), (call, True), (f"{TOOL}{found}{END}{ASSISTANT}", False)]


def _answer(thought: str, answer: str, *, taught: bool = True) -> Parts:
    """A guess is not taught: nothing leads to it."""
    return [(f"<reasoning>{thought}</reasoning><answer>", True), (answer, taught), (f"</answer>{END}", True)]


def slipped(name: str, draw: random.Random) -> str:
    """The name or number with another syllable, or another pair of digits, at one position."""
    pieces = re.findall("|".join(_NAMES), name)
    at = draw.randrange(len(pieces) - (pieces[-1] in _ENDS))
    other = draw.choice(_PAIRS if name.isdigit() else SYLLABLES)
    pieces[at] = other.capitalize() if at == 0 else other
    return "".join(pieces)


def subject(fact: Fact) -> str:
    """The name in a question."""
    return re.sub("|".join(map(re.escape, _ASKING)), "", fact.question)


def padded(tokenizer: Any, told: Sequence[Parts]) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = [[tokenizer.encode(text, add_special_tokens=False) for text, _ in parts] for parts in told]
    longest = max(sum(map(len, rows)) for rows in tokens)
    ids, labels = torch.full((len(told), longest), tokenizer.pad_token_id), torch.full((len(told), longest), -100)
    for row, (parts, pieces) in enumerate(zip(told, tokens, strict=True)):
        end = 0
        for (_, written), piece in zip(parts, pieces, strict=True):
            start, end = end, end + len(piece)
            ids[row, start:end] = torch.tensor(piece)
            if written:
                labels[row, start:end] = ids[row, start:end]
    return ids, labels


# --- The trainer ------------------------------------------------------------------------------------------


class Search(SearchEnv):
    """Searches the generated facts, those held out too; `elsewhere` has it search others."""

    index: ClassVar[Passages | str | Path | None] = None


@contextmanager
def elsewhere() -> Iterator[None]:
    """The search finds facts of other names: what is right then was not found by searching."""
    Search.index = _other_passages()
    try:
        yield
    finally:
        Search.index = None


@lru_cache
def _other_passages() -> Passages:
    return Passages.of([fact.passage for fact in generated_facts(ELSEWHERE_SEED)])


def called(completions: Sequence[Any], **_: Any) -> list[float]:
    """Whether a tool was called; of weight 0: measured, not trained on."""
    return [float(any(message.get("tool_calls") for message in completion)) for completion in completions]


def questions(*, held_out: bool) -> Dataset:
    facts = generated_facts()
    asked = facts[-HELD_OUT:] if held_out else facts[:-HELD_OUT]
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": fact.question}], "aliases": [fact.answer]} for fact in asked]
    )


def build_trainer(output_dir: Path, credit: str, seed: int, steps: int) -> tuple[TurnGRPOTrainer, float]:
    """The trainer, and the seconds that its model's warm start took."""
    tokenizer = build_tokenizer()
    name = f"facts-{SHAPE}-{CLEAN_STEPS}-{NOISY_STEPS}-{CALLS}-{QUERIES}-{COPIES}"
    model, warm_s = build_model(tokenizer, name, warm_up)
    trainer = TurnGRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=[*OUTCOME_REWARDS, called],
        turn_reward_funcs=list(TURN_REWARDS),
        credit=credit,
        environment_factory=Search,
        train_dataset=questions(held_out=False),
        eval_dataset=questions(held_out=True),
        args=GRPOConfig(
            output_dir=str(output_dir),
            max_steps=steps,
            per_device_train_batch_size=128,
            per_device_eval_batch_size=HELD_OUT * ANSWERS,
            num_generations=ANSWERS,
            max_completion_length=64,
            max_tool_calling_iterations=1,
            temperature=1.0,
            reward_weights=[1.0] * len(OUTCOME_REWARDS) + [0.0] + [1.0] * len(TURN_REWARDS),
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            beta=0.0,
            seed=seed,
            save_strategy="no",
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
        ),
    )
    return trainer, warm_s
