"""The lines of `async-grpo check`, from notes that no process has made, and the notes around the user's code."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from async_grpo.checks.differential import called, plain, scored, trained
from async_grpo.checks.differential.check import expected_calls, refuse_unsloth
from async_grpo.checks.differential.checked_trainer import CheckOptions, Facts, user_trainer
from async_grpo.checks.differential.lines import Line, Status, printed, verdict
from async_grpo.checks.differential.notes import PLAIN, SERVER, WORKER, Note, Notes, noted, notes_of
from async_grpo.checks.differential.recorder import recorded_class
from async_grpo.checks.differential.user_code import Noting, around, held_state, items_of, note_rewards_and_tools
from async_grpo.cli import main
from async_grpo.errors import UnsupportedError
from async_grpo.setup import setup_file

FACTS = Facts(
    trainer="GRPOTrainer",
    model="Tiny",
    parameters=1,
    rewards=["right"],
    completions=8,
    group_size=2,
    batches=2,
    precision="float32",
    dropout="",
)


def call(texts: str, *values: float | None, step: int = 0, before: Any = None, after: Any = None, **more: Any) -> Note:
    """One call of the reward `right`, for a completion of each letter."""
    items = [{"completions": noted(text), "trainer_state.global_step": noted(float(step))} for text in texts]
    held = {} if before is None else {"seen": noted(before)}
    left = held if after is None else {"seen": noted(after)}
    return {"kind": "scored", "of": "right", "items": items, "values": [*values], "before": held, "after": left, **more}


def probes(first: list[float], again: list[float], otherwise: list[float]) -> list[Note]:
    values = {"first": first, "again": again, "otherwise": otherwise}
    return [{"kind": "probe", "of": "right", "what": what, "values": each} for what, each in values.items()]


def test_a_reward_that_depends_on_what_it_is_given_alone_is_equal() -> None:
    worker = [call("ab", 1.0, None), call("cd", 0.0, 1.0)]
    given, returned = scored.reward_lines("right", worker, [call("abcd", 1.0, None, 0.0, 1.0)])
    assert (given.status, returned.status) == (Status.EQUAL, Status.EQUAL)
    assert "2 calls of the worker and 1 of TRL" in given.found


def test_an_input_that_differs_is_named_with_both_values() -> None:
    given, returned = scored.reward_lines("right", [call("a", 1.0)], [call("a", 1.0, step=1)])
    assert given.status is Status.DIFFERS
    assert "trainer_state.global_step: 0.0 in the worker, 1.0 in plain TRL" in given.found
    assert returned.status is Status.EQUAL, "the completion is the same, and so is its value"
    fewer, _ = scored.reward_lines("right", [call("ab", 1.0, 1.0)], [call("abcd", *[1.0] * 4)])
    assert fewer.status is Status.DIFFERS and "scored 2 completions, in plain TRL 4" in fewer.found


RETURNED: dict[str, tuple[list[Note], list[Note], Status, str]] = {
    "for other completions": ([call("a", 1.0)], [call("b", 1.0)], Status.UNKNOWN, ""),
    "it counts its calls": (
        [call("ab", 1.0, 1.0, before=0, after=1), call("cd", 2.0, 2.0, before=1, after=2)],
        [call("abcd", *[1.0] * 4, before=0, after=1), *probes([2, 2], [3, 3], [4, 4])],
        Status.DIFFERS,
        "It changes seen when it is called",
    ),
    "a callback changes something in the server alone": (
        [call("a", 0.0, before=0), call("b", 0.0, before=0)],
        [call("a", 0.0, before=0), call("b", 1.0, before=1)],
        Status.DIFFERS,
        "seen, which is 0 in the worker and 0, 1 in plain TRL",
    ),
    "state that made no difference yet": (
        [call("a", 0.0, before=0)],
        [call("a", 0.0, before=1)],
        Status.DOCUMENTED,
        "In later steps that may matter",
    ),
    "it reads the clock": (
        [call("a", 1.0)],
        [call("a", 2.0), *probes([3], [4], [5])],
        Status.UNKNOWN,
        "another value each time",
    ),
    "it draws": ([call("a", 1.0)], [call("a", 2.0), *probes([3], [3], [5])], Status.UNKNOWN, "random numbers"),
    "it draws the same": ([call("a", 1.0)], [call("a", 1.0, moved=["random"])], Status.UNKNOWN, "draws random numbers"),
    "it compares the completions of a call": (
        [call("ab", 0.0, 1.0)],
        [call("ab", 0.5, 0.7), *probes([0, 1], [0, 1], [0, 1])],
        Status.DOCUMENTED,
        "It compares the completions of a call",
    ),
    "it sets the seed in each call": (
        [call("ab", 0.0, 1.0)],
        [call("ab", 0.5, 0.7, moved=["random"]), *probes([0, 1], [0, 1], [0, 1])],
        Status.DOCUMENTED,
        "^It sets the seed of random numbers",
    ),
    "no known reason": ([call("a", 1.0)], [call("a", 2.0), *probes([3], [3], [3])], Status.DIFFERS, "^$"),
}


@pytest.mark.parametrize(("worker", "plain", "status", "cause"), RETURNED.values(), ids=RETURNED)
def test_what_a_reward_returned(worker: list[Note], plain: list[Note], status: Status, cause: str) -> None:
    _, returned = scored.reward_lines("right", worker, plain)
    assert returned.status is status and re.search(cause, returned.cause)


def scores(worker: Any, plain: Any, *more: Note) -> list[Note]:
    return [{"kind": "scores", "worker": worker, "plain": plain}, *more]


def test_scores_differ_as_the_lines_of_the_rewards_say() -> None:
    of = partial(scored.score_line, ["right", "short"], scores([[1.0, 0.0]], [[2.0, 0.0]]))
    assert of({"right": Status.UNKNOWN}).status is Status.UNKNOWN
    assert of({"short": Status.UNKNOWN}).status is Status.DIFFERS


def test_a_scoring_of_the_users_own_is_documented_if_it_gives_the_workers_scores_for_a_group() -> None:
    probe = {"kind": "probe", "of": "_calculate_rewards", "what": "first", "values": [[1.0]]}
    assert scored.score_line(["right"], scores([[1.0]], [[2.0]], probe), {}).status is Status.DOCUMENTED
    assert scored.score_line(["right"], scores([[3.0]], [[2.0]], probe), {}).status is Status.DIFFERS


def method(name: str, size: int, *items: str) -> Note:
    return {"kind": "method", "of": name, "size": size, "items": [noted(item) for item in items]}


@pytest.mark.parametrize("name", ["_generate_single_turn", "compute_loss", "_patched_by_a_library"])
def test_an_override_that_is_not_called_where_it_has_its_effect_differs(name: str) -> None:
    (line,) = called.method_lines([], [], [method(name, 4)])
    assert line.status is Status.DIFFERS and "called for no rows, in plain TRL for 4" in line.found


@pytest.mark.parametrize(
    ("items", "status", "found"), [("ab", Status.EQUAL, ""), ("ac", Status.DIFFERS, "given something else")]
)
def test_an_override_is_counted_by_completions_where_it_has_its_effect(items: str, status: Status, found: str) -> None:
    (line,) = called.method_lines([], [method("_generate", 2, *items)] * 2, [method("_generate", 4, *"abab")])
    assert line.status is status and found in line.found


def test_an_override_that_nobody_calls_has_a_line_too() -> None:
    (line,) = called.method_lines([], [], [{"kind": "methods", "names": ["get_train_dataloader"]}])
    assert line.status is Status.EQUAL and "called by neither" in line.found


def event(name: str, step: int) -> Note:
    return {"kind": "event", "of": "Stopper", "event": name, "step": step}


def test_an_event_that_a_callback_does_not_hear_is_named() -> None:
    heard = [event("on_step_end", 1), event("on_save", 2)]
    (line,) = called.callback_lines(heard[:1], heard)
    assert line.status is Status.DIFFERS and line.found == "without on_save of step 2"
    (line,) = called.callback_lines(heard[::-1], heard)
    assert line.found == "the same events in another order"


def test_a_prompt_that_the_worker_did_not_sample_after_is_shown() -> None:
    line = called.prompt_line([{"kind": "sampled"}], [{"kind": "prompts", "asked": 1, "unknown": ["'a!'"]}])
    assert line.status is Status.DIFFERS and "'a!'" in line.found


def users_trainer(**changes: Any) -> Any:
    callbacks = SimpleNamespace(callbacks=[])
    given = {"rollout_func": None, "reward_func_names": [], "reward_funcs": [], "callback_handler": callbacks}
    return SimpleNamespace(**{**given, "tools": [], "environment_factories": None, **changes})


def test_a_rollout_func_that_samples_by_itself_gives_plain_trl_what_it_gave_the_worker(tmp_path: Path) -> None:
    def rollout_func(prompts: list[str], trainer: Any) -> dict[str, Any]:
        return {"completion_ids": [[len(prompt)] for prompt in prompts], "score": np.arange(2), "turns": 3}

    trainer = users_trainer(rollout_func=rollout_func)
    note_rewards_and_tools(trainer, Notes(tmp_path, WORKER))
    trainer.rollout_func(["a", "a"], trainer)
    trainer.rollout_func(["bb", "bb"], trainer)
    replayed = plain._recorded_rollouts(notes_of(tmp_path, WORKER))
    given = {"completion_ids": [[1], [2], [1]], "score": [0, 0, 1], "turns": [3, 3, 3]}
    assert replayed(["a", "bb", "a"], None) == given
    with pytest.raises(UnsupportedError, match="no completion of 'c'"):
        replayed(["c"], None)
    made = notes_of(tmp_path, WORKER)
    assert called.prompt_line(made, made).status is Status.EQUAL
    assert called.prompt_line(made, made[:1]).status is Status.DIFFERS


def test_a_setting_of_sampling_that_changes_in_the_server_alone_differs() -> None:
    worker = [{"kind": "setting", "of": "temperature", "value": noted(1.0)}]
    line = called.sampling_line(worker, [*worker, {"kind": "setting", "of": "temperature", "value": noted(0.5)}])
    assert line.status is Status.DIFFERS and "1.0 in the worker, 1.0 then 0.5 in plain TRL" in line.found


def test_tools_are_compared_whatever_their_order() -> None:
    calls = [{"kind": "tool", "of": "look", "given": noted(q), "returned": noted(a)} for q, a in (("x", 1), ("y", 2))]
    (line,) = called.tool_lines(calls, calls[::-1])
    assert line.status is Status.EQUAL
    (line,) = called.tool_lines(calls, [calls[0], {**calls[1], "returned": noted(3)}])
    assert line.status is Status.DIFFERS and "returned something else" in line.found


def write(folder: Path, names: list[str]) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def test_files_of_ours_are_documented_and_missing_ones_differ(tmp_path: Path) -> None:
    reference = write(tmp_path / "plain", ["checkpoint-2/model", "README.md"])
    ours = write(tmp_path / "run", ["checkpoint-2/model", "checkpoint-2/rollout_state.json", "README.md"])
    assert called.file_line(ours, reference).status is Status.DOCUMENTED
    (ours / "README.md").unlink()
    assert called.file_line(ours, reference).found.startswith("missing: README.md")


def trained_as(folder: Path, role: str, **changes: Any) -> None:
    """Notes of one step on two tokens."""
    notes = Notes(folder, role)
    numbers = {"loss": 0.5, "grad": 1.0, "kl": 0.1, "logprob": -1.0, "old": -1.0, "advantage": 1.0, **changes}
    batch = {"completion_mask": torch.ones(1, 2), "advantages": torch.tensor([numbers["advantage"]])}
    batch["logprobs"] = torch.full((1, 2), numbers["logprob"])
    if role == SERVER:
        batch |= {"old_per_token_logps": torch.full((1, 2), numbers["old"]), "policy_version": torch.zeros(1)}
    notes.add_batch(batch)
    notes.add("loss", step=1, numbers={"loss": numbers["loss"]})
    for kind in ("gradient", "weights"):
        notes.add(kind, numbers={"head": numbers["grad"]})
    notes.add("log", step=1, numbers={"kl": numbers["kl"], **({"async/age": 0.0} if role == SERVER else {})})


def compared(folder: Path, facts: Facts = FACTS) -> dict[str, Line]:
    found = trained.trained_lines(folder, facts, notes_of(folder, SERVER), notes_of(folder, PLAIN))
    return {line.subject: line for line in found}


def statuses(folder: Path, facts: Facts = FACTS, **changes: Any) -> dict[str, Status]:
    trained_as(folder, SERVER, **changes)
    trained_as(folder, PLAIN)
    return {subject: line.status for subject, line in compared(folder, facts).items()}


@pytest.mark.parametrize(
    "changed, subjects",
    [
        ({"loss": 0.6}, {"losses"}),
        ({"loss": float("nan")}, {"losses"}),
        ({"grad": 1.1}, {"gradients", "weights"}),
        ({"logprob": float("nan"), "old": -1.0}, {"log-probs", "sampler"}),
        ({"kl": 0.2}, {"metrics"}),
        ({"logprob": -1.1, "old": -1.1}, {"log-probs"}),
        ({"old": -1.1}, {"sampler"}),
        ({"advantage": 2.0}, {"batches"}),
    ],
)
def test_one_number_that_differs_is_one_line(tmp_path: Path, changed: dict[str, float], subjects: set[str]) -> None:
    found = statuses(tmp_path, **changed)
    assert {subject for subject, status in found.items() if status is not Status.EQUAL} == subjects
    assert {found[subject] for subject in subjects} == {Status.DIFFERS}


def test_batches_in_another_order_are_said_to_be_that_and_a_reward_that_sets_the_seed_is_named(tmp_path: Path) -> None:
    """As `set_seed` in a reward function does: in a run, it sets that of the worker."""

    def reseeding(completions: list[str], **kwargs: Any) -> list[float]:
        torch.manual_seed(0)
        return torch.rand(len(completions)).tolist()

    ids, notes = torch.tensor([[1, 2], [3, 4]]), Notes(tmp_path, PLAIN)
    for role, rows in ((SERVER, ids.flip(0)), (PLAIN, ids)):
        Notes(tmp_path, role).add_batch({"completion_ids": rows})
    batches = next(iter(trained.trained_lines(tmp_path, FACTS, [], [])))
    assert batches.status is Status.DIFFERS and batches.found == "the same completions in another order"
    trainer = users_trainer(reward_func_names=["reseeding"], reward_funcs=[reseeding])
    note_rewards_and_tools(trainer, notes)
    trainer.reward_funcs[0](completions=["a", "b"])
    batches = next(iter(trained.trained_lines(tmp_path, FACTS, [], notes_of(tmp_path, PLAIN))))
    assert batches.cause.startswith("reseeding sets torch's seed or draws from it.")


def test_what_dropout_changes_is_documented_but_not_the_batch(tmp_path: Path) -> None:
    facts = dataclasses.replace(FACTS, dropout="Dropout.")
    found = statuses(tmp_path, facts, loss=0.6, old=-2.0, advantage=2.0)
    assert (found["losses"], found["sampler"]) == (Status.DOCUMENTED, Status.DOCUMENTED)
    assert found["batches"] is Status.DIFFERS


class Drawing:
    """A trainer whose model draws a random number for each piece that is computed."""

    state = SimpleNamespace(global_step=0)

    def compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], pieces: int) -> torch.Tensor:
        return self._get_per_token_logps_and_entropies(pieces)[0].sum()

    def _get_per_token_logps_and_entropies(self, pieces: int) -> tuple[torch.Tensor, ...]:
        return (torch.stack([torch.rand(2) for _ in range(pieces)]),)


@pytest.mark.parametrize(("pieces", "status"), [(2, Status.EQUAL), (3, Status.DOCUMENTED)])
def test_what_the_model_draws_shuffles_no_batch_and_is_documented(pieces: int, status: Status, tmp_path: Path) -> None:
    shuffled = []
    for role, count in ((SERVER, pieces), (PLAIN, 2)):
        torch.manual_seed(0)
        trainer = recorded_class(Drawing, Notes(tmp_path, role))()
        for _ in range(2):
            trainer._get_per_token_logps_and_entropies(count)
            shuffled.append(torch.randperm(9).tolist())
            trainer.compute_loss(SimpleNamespace(training=True), {"completion_ids": torch.ones(1, 2)}, count)
    assert shuffled[:2] == shuffled[2:]
    losses = [[note["numbers"] for note in notes_of(tmp_path, role)] for role in (SERVER, PLAIN)]
    assert len({note["loss"] for note in losses[1]}) == 2, "other numbers in each pass"
    batches = next(iter(trained.trained_lines(tmp_path, FACTS, notes_of(tmp_path, SERVER), notes_of(tmp_path, PLAIN))))
    assert (batches.status, "dropout draws" in batches.cause) == (status, status is Status.DOCUMENTED)


def dealt(folder: Path, role: str, rows: list[int], **changes: Any) -> None:
    """Notes of one step of two micro-batches of two rows; each row has its number as its ids, and so as its loss."""
    notes = Notes(folder, role)
    for part in (rows[:2], rows[2:]):
        numbers = torch.tensor(part)[:, None]
        batch = {"prompt_ids": numbers, "completion_ids": numbers.expand(2, 3), "completion_mask": torch.ones(2, 3)}
        batch |= {"advantages": numbers[:, 0].float(), "num_items_in_batch": torch.tensor(12)}
        batch["logprobs"] = -numbers.expand(2, 3).float()
        notes.add_batch(batch)
        notes.add("loss", step=1, numbers={"loss": float(sum(part)) + changes.get("loss", 0.0)})
    for kind in ("gradient", "weights"):
        notes.add(kind, numbers={"head": changes.get("grad", 1.0)})
    notes.add("log", step=1, numbers={"reward": 1.0, "entropy": float(rows[0]), "clip_ratio/low_mean": float(rows[0])})
    notes.add("padding", computed=changes.get("computed", 16), exchanging=2)


def test_rows_that_were_dealt_to_the_micro_batches_of_a_step_are_a_documented_difference(tmp_path: Path) -> None:
    dealt(tmp_path, SERVER, [4, 2, 3, 1], computed=12)
    dealt(tmp_path, PLAIN, [1, 2, 3, 4])
    found = compared(tmp_path)
    padding = found.pop("padding")
    assert padding.status is Status.DOCUMENTED
    assert {line.status for subject, line in found.items() if subject != "sampler"} == {Status.EQUAL}
    assert padding.found.startswith("computed in pieces without it: 12 tokens, in plain TRL 16; log-probs at most 0 ")
    assert "gradients: norms of 1 parameters" in padding.found and "entropy" in padding.cause


@pytest.mark.parametrize(
    ("rows", "changed", "subject"),
    [
        ([4, 2, 3, 5], {}, "batches"),
        ([4, 2, 3, 1], {"loss": 0.1}, "losses"),
        ([4, 2, 3, 1], {"grad": 1.1}, "gradients"),
    ],
)
def test_what_is_wrong_is_seen_where_rows_were_dealt(
    rows: list[int], changed: dict[str, float], subject: str, tmp_path: Path
) -> None:
    dealt(tmp_path, SERVER, rows, **changed)
    dealt(tmp_path, PLAIN, [1, 2, 3, 4])
    assert compared(tmp_path)[subject].status is Status.DIFFERS


# --- Notes around the user's code ---------------------------------------------------------------------------

seen = 0


def helper() -> int:
    return seen


def test_state_is_seen_in_globals_of_helpers_closures_objects_and_attributes() -> None:
    kept = [1]

    def reads(completions: list[str]) -> list[float]:
        return [float(helper() + len(kept))]

    class Counter:
        def __init__(self) -> None:
            self.calls = 3

        def __call__(self, completions: list[str]) -> list[float]:
            return [float(self.calls)]

    reads.marked = True  # type: ignore[attr-defined]
    texts = {name: text for name, (_, text) in held_state(reads).items()}
    assert texts == {"reads.marked": "True", "seen": "0", "kept": "[1]"}
    assert held_state(Counter())["Counter.calls"] == noted(3)
    assert held_state(Counter().__call__) == held_state(partial(Counter()))


def test_a_function_is_replaced_by_one_of_its_kind_with_its_attributes() -> None:
    ended: list[Any] = []

    def noting(args: Any, kwargs: Any) -> Noting:
        ended.append((yield))

    async def later(x: int) -> int:
        return x + 1

    def fails() -> None:
        raise KeyError("no")

    later.thread_safe = True  # type: ignore[attr-defined]
    wrapped: Any = around(later, noting)
    assert wrapped.thread_safe and asyncio.run(wrapped(1)) == 2
    with pytest.raises(KeyError):
        around(fails, noting)()
    assert ended[0] == 2 and isinstance(ended[1], KeyError)


def test_rewards_of_one_name_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = SimpleNamespace(world_size=1, save_strategy="no")
    trainer = SimpleNamespace(args=args, reward_func_names=["reward", "reward"])
    monkeypatch.setattr(setup_file, "load_trainer", lambda *_: trainer)
    assert user_trainer(CheckOptions(config="mine.py", device="cpu", seed=0), tmp_path) is trainer
    assert trainer.reward_func_names == ["reward", "reward (2)"]


def test_a_call_of_a_reward_that_fails_is_not_counted(tmp_path: Path) -> None:
    """A worker repeats it, in the main thread where it wants to handle signals."""
    answers: list[Any] = [ValueError("signal only works in main thread"), [1.0]]

    def reward(completions: list[str], **_: Any) -> list[float]:
        if isinstance(answer := answers.pop(0), ValueError):
            raise answer
        return answer

    trainer = users_trainer(reward_func_names=["reward"], reward_funcs=[reward])
    note_rewards_and_tools(trainer, Notes(tmp_path, PLAIN))
    with pytest.raises(ValueError):
        trainer.reward_funcs[0](completions=["a"])
    assert trainer.reward_funcs[0](completions=["a"]) == [1.0]
    assert [note["values"] for note in scored.calls_of("reward", notes_of(tmp_path, PLAIN))] == [[1.0]]


def test_what_a_reward_is_given_is_noted_of_each_completion() -> None:
    first, second = items_of({"completions": ["a", "b"], "answer": [1, 2], "margin": 0.5, "log_metric": print})
    assert first["answer"] != second["answer"] and first["margin"] == second["margin"] and "log_metric" not in first


@pytest.mark.parametrize(
    "one, other",
    [({"a": 1, "b": 2}, {"b": 2, "a": 1}), ({1, 2}, {2, 1}), (np.arange(3), np.arange(3)), (object(), object())],
)
def test_equal_values_have_equal_digests_in_every_process(one: Any, other: Any) -> None:
    assert noted(one)[0] == noted(other)[0]


# --- The command -------------------------------------------------------------------------------------------


def test_the_cost_of_rewards_is_said_by_side() -> None:
    said = expected_calls(FACTS)
    assert "score 8 completions in a run (4 calls) and the same 8 in plain TRL (2 calls)" in said


@pytest.mark.parametrize(
    ("module", "side"), [("async_grpo.cli", "The run at staleness 0"), (plain.__name__, "Plain TRL")]
)
def test_a_side_that_fails_is_exit_2_with_its_last_sentence(
    module: str, side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python, file, written = (tmp_path / name for name in ("python", "mine.py", "lines.json"))
    facts = json.dumps(dataclasses.asdict(FACTS))
    fails = f"[ $2 = {module} ] && echo 'ValueError: one short' && exit 3"
    python.write_text(f"#!/bin/sh\n{fails}\ncd ${{4%/*}} && echo '{facts}' > new && mv new facts.json\n")
    python.chmod(0o700)
    file.write_text("def get_trainer(): ...\n")
    monkeypatch.setattr(sys, "executable", str(python))
    assert main(["check", str(file), "--tiny", "--json", str(written)]) == 2
    said = f"{side} ended with exit code 3, so there is nothing to compare: ValueError: one short"
    assert json.loads(written.read_text()) == {"ok": False, "error": said, "lines": []}
    assert f"error: {said}" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["import unsloth", "from unsloth import FastLanguageModel"])
def test_unsloth_is_refused_before_anything_starts(tmp_path: Path, line: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"def get_trainer():\n    {line}\n")
    with pytest.raises(UnsupportedError, match="Unsloth"):
        refuse_unsloth(file)


def test_the_verdict_counts_and_a_line_shows_its_cause() -> None:
    found = [Line(Status.DIFFERS, "losses", "0.1 apart", "Because."), Line(Status.EQUAL, "files", "the same 3")]
    assert verdict(found).startswith("1 difference from plain TRL")
    assert verdict(found[1:]).startswith("no difference from plain TRL at staleness 0")
    assert printed(found[0]).splitlines()[1].strip() == "-> Because."
