"""Proves from the files of a run that every prompt group was used once, or says where it is and why.

Nothing that a process remembers is asked. The proof holds relative to the last step in the record: what a later
process did not go on from has not happened.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from async_grpo.archive.audit_evidence import Evidence, Reader, Stored
from async_grpo.archive.history import Process, final_history
from async_grpo.archive.rollout_state import RolloutState
from async_grpo.errors import RunDirError
from async_grpo.queue.names import COMPLETE, DUPLICATE, JobName
from async_grpo.queue.server import MAX_OPEN
from async_grpo.rundir import paths as runs
from async_grpo.rundir.locks import server_alive
from async_grpo.rundir.paths import RunDir

LOOKS, PAUSE_S = 3, 0.1  # what only some looks show was a file on its way from one name to the next

USED, OPEN, SET_ASIDE, DROPPED, AGAIN, LOST = "used", "open", "set aside", "dropped", "to be issued again", "lost"


class Use(NamedTuple):
    """One group in one batch."""

    seq: int
    step: int  # the optimizer step
    version_used: int  # the trainer's version when it took the batch
    policy_version: int  # that generated it
    process: int  # index of the parameter server process


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Everything that is known of one sequence number."""

    seq: int
    state: str  # used, open, set aside, dropped, to be issued again, lost
    attempts: int | None  # tries until now; None if its files are trimmed
    worker: str | None  # who generated it
    policy_version: int | None
    step: int | None  # the optimizer step that used it


@dataclass(slots=True, kw_only=True)
class Audit:
    """The totals, the anomalies as sentences, and every group. `Audit.clean` is the verdict."""

    run_id: str
    run_state: str
    live: bool
    steps: int
    processes: int  # parameter servers, one after the other
    groups: list[Group]
    trimmed: int  # used groups whose files made room
    duplicates: int  # second results, archived and never used
    broken_set_aside: int  # unusable files in quarantine/, whose jobs were issued again
    taken_back: int  # groups used that newer weights made, which a resume then took back
    staleness: dict[int, int]  # versions -> groups
    anomalies: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not self.anomalies

    def count(self, state: str) -> int:
        return sum(group.state == state for group in self.groups)

    def attempts(self) -> dict[int, int]:
        return _histogram(group.attempts for group in self.groups if group.attempts is not None)

    def workers(self) -> dict[str, int]:
        return dict(sorted(Counter(group.worker for group in self.groups if group.worker is not None).items()))

    def as_json(self) -> dict[str, Any]:
        totals = {state.replace(" ", "_"): self.count(state) for state in (USED, OPEN, SET_ASIDE, DROPPED, AGAIN, LOST)}
        data = {"clean": self.clean, "issued": len(self.groups), **totals, **asdict(self)}
        groups = data.pop("groups")
        return {**data, "attempts": self.attempts(), "workers": self.workers(), "groups": groups}


def audit(root: Path, *, sleep: Callable[[float], None] = time.sleep) -> Audit:
    """Judge the run in `root`, be it live, killed or finished. `RunDirError` if there is none.

    An anomaly is what every one of `LOOKS` snapshots shows.
    """
    run = RunDir(root)
    state = run.read_state() if run.root.is_dir() else None
    if state is None:
        raise RunDirError(f"{root} is no run directory: it has no run.json.")
    reader = Reader(run, state)
    live = server_alive(run.root)
    report, anomalies = None, None
    for look in range(LOOKS):
        if look:
            sleep(PAUSE_S)
        report = _judge(reader.look(), state, live=live)
        anomalies = [text for text in report.anomalies if anomalies is None or text in anomalies]
        if not anomalies:
            break
    assert report is not None and anomalies is not None
    report.anomalies = anomalies
    return report


def _judge(found: Evidence, state: runs.RunState, *, live: bool) -> Audit:
    history = list(_uses(found.processes))
    uses: dict[int, list[Use]] = {}
    for use in history:
        uses.setdefault(use.seq, []).append(use)
    taken_back = [use for use in history if _is_taken_back(use, found.processes)]
    groups = _groups(found, uses)
    trimmed, vanished = _without_file(found, uses, finished=state.state == runs.FINISHED)
    anomalies = [
        *found.unusable,
        *_unrecorded(found, state),
        *_used_twice(uses),
        *_bad_versions(history, found.processes, taken_back),
        *_other_versions(found, uses),
        *(f"Group {seq} was used by step {uses[seq][0].step}, but its file has vanished." for seq in vanished),
        *_lost(groups),
        *_dropped_and_used(found.processes[-1:], uses),
        *_against_checkpoints(found, history, groups),
        *(f"quarantine/{name} has no reason beside it." for name in found.without_reason),
    ]
    return Audit(
        run_id=state.run_id,
        run_state=state.state,
        live=live,
        steps=max([state.step, *(use.step for use in history)]),
        processes=len(found.processes),
        groups=groups,
        trimmed=len(trimmed),
        duplicates=sum(name.state == DUPLICATE for names in found.done.values() for name in names),
        broken_set_aside=found.broken_files,
        taken_back=len(taken_back),
        staleness=_histogram(use.version_used - use.policy_version for use in history),
        anomalies=anomalies,
    )


def _uses(processes: list[Process]) -> Iterator[Use]:
    for process, (step, batch) in final_history(processes):
        for seq, version in zip(batch.seqs, batch.policy_versions, strict=True):
            yield Use(seq, step, batch.version_used, version, process)


def _groups(found: Evidence, uses: dict[int, list[Use]]) -> list[Group]:
    """Every sequence number up to the highest that any file knows."""
    places: tuple[Iterable[int], ...] = (uses, found.waiting, found.done, found.failed, found.broken, found.dropped)
    highest = max((seq for place in places for seq in place), default=-1)
    issued_below = _surely_issued_below(found)
    return [_group(seq, found, uses, issued_below) for seq in range(highest + 1)]


def _group(seq: int, found: Evidence, uses: dict[int, list[Use]], issued_below: int) -> Group:
    use = uses.get(seq, [None])[0]
    archived = [name for name in found.done.get(seq, []) if name.state == COMPLETE]
    names = [*archived, *found.waiting.get(seq, [])]
    made = _result([found.stored[name] for name in names if name in found.stored], use)
    return Group(
        seq=seq,
        state=USED if use is not None else _state_of_unused(seq, found, bool(archived), issued_below),
        attempts=_attempts(seq, names, made if use is not None else None, found),
        worker=made.worker if made else None,
        policy_version=use.policy_version if use is not None else made.policy_version if made else None,
        step=use.step if use is not None else None,
    )


def _state_of_unused(seq: int, found: Evidence, archived: bool, issued_below: int) -> str:
    if seq in found.waiting:
        return OPEN
    if seq in found.dropped:
        return DROPPED
    if archived:  # the trainer has it and no step is done yet; a resume gives it back
        return OPEN
    if seq in found.failed:
        return SET_ASIDE
    if seq in found.broken:  # about to be issued again
        return OPEN
    return LOST if seq < issued_below else AGAIN


def _result(stored: list[Stored], use: Use | None) -> Stored | None:
    """The result that was used, as far as the files show; else the newest."""
    used = [one for one in stored if use is not None and one.policy_version == use.policy_version]
    return (used or stored)[-1] if stored else None


def _attempts(seq: int, names: list[JobName], used: Stored | None, found: Evidence) -> int | None:
    """Attempts until the result that was used, or until now; None if no file tells."""
    if used is not None:
        return 1 + used.name.attempt
    attempts = [name.attempt for name in names]
    attempts += [place[seq] for place in (found.failed, found.broken) if seq in place]
    return 1 + max(attempts) if attempts else None


def _surely_issued_below(found: Evidence) -> int:
    """Jobs are issued in order, so the last process had issued everything below the last group that it used.

    What is beyond, and nowhere, was withdrawn when the process started, to be issued again in its turn.
    """
    last = found.processes[-1] if found.processes else None
    return max(last.seqs(), default=-1) + 1 if last else 0


def _without_file(found: Evidence, uses: dict[int, list[Use]], *, finished: bool) -> tuple[list[int], list[int]]:
    """Used groups of which no file is left: (trimmed, vanished).

    Only what a checkpoint has is trimmed, and the oldest first, but for groups that were still open then. The
    checkpoints of a finished run may have been moved away.
    """
    kept = [seq for seq in uses if any(name.state == COMPLETE for name in found.done.get(seq, []))]
    absent = sorted(uses.keys() - set(kept))
    covered = found.checkpoints[-1].done_set() if found.checkpoints else set(absent) if finished else set()
    oldest_kept = min(kept, default=max(absent, default=0))
    trimmed = [seq for seq in absent if seq in covered and seq < oldest_kept + MAX_OPEN]
    return trimmed, sorted(set(absent) - set(trimmed))


def _unrecorded(found: Evidence, state: runs.RunState) -> Iterator[str]:
    if not found.processes and (state.step or found.done):
        yield f"There is no consumed.jsonl, although the run has done {state.step} steps."


def _used_twice(uses: dict[int, list[Use]]) -> Iterator[str]:
    for seq, all_uses in sorted(uses.items()):
        if len(all_uses) > 1:
            yield f"Group {seq} was used {len(all_uses)} times, by steps {', '.join(str(u.step) for u in all_uses)}."


def _bad_versions(history: list[Use], processes: list[Process], taken_back: list[Use]) -> Iterator[str]:
    excused = set(taken_back)
    for use in history:
        bound = processes[use.process].max_staleness
        who = f"Group {use.seq}, generated by version {use.policy_version}, was used at version {use.version_used}"
        if use.policy_version > use.version_used and use not in excused:
            yield f"{who}: its version did not exist yet."
        elif use.version_used - use.policy_version > bound:
            yield f"{who}: staler than the bound of {bound}."


def _is_taken_back(use: Use, processes: list[Process]) -> bool:
    """Whether it was generated by a version that an earlier process reached and no checkpoint kept."""
    before = processes[: use.process]
    if use.policy_version <= use.version_used or not before:
        return False
    steps = [step for process in before for step, _ in process.used]
    versions_a_line = max((later - step for step, later in pairwise(steps)), default=1)
    return use.policy_version <= max(process.last_step for process in before) + max(1, versions_a_line)


def _other_versions(found: Evidence, uses: dict[int, list[Use]]) -> Iterator[str]:
    for seq, all_uses in sorted(uses.items()):
        names = [name for name in found.done.get(seq, []) if name.state == COMPLETE and name in found.stored]
        versions = {found.stored[name].policy_version for name in names}
        if versions and all_uses[0].policy_version not in versions:
            yield (
                f"Group {seq} was used as one of version {all_uses[0].policy_version}, "
                f"but its file is of version {', '.join(map(str, sorted(versions)))}."
            )


def _lost(groups: list[Group]) -> Iterator[str]:
    for group in groups:
        if group.state == LOST:
            yield f"Group {group.seq} is lost: it was issued, and is neither used, nor open, nor set aside."


def _dropped_and_used(last: list[Process], uses: dict[int, list[Use]]) -> Iterator[str]:
    for seq in sorted({seq for process in last for seq, _ in process.dropped} & uses.keys()):
        yield f"Group {seq} was dropped, and used by step {uses[seq][0].step} all the same."


def _against_checkpoints(found: Evidence, history: list[Use], groups: list[Group]) -> Iterator[str]:
    last_step = max((use.step for use in history), default=0)
    resumed_from = [process.resumed_from or 0 for process in found.processes]
    gone = {group.seq for group in groups if group.state in (SET_ASIDE, DROPPED)}
    for checkpoint in found.checkpoints:
        where = f"checkpoint-{checkpoint.step}"
        recorded = {use.seq for use in history if use.step <= checkpoint.step}
        ahead = checkpoint.step > max([last_step, *resumed_from])  # rightly, where one batch serves several steps
        if ahead and checkpoint.consumed_set() != recorded:
            yield f"{where} is ahead of the record, which ends with step {last_step}."
            continue
        yield from _set_differences(where, checkpoint, recorded)
        for seq in sorted(set(checkpoint.unusable) - gone - {use.seq for use in history}):
            if seq >= len(groups) or groups[seq].state in (LOST, AGAIN):
                yield f"{where} has group {seq} as set aside or dropped, but no file and no line says so."


def _set_differences(where: str, checkpoint: RolloutState, recorded: set[int]) -> Iterator[str]:
    consumed = checkpoint.consumed_set()
    for seqs, text in (
        (consumed - recorded, f"{where} counts them as used, but no step of the record used them"),
        (recorded - consumed, f"The record has them as used up to step {checkpoint.step}, but {where} does not"),
    ):
        if seqs:
            shown = ", ".join(map(str, sorted(seqs)[:10])) + (", …" if len(seqs) > 10 else "")
            yield f"{text}: groups {shown}."


def _histogram(values: Iterable[int]) -> dict[int, int]:
    return dict(sorted(Counter(values).items()))
