"""What reads files that others may have written, and the bytes to try on it: sound files, damaged in every way.

A target is sound if nothing but its own errors comes out, whatever it is given. `test_fuzz.py` tries a fixed set of
inputs; `benchmarks/fuzz.py` searches for as long as it is told to.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from completions import COMPLETIONS, pay
from crc32c import crc32c
from hypothesis import strategies as st

from async_grpo.archive import rollout_state
from async_grpo.archive.history import final_history, read_record
from async_grpo.archive.rollout_state import RolloutState
from async_grpo.deltas.coding import DeltaError
from async_grpo.deltas.delta import Delta, _checksum, apply, digest, encode, pack, read
from async_grpo.errors import BadFileError, RunDirError
from async_grpo.queue.codec import decode_group, decode_job, encode_group, encode_job
from async_grpo.queue.names import parse_name, parse_set_aside
from async_grpo.records import Job, RolloutGroup, Timings
from async_grpo.rundir.locks import _parse_owner, describe_holder
from async_grpo.rundir.paths import RunDir, RunState
from async_grpo.rundir.run_plan import RunPlan
from async_grpo.rundir.shape import as_json
from async_grpo.telemetry import entries
from async_grpo.telemetry.activity import ActivityRecord, activity_file, read_activity
from async_grpo.telemetry.run_log import RunLog, last_steps, rates
from async_grpo_ipc.control import HEADER_BYTES, Header, SlotState
from async_grpo_ipc.errors import IPCError
from async_grpo_ipc.handle import FORMAT, FORMAT_VERSION, crc32, read_handle, read_head

RUN = "run-1"
GENERATION = "ab" * 16


@dataclass(frozen=True)
class Target:
    """A reader, inputs for it, and what it may raise."""

    name: str
    inputs: st.SearchStrategy[bytes]
    read: Callable[[bytes, Path], object]  # gets the bytes and a folder of its own
    errors: tuple[type[Exception], ...]


# Values and damages

NUMBERS = st.sampled_from(
    [0, -1, 1, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 10**10, 10**40, 0.5, 1e308, math.inf, math.nan]
)
TEXTS = st.sampled_from(["", "x", "0", "\0", "\ud800", "☃", "../..", "a" * 5000]) | st.text(max_size=8)
LEAVES = st.none() | st.booleans() | NUMBERS | st.integers() | TEXTS
VALUES = st.recursive(LEAVES, lambda x: st.lists(x, max_size=4) | st.dictionaries(TEXTS, x, max_size=4), max_leaves=8)
NO_JSON = st.sampled_from(
    [b"", b"{", b"[" * 50_000, b'{"a":' * 5_000, b"\0" * 300, b"\xff\xfe{\0", b"9" * 5_000, b"NaN"]
)


@st.composite
def changed(draw: st.DrawFn, sound: dict[str, Any]) -> Any:
    """The object with up to three values inside it replaced, removed or added."""
    value: Any = json.loads(json.dumps(sound))
    for _ in range(draw(st.integers(0, 3))):
        inner = value
        while True:
            keys = list(inner) if isinstance(inner, dict) else range(len(inner)) if isinstance(inner, list) else []
            if not keys:
                break
            key = draw(st.sampled_from(list(keys)))
            if isinstance(inner[key], (dict, list)) and inner[key] and draw(st.booleans()):
                inner = inner[key]
                continue
            what = draw(st.integers(0, 9))
            if what == 0:
                del inner[key]
            elif what == 1 and isinstance(inner, dict):
                inner[draw(TEXTS)] = draw(VALUES)
            else:
                inner[key] = draw(VALUES)
            break
    return value


@st.composite
def damaged(draw: st.DrawFn, sound: st.SearchStrategy[bytes]) -> bytes:
    """Bytes with a few of them changed, cut off, or put in."""
    data = bytearray(draw(sound))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(data)))
        what = draw(st.integers(0, 3))
        if what == 0:
            del data[at:]
        elif what == 1:
            data[at:at] = draw(st.binary(max_size=8))
        elif at < len(data):
            data[at] = draw(st.integers(0, 255))
    return bytes(data)


def json_bytes(sound: dict[str, Any]) -> st.SearchStrategy[bytes]:
    return changed(sound).map(lambda value: json.dumps(value).encode())


def files_like(sound: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    return sound | damaged(sound) | NO_JSON | st.binary(max_size=64)


# Files of the queue: the checksum is made right again, so that what is behind it is reached

JOB = Job(run_id=RUN, seq=7, row={"prompt": "1+1="}, num_generations=2, seed=3, born_version=1, min_version=0)


def _group(job: Job) -> RolloutGroup:
    return RolloutGroup(
        job=job,
        attempt=0,
        worker="dev1",
        policy_version=3,
        reward_names=("right",),
        prompt_ids=np.arange(4, dtype=np.int32),
        completion_lengths=np.array([2, 1], np.int32),
        completion_ids=np.arange(3, dtype=np.int32),
        sampling_logprobs=np.zeros(3, np.float32),
        tool_mask=None,
        rewards=np.array([[1.0], [np.nan]], np.float32),
        completions=["a", "b"],
        metrics={"length": [2.0, 1.0]},
        extra_columns={"note": ["a", None]},
        timings=Timings(adopt_s=0.1, generate_s=0.2, score_s=0.3),
    )


def _with_checksum(data: bytes) -> bytes:
    """As `queue.codec` computes it: of everything but the eight digits at their fixed offset."""
    at = 8 + len(b'{"__metadata__": {"crc32c": "')
    if len(data) < at + 8:
        return data
    return data[:at] + b"%08x" % crc32c(data[at + 8 :], crc32c(data[:at])) + data[at + 8 :]


def queue_file(sound: bytes) -> st.SearchStrategy[bytes]:
    length = 8 + int.from_bytes(sound[:8], "little")
    top, tensors = json.loads(sound[8:length]), sound[length:]
    header = json.loads(top["__metadata__"]["header"])

    @st.composite
    def built(draw: st.DrawFn) -> bytes:
        described = draw(changed(top)) if draw(st.booleans()) else json.loads(json.dumps(top))
        if isinstance(described.get("__metadata__"), dict) and draw(st.booleans()):
            described["__metadata__"]["header"] = json.dumps(draw(changed(header)))
        text = json.dumps(described).encode()
        body = draw(damaged(st.just(tensors)))
        return _with_checksum(len(text).to_bytes(8, "little") + text + body)

    return built() | damaged(st.just(sound)).map(_with_checksum) | damaged(st.just(sound)) | st.binary(max_size=64)


def _read_group(data: bytes, folder: Path) -> object:
    group = decode_group(bytearray(data), run_id=RUN)
    return [group.rewards.sum(), group.completion_ids.sum(), len(group.completions)]


# Files of JSON

STATE = RolloutState(run_id=RUN, step=3, next_seq=9, rounds=3, unusable=[2], consumed_below=4, consumed=[6])
RUN_STATE = RunState(run_id=RUN, state="running", plan=RunPlan(config=Path("/s.py")), started="now", output_dir="/out")
LAYOUT = {
    "nbytes": 4608,
    "buckets": [{"dtype": "float32", "offset": 4096, "nbytes": 512}],
    "tensors": [{"name": "a", "dtype": "float32", "shape": [8, 2], "stride": [2, 1], "offset": 4096}],
}
HANDLE = {
    "format": FORMAT,
    "format_version": FORMAT_VERSION,
    "generation": GENERATION,
    "pid": 1,
    "pid_namespace": "pid:[1]",
    "boot_id": "b",
    "created": 1.0,
    "slots": 2,
    "control": {"fd": 3, "inode": 4},
    "memory": {
        "kind": "posix",
        "fd": 5,
        "inode": 6,
        "nbytes": 1 << 16,
        "blocks": [{"offset": 8192 * index, "nbytes": 4608} for index in range(3)],
    },
    "static": LAYOUT,
    "slot": LAYOUT,
    "tied": {"b": "a"},
    "complete": True,
    "buffers": False,
}
LINES: list[dict[str, Any]] = [
    {"run_id": RUN, "resumed_from": None, "max_staleness": 4},
    {"step": 1, "version_used": 0, "seqs": [0, 1], "policy_versions": [0, 0]},
    {"dropped": 3, "reason": "over age"},
    {"step": 1, "monotonic_s": 5.0, "loss": 0.1, "reward": 0.5, "async/rollouts_per_second": 3.0},
    {"step": 2, "monotonic_s": 6.0, "loss": 0.1, "reward": 0.5, "eval_rewards/accuracy/mean": 0.5},
]


def _handle_file(value: Any) -> bytes:
    checksum = crc32(value) if isinstance(value, dict) else 0
    return json.dumps({**value, "crc32": checksum} if isinstance(value, dict) else value).encode()


def _put(data: bytes, path: Path) -> Path:
    path.touch(mode=0o600)
    path.write_bytes(data)
    return path


def _read_handle(data: bytes, folder: Path) -> object:
    path = _put(data, folder / "handle.json")
    try:
        read_head(path)
    except IPCError as error:
        assert str(path) in str(error)
    return read_handle(path).specs_by_name()


def _read_state(data: bytes, folder: Path) -> object:
    state = rollout_state.read(_put(data, folder / "rollout_state.json"))
    return state is not None and (7 in state, state.has_consumed(3), next(state.consumed_seqs(), None))


def _read_run(data: bytes, folder: Path) -> object:
    _put(data, folder / "run.json")
    return RunDir(folder).read_state()


def _read_lines(data: bytes, folder: Path) -> object:
    path = _put(data, folder / "lines.jsonl")
    processes, broken = read_record(path, RUN)
    final_history(processes)
    rates(last_steps(path, now=6.0, since=0.0), now=6.0)
    entries.read(path)
    log = RunLog(path)
    log.quotes()
    log.close()
    return broken


def _read_names(data: bytes, folder: Path) -> object:
    name = data.decode("utf-8", errors="surrogateescape")
    if (parsed := parse_name(name)) is not None:
        assert str(parsed) == name
    aside = parse_set_aside(name)
    assert aside is None or aside.name == name
    return parsed, aside


def _status_bytes(record: Any) -> bytes:
    body = json.dumps(record).encode()
    return bytes(8) + bytes(8) + len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body


def _sound_status() -> dict[str, Any]:
    record = asdict(ActivityRecord(name="dev1", pid=1, waits_on=("server",)))
    del record["progress_s"]
    return {"format": 1, **record, "minute_ago": [0.0, {"waiting": 1.0}], "jobs": [[3, "scoring", 1.0]]}


def _read_status(data: bytes, folder: Path) -> object:
    (folder / "alive").mkdir(exist_ok=True)
    found = read_activity(_put(data, activity_file(folder, "dev1")))
    return found and (found.share_of_last_minute(["waiting"], 100.0), found.spent(100.0))


def _read_note(data: bytes, folder: Path) -> object:
    note = _parse_owner(data)
    return describe_holder(note), note.get("run_id")


def _header() -> bytes:
    control = bytearray(HEADER_BYTES)
    header = Header(control, GENERATION, 2)  # type: ignore[arg-type]  # what a mapping is to it
    header.initialise()
    header.mark(1, SlotState.READY, 5)
    return bytes(control)


def _read_header(data: bytes, folder: Path) -> object:
    header = Header(bytearray(data.ljust(HEADER_BYTES, b"\0")), GENERATION, 2)  # type: ignore[arg-type]
    assert all(0 <= record.slot < 2 for record in header.records())
    header.newest()
    return header.check("handle")


NAMES = st.sampled_from(
    [
        b"0000000042.a00_pending.safetensors",
        b"0000000042.a00_processing_by_dev1.safetensors",
        b"0000000042.a01_complete_from_dev12.safetensors",
        b"9999999999.a100_duplicate_from_dev9999.safetensors",
        b"0000000044.a00_broken_pending.safetensors",
        b"0000000043.a02_failed.safetensors",
    ]
)
NOTE = {"pid": 1, "host": "gpu1", "since": "now", "role": "server", "run_id": RUN}

OLD = {"w": np.arange(300, dtype=np.uint16)}
NEW = {"w": np.where(np.arange(300) % 9, OLD["w"], 7).astype(np.uint16)}
DELTA = encode(OLD, NEW)
PACKED = b"".join(pack(DELTA))
HEAD, BODY = (PACKED[8:][part] for n in [int.from_bytes(PACKED[:8], "little")] for part in (slice(n), slice(n, None)))


def _safetensors(head: Any) -> bytes:
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + BODY


def _delta_of_header(header: Any) -> bytes:
    """A delta whose checksum fits what it says."""
    text = json.dumps(header)
    return _safetensors(
        {**json.loads(HEAD), "__metadata__": {"delta": text, "checksum": _checksum(text, DELTA.frames)}}
    )


def _delta_of_frame(frame: bytes) -> bytes:
    return b"".join(pack(Delta(DELTA.header, {"w": frame})))


DELTAS = [
    changed(json.loads(HEAD)).map(_safetensors),
    changed(asdict(DELTA.header)).map(_delta_of_header),
    damaged(st.just(DELTA.frames["w"])).map(_delta_of_frame),
]


def _read_delta(data: bytes, folder: Path) -> None:
    path = folder / "a.delta"
    path.write_bytes(data)
    with path.open("rb") as file:
        delta = read(file.fileno())
    weights = {"w": np.zeros(300, np.uint16) if delta.header.base is None else OLD["w"].copy()}
    apply(delta, weights)
    assert digest(weights) == delta.header.result


SOME_LINES = st.lists(st.one_of(list(map(json_bytes, LINES))), max_size=5)
TARGETS = [
    Target("delta", st.one_of(DELTAS) | damaged(st.just(PACKED)) | NO_JSON, _read_delta, (DeltaError,)),
    Target("job", queue_file(encode_job(JOB)), lambda data, _: decode_job(data, run_id=RUN), (BadFileError,)),
    Target("group", queue_file(encode_group(_group(JOB))), _read_group, (BadFileError,)),
    Target("handle", files_like(changed(HANDLE).map(_handle_file)), _read_handle, (IPCError,)),
    Target("shared header", damaged(st.just(_header())), _read_header, (IPCError,)),
    Target("rollout state", files_like(json_bytes(asdict(STATE))), _read_state, (BadFileError,)),
    Target("run state", files_like(json_bytes(as_json(RUN_STATE))), _read_run, (RunDirError,)),
    Target("lines", files_like(SOME_LINES.map(b"\n".join)).map(lambda data: data + b"\n"), _read_lines, ()),
    Target("status", damaged(changed(_sound_status()).map(_status_bytes)) | NO_JSON, _read_status, ()),
    Target("lock note", files_like(json_bytes(NOTE)), _read_note, ()),
    Target("names", damaged(NAMES) | st.binary(max_size=60), _read_names, ()),
    Target("rewards", damaged(COMPLETIONS), pay, ()),
]
