"""Lines about what is called besides rewards: sampling, tools, callbacks, overrides; and about the files."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from async_grpo.checks.differential.lines import Line, differs, documented, equal, unknown
from async_grpo.checks.differential.notes import Note
from async_grpo.formatting import counted
from async_grpo.setup.overrides import HONOURED

_SHOWN = 3
_SAMPLES, _SCORES, _ASSEMBLES, _PROMPTS = (
    HONOURED[name] for name in ("_generate", "_calculate_rewards", "_generate_and_score_completions", "num_examples")
)
_OURS = ("rollout_", "_async_grpo")  # how the names of our files in an output_dir begin


def prompt_line(worker: Sequence[Note], plain: Sequence[Note]) -> Line:
    """Compare the prompts that plain TRL wants completions of with those that the worker sampled after."""
    sampled = sum(note["kind"] == "sampled" for note in worker)
    asked = [note for note in plain if note["kind"] == "prompts"]
    lost, count = [text for note in asked for text in note["unknown"]], sum(note["asked"] for note in asked)
    if lost:
        found = f"{len(lost)} of {count} prompts in plain TRL are none that the worker sampled after: {lost[0]}"
        return differs("prompts", found, "What comes after this line differs for that reason.")
    if count != sampled:
        return differs("prompts", f"the worker sampled {sampled} times, plain TRL asks {count} times")
    if count:
        return equal("prompts", f"the same tokens before each of {counted(count, 'turn')}")
    ours, theirs = (
        Counter(prompt for note in notes if note["kind"] == "rollouts" for prompt in note["prompts"])
        for notes in (worker, plain)
    )
    if not ours:
        return unknown("prompts", "not compared", "The file samples by itself, without TRL's generation.")
    if ours != theirs:
        return differs("prompts", "rollout_func was given others than in plain TRL")
    return equal("prompts", f"the same for rollout_func, {counted(ours.total(), 'completion')}")


def sampling_line(worker: Sequence[Note], plain: Sequence[Note]) -> Line:
    """Compare the settings that the worker samples with and those that TRL would."""
    ours, theirs = (  # by name, the values that it had: digest -> text
        {name: dict(note["value"] for note in found) for name, found in _by_name("setting", notes).items()}
        for notes in (worker, plain)
    )
    if not theirs or not ours:
        return unknown("sampling", "not compared", "The file samples by itself.")
    wrong = [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
    if not wrong:
        return equal("sampling", f"the same {len(theirs)} settings at each batch")
    mine, reference = (" then ".join(side.get(wrong[0], {}).values()) or "nothing" for side in (ours, theirs))
    found = f"{', '.join(wrong)}: {mine} in the worker, {reference} in plain TRL"
    return differs("sampling", found, "What changes it while it trains does so in the server only.")


def tool_lines(worker: Sequence[Note], plain: Sequence[Note]) -> Iterator[Line]:
    """Compare each tool's arguments, its number of calls, and its answers."""
    ours, theirs = _by_name("tool", worker), _by_name("tool", plain)
    for name in sorted(ours.keys() | theirs.keys()):
        mine, reference, subject = ours[name], theirs[name], f"tool {name}"
        given, returned = (
            {tuple(sorted(note[what][0] for note in side)) for side in (mine, reference)}
            for what in ("given", "returned")
        )
        calls = counted(len(reference), "call")
        if len(mine) != len(reference):
            yield differs(subject, f"called {len(mine)} times, in plain TRL {len(reference)} times")
        elif len(given) > 1:
            yield differs(subject, f"given other arguments in {calls}")
        elif len(returned) > 1:
            yield differs(subject, f"returned something else in {calls} with the same arguments")
        else:
            yield equal(subject, f"given and returned the same in {calls}")


def _by_name(kind: str, notes: Sequence[Note]) -> dict[str, list[Note]]:
    found: dict[str, list[Note]] = defaultdict(list)
    for note in notes:
        if note["kind"] == kind:
            found[note["of"]].append(note)
    return found


def callback_lines(server: Sequence[Note], plain: Sequence[Note]) -> Iterator[Line]:
    """Compare the events that each callback heard, with their steps and in their order."""
    ours, theirs = _by_name("event", server), _by_name("event", plain)
    for name in sorted(ours.keys() | theirs.keys()):
        mine, reference = ([f"{it['event']} of step {it['step']}" for it in side[name]] for side in (ours, theirs))
        subject = f"callback {name}"
        if mine == reference:
            yield equal(subject, f"the same {counted(len(reference), 'event')} in the same order")
        else:
            apart = told_apart(Counter(mine), Counter(reference))
            yield differs(subject, apart or "the same events in another order")


def told_apart(mine: Counter[str], reference: Counter[str]) -> str:
    """`without a, b, with c`: the items that one side has more often than the other."""
    sides = {"without": [*(reference - mine)], "with": [*(mine - reference)]}
    return ", ".join(
        f"{what} {', '.join([*found[:_SHOWN], *(['…'] if len(found) > _SHOWN else [])])}"
        for what, found in sides.items()
        if found
    )


def method_lines(server: Sequence[Note], worker: Sequence[Note], plain: Sequence[Note]) -> Iterator[Line]:
    """Compare for which completions each override or patch of a method of TRL's was called."""
    sides = [_by_name("method", notes) for notes in (server, worker, plain)]
    known = {name for note in plain if note["kind"] == "methods" for name in note["names"]}
    for name in sorted(known.union(*sides)):
        yield _method(name, *(side[name] for side in sides))


def _method(name: str, server: Sequence[Note], worker: Sequence[Note], plain: Sequence[Note]) -> Line:
    subject, effect = f"override {name}", HONOURED.get(name, "")
    if not (server or worker or plain):
        return equal(subject, "called by neither once the training has begun")
    ours = worker if effect in (_SAMPLES, _SCORES) else server
    mine, reference = (sum(note["size"] for note in side) for side in (ours, plain))
    found = f"called for {counted(mine, 'row')}, in plain TRL for {reference}"
    if mine != reference:
        if effect == _PROMPTS and mine > 0:
            return documented(subject, found, "The server draws the prompts itself, in the order of TRL.")
        return differs(subject, found, f"It {effect or 'is unknown'}.")
    items = [Counter(item[0] for note in side for item in note["items"]) for side in (ours, plain)]
    if items[0] != items[1]:
        return differs(subject, f"{found}, and given something else")
    if effect == _ASSEMBLES and worker:
        return documented(subject, f"{found}; also {len(worker)} times in the worker", f"It {effect}.")
    found = f"{found}; {counted(len(ours), 'call')}, in plain TRL {len(plain)}"
    if effect == _SCORES and len(ours) != len(plain):
        return documented(subject, found, "It sees a prompt group where TRL gives it a batch.")
    return equal(subject, found)


def file_line(ours: Path, theirs: Path) -> Line:
    """Compare the files that the trainer has written."""
    mine, reference = (
        {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} for folder in (ours, theirs)
    )
    missing, more = sorted(reference - mine), sorted(mine - reference)
    if missing or not all(name.rpartition("/")[2].startswith(_OURS) for name in more):
        parts = [f"{what}: {', '.join(names)}" for what, names in (("missing", missing), ("more", more)) if names]
        return differs("files", "; ".join(parts))
    found = f"the same {len(reference)}"
    if more:
        return documented("files", f"{found}, and {', '.join(more)}", "A run adds them, to be resumed from.")
    return equal("files", found)
