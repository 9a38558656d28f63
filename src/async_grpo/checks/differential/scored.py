"""Lines about reward functions: what each was given of every completion, what it returned, and why that differs."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from async_grpo.checks.differential.lines import Line, Status, differs, documented, equal, unknown
from async_grpo.checks.differential.notes import Note
from async_grpo.formatting import counted

Scores = Sequence[float | None]

_TOLERANCE = 1e-6
SCORING = "_calculate_rewards"
_STATE = "trainer_state."
_AT_ISSUE = {f"{_STATE}num_input_tokens_seen", f"{_STATE}total_flos"}  # a job has them without the batch that it is for


def reward_lines(name: str, worker: Sequence[Note], plain: Sequence[Note]) -> Iterator[Line]:
    """Compare the function's inputs, and its values."""
    subject, ours, theirs = f"reward {name}", calls_of(name, worker), calls_of(name, plain)
    if not ours and not theirs:
        yield equal(subject, "a model: its scores are compared below")
        return
    yield _given(subject, ours, theirs)
    probes = {note["what"]: note["values"] for note in plain if note["kind"] == "probe" and note["of"] == name}
    yield _returned(subject, ours, theirs, probes)


def differing_rewards(worker: Sequence[Note], plain: Sequence[Note]) -> list[str]:
    """The functions that returned something else for a completion that both sides gave them."""
    names = dict.fromkeys(note["of"] for note in plain if note["kind"] == "scored")
    return [name for name in names if _differing(_pairs(calls_of(name, worker), calls_of(name, plain)))]


def calls_of(name: str, notes: Sequence[Note]) -> list[Note]:
    return [note for note in notes if note["kind"] == "scored" and note["of"] == name]


def _given(subject: str, ours: Sequence[Note], theirs: Sequence[Note]) -> Line:
    mine, reference = ([item for call in calls for item in call["items"]] for calls in (ours, theirs))
    calls = f"in {counted(len(ours), 'call')} of the worker and {len(theirs)} of TRL"
    if len(mine) != len(reference):
        return differs(subject, f"scored {len(mine)} completions, in plain TRL {len(reference)}, {calls}")
    fields = sorted({field for item in (*mine, *reference) for field in item})
    changed = {field for field in fields if _values(mine, field) != _values(reference, field)}
    same = f"given the same {len(fields)} inputs of {counted(len(mine), 'completion')}"
    if not changed:
        return equal(subject, f"{same}, {calls}")
    if wrong := sorted(changed - _AT_ISSUE):
        return differs(subject, f"given other {', '.join(wrong)}: {_example(wrong[0], mine, reference)}")
    found = f"{same} except {', '.join(sorted(changed))}, {calls}"
    return documented(subject, found, "trainer_state is that of the time when the prompt was issued.")


def _values(items: Sequence[Note], field: str) -> Counter[str]:
    return Counter(item[field][0] if field in item else "" for item in items)


def _example(field: str, mine: Sequence[Note], reference: Sequence[Note]) -> str:
    """The first value of either side that the other has not as often."""
    texts = {item[field][0]: item[field][1] for item in (*mine, *reference) if field in item}
    sides = (_values(mine, field), _values(reference, field))
    ours, theirs = (next(iter((sides[i] - sides[1 - i]).keys()), "") for i in (0, 1))
    return f"{texts.get(ours, 'nothing')} in the worker, {texts.get(theirs, 'nothing')} in plain TRL"


def _returned(subject: str, ours: Sequence[Note], theirs: Sequence[Note], probes: Mapping[str, Scores]) -> Line:
    pairs, total = _pairs(ours, theirs), sum(len(call["items"]) for call in theirs)
    if not pairs:
        return unknown(subject, "what it returned is not compared", "It was given other completions.")
    wrong, elsewhere = _differing(pairs), _read_otherwise(ours, theirs)
    if wrong:
        found = f"returned another value for {len(wrong)} of {total} completions: {wrong[0][0]:g}, in plain TRL "
        return _explained(subject, f"{found}{wrong[0][1]:g}", ours, theirs, probes)
    found = f"returned the same for {len(pairs)} of {counted(total, 'completion')}"
    if elsewhere:
        return documented(subject, found, f"It reads {elsewhere}. In later steps that may matter.")
    if _moves(theirs):
        cause = "It draws random numbers or sets their seed. Each worker has its own, so another run may differ."
        return unknown(subject, found, cause)
    return equal(subject, found)


def _differing(pairs: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The pairs that are not the same, NaN being the same as NaN."""
    near = partial(math.isclose, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    return [pair for pair in pairs if not near(*pair) and not all(map(math.isnan, pair))]


def _pairs(ours: Sequence[Note], theirs: Sequence[Note]) -> list[tuple[float, float]]:
    """The values of equal completions, the worker's first."""
    mine, reference = _by_completion(ours), _by_completion(theirs)
    return [pair for key in reference for pair in zip(mine.get(key, []), reference[key])]


def _by_completion(calls: Sequence[Note]) -> dict[tuple[str, ...], list[float]]:
    """The values of each completion, sorted; several where it was made several times. NaN: None was returned."""
    found: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for call in calls:
        for item, value in zip(call["items"], call["values"]):
            key = tuple(item[name][0] for name in sorted(item) if not name.startswith(_STATE))
            found[key].append(float("nan") if value is None else value)
    return {key: sorted(values) for key, values in found.items()}


def _explained(
    subject: str, found: str, ours: Sequence[Note], theirs: Sequence[Note], probes: Mapping[str, Scores]
) -> Line:
    """The line of a reward that returned something else, with the cause where it is known."""
    if changed := _changed([*ours, *theirs]):
        cause = (
            f"It changes {', '.join(sorted(changed))} when it is called. The worker has a copy of its own, and calls "
            "it with a prompt group where TRL calls it with a batch. Compute a reward from what is given alone."
        )
        return differs(subject, found, cause)
    if elsewhere := _read_otherwise(ours, theirs):
        cause = (
            f"It reads {elsewhere}: what changes it, such as a callback, does so in the server, and the reward is "
            "called in a worker. Take it from trainer_state, or compute it from what is given."
        )
        return differs(subject, found, cause)
    first = probes.get("first", [])
    if first and first != probes["again"]:
        cause = "It returns another value each time for the same input, as what asks a clock or a service does."
        return unknown(subject, found, cause)
    if first and first != probes["otherwise"]:
        cause = "It draws random numbers, and those of a worker are others than those of plain TRL."
        return unknown(subject, found, cause)
    if first and first == ours[0]["values"][: len(first)]:
        cause = "It compares the completions of a call"
        if _moves(theirs):
            cause = "It sets the seed of random numbers and draws them: a value depends on the place in the call"
        calls = "TRL calls it with a batch, a worker with the prompt groups that wait, here one at a time."
        return documented(subject, found, f"{cause}. {calls}")
    return differs(subject, found)


def _changed(calls: Sequence[Note]) -> set[str]:
    return {name for call in calls for name in call["after"] if call["after"][name] != call["before"].get(name)}


def _moves(calls: Sequence[Note]) -> bool:
    """Whether a call of plain TRL, in which nothing else runs meanwhile, changed the state of random numbers."""
    return any(call.get("moved") for call in calls)


def _read_otherwise(ours: Sequence[Note], theirs: Sequence[Note]) -> str:
    """State that one side sees at a call and the other never, and that calls do not change."""
    every = [*ours, *theirs]
    for name in sorted({name for call in every for name in call["before"]} - _changed(every)):
        sides = [{tuple(call["before"].get(name, ("", "nothing"))) for call in calls} for calls in (ours, theirs)]
        if sides[0] != sides[1]:
            mine, reference = (", ".join(sorted(text for _, text in side)) for side in sides)
            return f"{name}, which is {mine} in the worker and {reference} in plain TRL"
    return ""


def score_line(names: Sequence[str], plain: Sequence[Note], explained: Mapping[str, Status]) -> Line:
    """The rewards as the loss gets them, where a model or a method of the user's may have made them."""
    import numpy as np

    notes = [note for note in plain if note["kind"] == "scores"]
    mine, reference = (np.array([row for note in notes for row in note[side]]) for side in ("worker", "plain"))
    if mine.shape != reference.shape:
        return differs("scores", f"{len(mine)} rows, in plain TRL {len(reference)}")
    wrong = ~np.isclose(mine, reference, rtol=1e-4, atol=1e-5, equal_nan=True)
    if not wrong.any():
        return equal("scores", f"the same for {counted(len(mine), 'completion')}")
    row, column = np.argwhere(wrong)[0]
    example = f"{mine[row, column]:g}, in plain TRL {reference[row, column]:g}"
    found = f"{wrong.any(axis=1).sum()} of {len(mine)} differ: {example}; both were trained on those of the run"
    reasons = [explained.get(names[index], Status.EQUAL) for index in np.where(wrong.any(axis=0))[0]]
    if Status.EQUAL not in reasons:
        return Line(max(reasons, key=[*Status].index), "scores", found, "As the lines of the rewards say.")
    probes = [note["values"] for note in plain if note["kind"] == "probe" and note["of"] == SCORING]
    if probes and np.allclose(probes[0], mine[: len(probes[0])], rtol=1e-4, atol=1e-5, equal_nan=True):
        cause = f"{SCORING} is yours, and computes with all completions of a call: a batch in TRL, a group in a worker."
        return documented("scores", found, cause)
    return differs("scores", found)
