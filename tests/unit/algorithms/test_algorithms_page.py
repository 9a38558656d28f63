"""What docs/algorithms.md prints: a new algorithm that runs as printed, and tables that agree with the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from async_grpo_experiments.algorithms.protocols import collect
from async_grpo_experiments.algorithms.training import load_policy
from async_grpo_experiments.guidance.offsets import MODES
from async_grpo_experiments.worlds.enumerable import Enumerable, all_sequences, ascents_reward
from async_grpo_experiments.worlds.tiny import endless_transformer, save, words_tokenizer

PAGE = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()


def printed(mark: str) -> str:
    return PAGE.split(f"<!-- {mark} -->\n```python\n")[1].split("```")[0]


def run(text: str) -> dict[str, Any]:
    """What the names of a printed block are, once it has run."""
    names: dict[str, Any] = {"__name__": "printed"}
    exec(compile(text, "docs/algorithms.md", "exec", dont_inherit=True), names)
    return names


@pytest.mark.slow
def test_a_first_training_runs_in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run(printed("the first training"))
    steps = 2 * -(-len(names["rows"].items) // 24)
    assert (names["trained"].folder, names["trained"].steps) == (Path("outputs/qsharp/head"), steps)
    assert names["found"].shape[1] > 2, "something was decoded"


def test_a_new_algorithm_runs_as_it_is_printed(tmp_path: Path) -> None:
    text = printed("a new algorithm")
    assert len([line for line in text.splitlines() if line.strip()]) <= 40
    names = run(text)
    tokenizer = words_tokenizer("abcdefgh")
    reference = save(tmp_path / "reference", endless_transformer(tokenizer), tokenizer)
    keys = {"batch_size": 64, "micro_batch_size": 64, "lr": 3e-3, "max_steps": 30, "num_workers": 0}
    settings = names["BestOfSettings"](reference=reference, gradient_checkpointing=False, **keys)
    best_of, rewards = names["BestOf"](settings), ascents_reward(all_sequences())
    world = Enumerable.of_model(load_policy(reference, settings).eval(), (0,), rewards)
    rows = best_of.rows(collect(best_of.plan(200), lambda cuts: world.answers(cuts, seed=0)))
    trained = best_of.train(rows, out=tmp_path)
    policy = Enumerable.of_model(load_policy(str(trained.folder), settings).eval(), (0,), rewards).reference
    assert world.expected_reward(policy) > world.expected_reward(world.reference) + 0.1


def test_the_table_of_losses_and_modes_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| `(mle|bce|mse|bradley_terry)` \| [^|]* \| ([^|]*) \|", PAGE, re.MULTILINE)
    assert {loss: tuple(re.findall("`([a-z_]+)`", modes)) for loss, modes in rows} == MODES
