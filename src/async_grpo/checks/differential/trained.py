"""Lines about what is trained on and what comes of it: batches, log-probabilities, losses, gradients, metrics."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from async_grpo.checks.differential.building import Facts
from async_grpo.checks.differential.lines import Line, Status, equal
from async_grpo.checks.differential.notes import PLAIN, SERVER, Note, batches_of

_SAMPLER = "old_per_token_logps"
_OURS = {_SAMPLER, "sampling_per_token_logps", "importance_sampling_ratio", "policy_version", "is_long"}
_LOGPROBS = "logprobs"
_TIMES = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second")
_SPEEDS = ("timing_s/", "perf/")  # of a critic's trainer
_SHOWN = 3
_SAMPLER_BOUND = {"float32": 0.02}  # nats a token, on average
_SAMPLER_BOUND_HALF = 0.5
_TOLERANCE, _TOLERANCE_HALF = 1e-4, 5e-2
_TOKENS = ("completion_mask", "tool_mask")
Batch = Mapping[str, Any]


def trained_lines(scratch: Path, facts: Facts, server: Sequence[Note], plain: Sequence[Note]) -> Iterator[Line]:
    """One line for each subject. A model with dropout makes other numbers, and that is documented."""
    ours, theirs = [*batches_of(scratch, SERVER)], [*batches_of(scratch, PLAIN)]
    tolerance = _TOLERANCE if facts.precision == "float32" else _TOLERANCE_HALF
    yield _batches(ours, theirs)
    numbers = [
        _sampler(ours, _SAMPLER_BOUND.get(facts.precision, _SAMPLER_BOUND_HALF)),
        _logprobs(ours, theirs, tolerance),
        _losses(server, plain, tolerance),
        _norms("gradient", "gradients", server, plain, tolerance),
        _norms("weights", "weights", server, plain, tolerance),
        _metrics(server, plain, tolerance),
    ]
    for line in numbers:
        if facts.dropout and line.status is Status.DIFFERS:
            yield Line(Status.DOCUMENTED, line.subject, line.found, facts.dropout)
        else:
            yield line


def _batches(ours: Sequence[Batch], theirs: Sequence[Batch]) -> Line:
    if len(ours) != len(theirs) or not ours:
        return Line(Status.DIFFERS, "batches", f"{len(ours)} were trained on, in plain TRL {len(theirs)}")
    names = {name for batch in theirs for name in batch} - {_LOGPROBS, *_OURS}
    added = {name for batch in ours for name in batch} - {_LOGPROBS} - names
    wrong = sorted(
        name for name in names if not all(map(_same, (b.get(name) for b in ours), (b[name] for b in theirs)))
    )
    wrong += sorted(added - _OURS)
    if wrong and all(map(_same_rows, ours, theirs)):
        cause = "Random numbers were drawn in another order, such as by a dataloader of yours, which the server opens."
        return Line(Status.DIFFERS, "batches", "the same completions in another order", cause)
    if wrong:
        return Line(Status.DIFFERS, "batches", f"other {', '.join(wrong)}, {len(ours)} batches")
    return equal("batches", f"the same {', '.join(sorted(names))}")


def _same(mine: Any, reference: Any) -> bool:
    if mine is None or mine.shape != reference.shape:
        return False
    return bool(np.allclose(mine, reference, rtol=1e-4, atol=1e-5, equal_nan=True))


def _same_rows(mine: Batch, reference: Batch) -> bool:
    rows = [sorted(row.tobytes() for row in batch.get("completion_ids", ())) for batch in (mine, reference)]
    return rows[0] == rows[1] and len(set(rows[0])) > 1


def _tokens(batch: Batch) -> Any:
    masks = [batch[name].astype(bool) for name in _TOKENS if name in batch]
    return np.logical_and.reduce(masks) if masks else np.ones(1, dtype=bool)


def _sampler(ours: Sequence[Batch], bound: float) -> Line:
    """The worker's log-probabilities and the trainer's, in the batches that the first version has sampled."""
    fresh = [b for b in ours if _SAMPLER in b and _LOGPROBS in b and not np.any(b.get("policy_version", 0))]
    if not fresh:
        return Line(
            Status.UNKNOWN, "sampler", "not compared", "The loss takes no log-probabilities of the sampler here."
        )
    first = fresh[: max(1, len(ours) // 2)]
    gaps = np.concatenate([np.abs(b[_SAMPLER] - b[_LOGPROBS])[_tokens(b)] for b in first])
    found = f"on average {gaps.mean():.2g} nats a token from the trainer, at most {gaps.max():.2g}; {len(gaps)} tokens"
    if gaps.mean() <= bound:
        return equal("sampler", found)
    return Line(
        Status.DIFFERS,
        "sampler",
        found,
        f"More than {bound:g}: the worker samples from another distribution than the one that is trained.",
    )


def _logprobs(ours: Sequence[Batch], theirs: Sequence[Batch], tolerance: float) -> Line:
    pairs = [(a, b) for a, b in zip(ours, theirs) if _LOGPROBS in a and _LOGPROBS in b]
    pairs = [(a, b) for a, b in pairs if a[_LOGPROBS].shape == b[_LOGPROBS].shape]
    if not pairs or len(pairs) < max(len(ours), len(theirs)):
        return Line(
            Status.UNKNOWN,
            "log-probs",
            "not compared",
            "The loss computes them in another way, or batches have other shapes.",
        )
    gap = float(np.max([np.abs(a[_LOGPROBS] - b[_LOGPROBS])[_tokens(b)].max(initial=0.0) for a, b in pairs]))
    tokens = sum(int(_tokens(b).sum()) for _, b in pairs)
    found = f"at most {gap:.2g} apart, {tokens} tokens"
    return equal("log-probs", found) if gap <= 10 * tolerance else Line(Status.DIFFERS, "log-probs", found)


def _losses(server: Sequence[Note], plain: Sequence[Note], tolerance: float) -> Line:
    mine, reference = ([note["loss"] for note in notes if note["kind"] == "loss"] for notes in (server, plain))
    if len(mine) != len(reference) or not mine:
        return Line(Status.DIFFERS, "losses", f"{len(mine)}, in plain TRL {len(reference)}")
    gaps = [abs(a - b) for a, b in zip(mine, reference, strict=True)]
    worst = max(range(len(gaps)), key=gaps.__getitem__)
    found = f"{len(mine)}, at most {gaps[worst]:.2g} apart"
    if all(_close(a, b, tolerance) for a, b in zip(mine, reference, strict=True)):
        return equal("losses", found)
    return Line(Status.DIFFERS, "losses", f"{found}: {mine[worst]:.6g}, in plain TRL {reference[worst]:.6g}")


def _close(mine: float, reference: float, tolerance: float) -> bool:
    if math.isnan(mine) or math.isnan(reference):
        return math.isnan(mine) and math.isnan(reference)
    return mine == reference or abs(mine - reference) <= tolerance * max(1.0, abs(reference))


def _norms(kind: str, subject: str, server: Sequence[Note], plain: Sequence[Note], tolerance: float) -> Line:
    """Compare each parameter, step by step; a difference counts by its share of all of them together."""
    mine, reference = ([note["norms"] for note in notes if note["kind"] == kind] for notes in (server, plain))
    if not reference or [list(step) for step in mine] != [list(step) for step in reference]:
        return Line(
            Status.DIFFERS, subject, f"of other parameters, or {len(mine)} times, in plain TRL {len(reference)} times"
        )
    worst, where = max(
        (_apart(a[name], b[name], math.sqrt(sum(norm**2 for norm in b.values()))), name)
        for a, b in zip(mine, reference, strict=True)
        for name in b
    )
    found = f"norms of {len(reference[0])} parameters, at most {worst:.2g} of the whole apart"
    if worst <= tolerance:
        return equal(subject, found)
    return Line(Status.DIFFERS, subject, f"{found}: {where}")


def _apart(mine: float, reference: float, whole: float) -> float:
    """As a share of the whole; infinite where one of the two is no number."""
    if _close(mine, reference, 0.0):
        return 0.0
    share = abs(mine - reference) / (whole or 1.0)
    return math.inf if math.isnan(share) else share


def _metrics(server: Sequence[Note], plain: Sequence[Note], tolerance: float) -> Line:
    mine, reference = ([note["logs"] for note in notes if note["kind"] == "log"] for notes in (server, plain))
    names = [{name for logs in side for name in logs} for side in (mine, reference)]
    missing, more = (
        sorted(names[1] - names[0]),
        sorted(name for name in names[0] - names[1] if not name.startswith("async/")),
    )
    if missing or more or len(mine) != len(reference):
        parts = [f"{what} {', '.join(found)}" for what, found in (("without", missing), ("with", more)) if found]
        return Line(
            Status.DIFFERS, "metrics", "; ".join(parts) or f"logged {len(mine)} times, in plain TRL {len(reference)}"
        )
    wrong = {
        name: f"{name} {a[name]:g}, in plain TRL {b[name]:g}"
        for a, b in zip(mine, reference, strict=True)
        for name in b
        if not (name in _TIMES or name.startswith(_SPEEDS)) and not (name in a and _close(a[name], b[name], tolerance))
    }
    if wrong:
        return Line(Status.DIFFERS, "metrics", "; ".join([*wrong.values()][:_SHOWN]))
    return equal("metrics", f"the same {len(names[1])} names and values, and those of async/")
