"""Lines about what is trained on and what comes of it: batches, log-probabilities, losses, gradients, metrics."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from async_grpo.checks.differential.called import told_apart
from async_grpo.checks.differential.checked_trainer import Facts
from async_grpo.checks.differential.lines import Line, Status, differs, documented, equal, unknown
from async_grpo.checks.differential.notes import PLAIN, SERVER, Note, batches_of

_SAMPLER = "old_per_token_logps"
_OURS = {_SAMPLER, "sampling_per_token_logps", "importance_sampling_ratio", "policy_version", "is_long"}
_LOGPROBS = "logprobs"
_TIMES = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second")
_OF_MICRO_BATCHES = ("entropy", "kl", "clip_ratio/", "cispo_clip_ratio", "vespo/")  # TRL's means over them
_NOT_COMPARED = ("async/", "timing_s/", "perf/")  # ours, and speeds of a critic's trainer
_SAMPLER_BOUND, _SAMPLER_BOUND_HALF = 0.02, 0.5  # nats a token, on average
_TOLERANCE, _TOLERANCE_HALF = 1e-4, 5e-2
_TOKENS = ("completion_mask", "tool_mask")
_SHUFFLED = (
    "On a CPU, dropout draws from the numbers that TRL shuffles a batch by, and a run draws others for it: rows are "
    "computed in other pieces, and old log-probabilities are not, where the sampler's take their place. So the order "
    "is not that of TRL. Here dropout had numbers of its own, so that the rest could be compared."
)
Batch = Mapping[str, Any]
Step = Mapping[str, float]


def trained_lines(scratch: Path, facts: Facts, server: Sequence[Note], plain: Sequence[Note]) -> Iterator[Line]:
    """One line for each subject. A model with dropout makes other numbers, and that is documented."""
    padding = next((note for note in server if note["kind"] == "padding"), None)
    count = 1 if padding is None else padding["exchanging"]
    ours, theirs = (_of_steps([*batches_of(scratch, role)], count) for role in (SERVER, PLAIN))
    is_whole = facts.precision == "float32"
    tolerance = _TOLERANCE if is_whole else _TOLERANCE_HALF
    shuffling = {note["of"] for note in plain if note["kind"] == "scored" and "torch" in note.get("moved", ())}
    batches = _batches(ours, theirs, sorted(shuffling))
    drawn = [[note.get("drawn") for note in of if note["kind"] == "loss"] for of in (server, plain)]
    is_shuffled = batches.status is Status.EQUAL and drawn[0] != drawn[1]
    yield documented(batches.subject, batches.found, _SHUFFLED) if is_shuffled else batches
    numbers = [
        _sampler(ours, _SAMPLER_BOUND if is_whole else _SAMPLER_BOUND_HALF),
        _logprobs(ours, theirs, tolerance),
        *(_numbers(subject, server, plain, tolerance, count) for subject in _STEPS),
    ]
    for line in numbers:
        dropped = facts.dropout and line.status is Status.DIFFERS
        yield documented(line.subject, line.found, facts.dropout) if dropped else line
    whole = sum(batch[name].size for batch in theirs for name in ("prompt_ids", "completion_ids") if name in batch)
    if padding is not None and (padding["computed"] < whole or count > 1):
        yield _padding(padding, whole, {line.subject: line.found for line in numbers})


def _padding(padding: Note, whole: int, found: Mapping[str, str]) -> Line:
    apart = f"log-probs {found['log-probs']}; gradients: {found['gradients']}"
    cause = ""
    if padding["exchanging"] > 1:
        cause = (
            f"Rows have changed places among the {padding['exchanging']} micro-batches of a step, so what TRL averages "
            "over micro-batches was not compared: entropy, KL and clipped shares. --padding trl leaves them in place."
        )
    tokens = f"{padding['computed']:,} tokens, in plain TRL {whole:,}"
    return documented("padding", f"computed in pieces without it: {tokens}; {apart}", cause)


def _of_steps(batches: Sequence[Batch], count: int) -> list[Batch]:
    """The rows of each `count` micro-batches together, in an order that does not depend on how they were dealt."""
    if count == 1:
        return list(batches)
    found: list[Batch] = []
    for start in range(0, len(batches), count):
        parts = batches[start : start + count]
        whole = {name: np.concatenate([np.atleast_1d(part[name]) for part in parts]) for name in parts[0]}
        rows = [row.tobytes() for row in np.concatenate([whole["prompt_ids"], whole["completion_ids"]], axis=1)]
        order = sorted(range(len(rows)), key=rows.__getitem__)
        found.append({name: it[order] if len(it) == len(rows) else it for name, it in whole.items()})
    return found


def _batches(ours: Sequence[Batch], theirs: Sequence[Batch], shuffling: Sequence[str]) -> Line:
    """Args: shuffling: rewards that move torch's random numbers, from which TRL draws the order of a batch."""
    if len(ours) != len(theirs) or not ours:
        return differs("batches", f"{len(ours)} were trained on, in plain TRL {len(theirs)}")
    names = {name for batch in theirs for name in batch} - {_LOGPROBS, *_OURS}
    added = {name for batch in ours for name in batch} - names - {_LOGPROBS, *_OURS}
    wrong = [name for name in sorted(names) if not all(_same(a.get(name), b[name]) for a, b in zip(ours, theirs))]
    wrong += sorted(added)
    if wrong and all(map(_same_rows, ours, theirs)):
        cause = "Random numbers were drawn in another order, such as by a dataloader of yours, which the server opens."
        if shuffling:
            cause = (
                f"{', '.join(shuffling)} sets torch's seed or draws from it. In TRL the order within a batch is drawn "
                "from the same numbers; in a run the reward has those of its worker, and the server's are left alone. "
                "Draw from a torch.Generator of your own."
            )
        return differs("batches", "the same completions in another order", cause)
    if wrong:
        return differs("batches", f"other {', '.join(wrong)}, {len(ours)} batches")
    return equal("batches", f"the same {', '.join(sorted(names))}")


def _same(mine: Any, reference: Any) -> bool:
    same_shape = mine is not None and mine.shape == reference.shape
    return same_shape and bool(np.allclose(mine, reference, rtol=1e-4, atol=1e-5, equal_nan=True))


def _same_rows(mine: Batch, reference: Batch) -> bool:
    rows = [sorted(row.tobytes() for row in batch.get("completion_ids", ())) for batch in (mine, reference)]
    return rows[0] == rows[1] and len(set(rows[0])) > 1


def _tokens(batch: Batch) -> Any:
    masks = [batch[name].astype(bool) for name in _TOKENS if name in batch]
    return np.logical_and.reduce(masks) if masks else np.ones(1, dtype=bool)


def _sampler(ours: Sequence[Batch], bound: float) -> Line:
    """Compare the worker's log-probabilities and the trainer's, in the batches that the first version has sampled."""
    fresh = [b for b in ours if _SAMPLER in b and _LOGPROBS in b and not np.any(b.get("policy_version", 0))]
    if not fresh:
        return unknown("sampler", "not compared", "The loss takes no log-probabilities of the sampler here.")
    gaps = np.concatenate([np.abs(b[_SAMPLER] - b[_LOGPROBS])[_tokens(b)] for b in fresh[: max(1, len(ours) // 2)]])
    found = f"on average {gaps.mean():.2g} nats a token from the trainer, at most {gaps.max():.2g}; {len(gaps)} tokens"
    if gaps.mean() <= bound:
        return equal("sampler", found)
    cause = f"More than {bound:g}: the worker samples from another distribution than the one that is trained."
    return differs("sampler", found, cause)


def _logprobs(ours: Sequence[Batch], theirs: Sequence[Batch], tolerance: float) -> Line:
    pairs = [(a, b) for a, b in zip(ours, theirs) if _LOGPROBS in a and _LOGPROBS in b]
    pairs = [(a, b) for a, b in pairs if a[_LOGPROBS].shape == b[_LOGPROBS].shape]
    if not pairs or len(pairs) < max(len(ours), len(theirs)):
        cause = "The loss computes them in another way, or batches have other shapes."
        return unknown("log-probs", "not compared", cause)
    gap = float(np.max([np.abs(a[_LOGPROBS] - b[_LOGPROBS])[_tokens(b)].max(initial=0.0) for a, b in pairs]))
    found = f"at most {gap:.2g} apart, {sum(int(_tokens(b).sum()) for _, b in pairs)} tokens"
    return equal("log-probs", found) if gap <= 10 * tolerance else differs("log-probs", found)


def _whole(step: Step, name: str) -> float:
    return math.sqrt(sum(norm**2 for norm in step.values())) or 1.0


def _own(step: Step, name: str) -> float:
    return max(1.0, abs(step[name]))


_OF_NORMS = "norms of {names} parameters, at most {gap:.2g} of the whole apart"
_STEPS: dict[str, tuple[str, Callable[[Step, str], float], str]] = {
    "losses": ("loss", _own, "{steps}, at most {gap:.2g} apart"),
    "gradients": ("gradient", _whole, _OF_NORMS),
    "weights": ("weights", _whole, _OF_NORMS),
    "metrics": ("log", _own, "the same {names} names, values at most {gap:.2g} apart; and those of async/"),
}
"""By subject: the kind of the notes, what a difference is a share of, and a sentence."""


def _numbers(subject: str, server: Sequence[Note], plain: Sequence[Note], tolerance: float, count: int) -> Line:
    """Compare numbers by their names, step by step. So many (`count`) micro-batches may have exchanged rows."""
    kind, whole, words = _STEPS[subject]
    mine, reference = ([_of_trl(note["numbers"]) for note in of if note["kind"] == kind] for of in (server, plain))
    if count > 1 and kind == "loss":
        mine, reference = (
            [_summed(of[at : at + count]) for at in range(0, len(of), count)] for of in (mine, reference)
        )
    elif count > 1:
        mine, reference = ([_but_means(step) for step in of] for of in (mine, reference))
    names = [Counter({name for step in steps for name in step}) for steps in (mine, reference)]
    if missing := told_apart(*names):
        return differs(subject, missing)
    if not reference or [step.keys() for step in mine] != [step.keys() for step in reference]:
        return differs(subject, f"{len(mine)} times, in plain TRL {len(reference)} times")
    pairs = ((a, b, name) for a, b in zip(mine, reference, strict=True) for name in b)
    every = ((_apart(a[name], b[name], whole(b, name)), name, a[name], b[name]) for a, b, name in pairs)
    gap, name, ours, theirs = max(every, default=(0.0, "", 0.0, 0.0))
    found = words.format(steps=len(reference), names=len(names[1]), gap=gap)
    if gap <= tolerance:
        return equal(subject, found)
    return differs(subject, f"{found}: {name} {ours:.6g}, in plain TRL {theirs:.6g}")


def _summed(losses: Sequence[Step]) -> Step:
    return {"loss": sum(step["loss"] for step in losses)}


def _but_means(numbers: Step) -> Step:
    return {name: value for name, value in numbers.items() if not name.startswith(_OF_MICRO_BATCHES)}


def _of_trl(numbers: Step) -> Step:
    return {name: value for name, value in numbers.items() if name not in _TIMES and not name.startswith(_NOT_COMPARED)}


def _apart(mine: float, reference: float, whole: float) -> float:
    """Their distance as a share of the whole; infinite where one of the two is no number."""
    if mine == reference or (math.isnan(mine) and math.isnan(reference)):
        return 0.0
    share = abs(mine - reference) / whole
    return math.inf if math.isnan(share) else share
