"""Lines about what is called besides rewards: sampling, tools, callbacks, overrides; and about the files."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from async_grpo.checks.differential.lines import Line, Status, equal
from async_grpo.checks.differential.notes import Note
from async_grpo.formatting import counted
from async_grpo.setup.overrides import HONOURED

_SHOWN = 3
_SAMPLES, _SCORES, _ASSEMBLES, _PROMPTS = (
    HONOURED[name] for name in ("_generate", "_calculate_rewards", "_generate_and_score_completions", "num_examples")
)
_OURS = ("rollout_", "_async_grpo")  # how the names of our files in an output_dir begin


def prompt_line(worker: Sequence[Note], plain: Sequence[Note]) -> Line:
    """Whether plain TRL wants completions of what the worker sampled."""
    sampled = sum(note["kind"] == "sampled" for note in worker)
    asked = [note for note in plain if note["kind"] == "prompts"]
    unknown = [text for note in asked for text in note["unknown"]]
    count = sum(note["asked"] for note in asked)
    if unknown:
        found = f"{len(unknown)} of {count} prompts in plain TRL are none that the worker sampled after: {unknown[0]}"
        return Line(Status.DIFFERS, "prompts", found, "What comes after this line differs for that reason.")
    rollouts = [Counter(p for n in notes if n["kind"] == "rollouts" for p in n["prompts"]) for notes in (worker, plain)]
    if count == 0 and sampled == 0 and rollouts[0]:
        if rollouts[0] == rollouts[1]:
            return equal("prompts", f"the same for rollout_func, {counted(rollouts[0].total(), 'completion')}")
        return Line(Status.DIFFERS, "prompts", "rollout_func was given others than in plain TRL")
    if count == 0 and sampled == 0:
        return Line(Status.UNKNOWN, "prompts", "not compared", "The file samples by itself, without TRL's generation.")
    if count != sampled:
        return Line(Status.DIFFERS, "prompts", f"the worker sampled {sampled} times, plain TRL asks {count} times")
    return equal("prompts", f"the same tokens before each of {counted(count, 'turn')}")


def sampling_line(worker: Sequence[Note], plain: Sequence[Note]) -> Line:
    """With which settings the worker samples, and TRL would."""
    ours, theirs = _settings(worker), _settings(plain)
    wrong = [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
    if not theirs or not ours:
        return Line(Status.UNKNOWN, "sampling", "not compared", "The file samples by itself.")
    if not wrong:
        return equal("sampling", f"the same {len(theirs)} settings at each batch")
    name = wrong[0]
    found = (
        f"{', '.join(wrong)}: {_texts(ours.get(name, {}))} in the worker, {_texts(theirs.get(name, {}))} in plain TRL"
    )
    return Line(Status.DIFFERS, "sampling", found, "What changes it while it trains does so in the server only.")


def _settings(notes: Sequence[Note]) -> dict[str, dict[str, str]]:
    """By name, the values that it had: digest and text."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for note in notes:
        if note["kind"] == "setting":
            found[note["of"]][note["value"][0]] = note["value"][1]
    return found


def _texts(values: dict[str, str]) -> str:
    return " then ".join(values.values()) or "nothing"


def tool_lines(worker: Sequence[Note], plain: Sequence[Note]) -> Iterator[Line]:
    """What each tool was given, how often, and what it returned."""
    ours, theirs = _by_name("tool", worker), _by_name("tool", plain)
    for name in sorted(ours.keys() | theirs.keys()):
        mine, reference, subject = ours[name], theirs[name], f"tool {name}"
        given, returned = (
            [Counter(note[what][0] for note in side) for side in (mine, reference)] for what in ("given", "returned")
        )
        calls = counted(len(reference), "call")
        if len(mine) != len(reference):
            yield Line(Status.DIFFERS, subject, f"called {len(mine)} times, in plain TRL {len(reference)} times")
        elif given[0] != given[1]:
            yield Line(Status.DIFFERS, subject, f"given other arguments in {calls}")
        elif returned[0] != returned[1]:
            yield Line(Status.DIFFERS, subject, f"returned something else in {calls} with the same arguments")
        else:
            yield equal(subject, f"given and returned the same in {calls}")


def _by_name(kind: str, notes: Sequence[Note]) -> dict[str, list[Note]]:
    found: dict[str, list[Note]] = defaultdict(list)
    for note in notes:
        if note["kind"] == kind:
            found[note["of"]].append(note)
    return found


def callback_lines(server: Sequence[Note], plain: Sequence[Note]) -> Iterator[Line]:
    """Which events of which step each callback heard, in their order."""
    ours, theirs = _by_name("event", server), _by_name("event", plain)
    for name in sorted(ours.keys() | theirs.keys()):
        mine, reference = ([(note["event"], note["step"]) for note in side[name]] for side in (ours, theirs))
        subject = f"callback {name}"
        if mine == reference:
            yield equal(subject, f"the same {counted(len(reference), 'event')} in the same order")
            continue
        missing, more = Counter(reference) - Counter(mine), Counter(mine) - Counter(reference)
        parts = [f"{what} {_some(list(events))}" for what, events in (("without", missing), ("with", more)) if events]
        yield Line(Status.DIFFERS, subject, ", ".join(parts) or "the same events in another order")


def _some(items: Sequence[tuple[str, int]]) -> str:
    texts = [f"{name} of step {step}" for name, step in items[:_SHOWN]]
    return ", ".join([*texts, *(["…"] if len(items) > _SHOWN else [])])


def method_lines(server: Sequence[Note], worker: Sequence[Note], plain: Sequence[Note]) -> Iterator[Line]:
    """How often each override or patch of a method of TRL's was called, per completion, and with which."""
    sides = [_by_name("method", notes) for notes in (server, worker, plain)]
    known = {name for note in plain if note["kind"] == "methods" for name in note["names"]}
    for name in sorted(known.union(*sides)):
        of_server, of_worker, of_trl = (side[name] for side in sides)
        yield _method(name, of_server, of_worker, of_trl)


def _method(name: str, server: Sequence[Note], worker: Sequence[Note], plain: Sequence[Note]) -> Line:
    subject, effect = f"override {name}", HONOURED.get(name, "")
    if not (server or worker or plain):
        return equal(subject, "called by neither once the training has begun")
    in_worker = effect in (_SAMPLES, _SCORES)
    ours = worker if in_worker else server
    mine, reference = (sum(note["size"] for note in side) for side in (ours, plain))
    found = f"called for {counted(mine, 'row')}, in plain TRL for {reference}"
    if mine != reference:
        documented = effect == _PROMPTS and mine > 0
        cause = (
            "The server draws the prompts itself, in the order of TRL."
            if documented
            else f"It {effect or 'is unknown'}."
        )
        return Line(Status.DOCUMENTED if documented else Status.DIFFERS, subject, found, cause)
    items = [Counter(item[0] for note in side for item in note["items"]) for side in (ours, plain)]
    if items[0] != items[1]:
        return Line(Status.DIFFERS, subject, f"{found}, and given something else")
    calls = f"{counted(len(ours), 'call')}, in plain TRL {len(plain)}"
    if effect == _SCORES and len(ours) != len(plain):
        return Line(
            Status.DOCUMENTED, subject, f"{found}; {calls}", "It sees a prompt group where TRL gives it a batch."
        )
    if effect == _ASSEMBLES and worker:
        return Line(Status.DOCUMENTED, subject, f"{found}; also {len(worker)} times in the worker", f"It {effect}.")
    return equal(subject, f"{found}; {calls}")


def file_line(ours: Path, theirs: Path) -> Line:
    """Which files the trainer has written."""
    mine, reference = _files(ours), _files(theirs)
    missing, more = sorted(reference - mine), sorted(mine - reference)
    added = [name for name in more if name.rpartition("/")[2].startswith(_OURS)]
    if missing or more != added:
        parts = [f"{what}: {', '.join(names)}" for what, names in (("missing", missing), ("more", more)) if names]
        return Line(Status.DIFFERS, "files", "; ".join(parts))
    if added:
        return Line(
            Status.DOCUMENTED,
            "files",
            f"the same {len(reference)}, and {', '.join(added)}",
            "A run adds them, to be resumed from.",
        )
    return equal("files", f"the same {len(reference)}")


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
