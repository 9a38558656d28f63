"""Bytes of a queue file <-> `Job` or `RolloutGroup`.

A file is plain safetensors, so stock tools open it. Its `__metadata__` holds three strings: a CRC-32C (Castagnoli,
which processors compute by themselves) of all other bytes of the file, the format with its version, and one JSON
header; safetensors itself notices no corruption. The eight hexadecimal digits of the checksum lie at a fixed place,
so the reader needs no second rendering of what it checks. Tensors of a group (a job has none), with G completions,
F reward functions, N tokens in all:

    prompt_ids int32[P]   completion_lengths int32[G]   completion_ids int32[N]
    sampling_logprobs float32[N]   rewards float32[G, F]   tool_mask uint8[N], may be absent
    token_versions int32[N], may be absent
    texts uint8[…], UTF-8 JSON of the completions and extra columns: in the header they would be escaped twice

Nothing is unpickled and nothing is believed: names, dtypes, shapes, offsets, types of header fields, sums of
lengths, finite log-probabilities, run, sequence number, attempt and worker are all checked. The CRC stops
accidents, not attackers: the 0700 directory is the boundary of trust.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, NoReturn

from crc32c import crc32c

from async_grpo.errors import BadFileError, QueueError, UnsupportedError
from async_grpo.records import Job, RolloutGroup, Timings

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Tensors = dict[str, NDArray[Any]]

MAX_FILE_BYTES = 1 << 28  # larger files are refused before they are read

_JSON = json.JSONEncoder(ensure_ascii=False, check_circular=False)
_JOB_FORMAT = "async-grpo-job/2"
_GROUP_FORMAT = "async-grpo-group/2"
_BEFORE_CHECKSUM = b'{"__metadata__": {"crc32c": "'
_CHECKSUM_AT = 8 + len(_BEFORE_CHECKSUM)
_CHECKSUM_END = _CHECKSUM_AT + 8
_GROUP_TENSORS = {  # name -> dtype, dimensions; in the order in which the file holds them
    "prompt_ids": ("I32", 1),
    "completion_lengths": ("I32", 1),
    "completion_ids": ("I32", 1),
    "sampling_logprobs": ("F32", 1),
    "rewards": ("F32", 2),
    "tool_mask": ("U8", 1),
    "token_versions": ("I32", 1),
    "texts": ("U8", 1),
}
_OPTIONAL_TENSORS = ("tool_mask", "token_versions")
_ARRAYS = tuple(name for name in _GROUP_TENSORS if name != "texts")  # fields of a `RolloutGroup`
_NUMPY_DTYPES = {"I32": "<i4", "F32": "<f4", "U8": "|u1"}
_ITEM_BYTES = {"I32": 4, "F32": 4, "U8": 1}
_JOB_FIELDS: dict[str, type] = {
    "run_id": str,
    "seq": int,
    "row": dict,
    "num_generations": int,
    "seed": int,
    "born_version": int,
    "min_version": int,
}
_GROUP_FIELDS: dict[str, type] = {
    "job": dict,
    "attempt": int,
    "worker": str,
    "policy_version": int,
    "reward_names": list,
    "metrics": dict,
    "timings": dict,
}
_TEXT_FIELDS: dict[str, type] = {"completions": list, "extra_columns": dict}
_TIMING_FIELDS: dict[str, type] = {"adopt_s": float, "generate_s": float, "score_s": float, "queue_s": float}


def encode_job(job: Job) -> bytes:
    """The file of a job. `UnsupportedError` names the dataset column that JSON cannot hold exactly."""
    return _pack(_JOB_FORMAT, _job_header(job), {})


def decode_job(data: bytes | bytearray, *, expect_seq: int | None = None, expect_run: str | None = None) -> Job:
    """The job in `data`; `BadFileError` says what is wrong with it."""
    header, _ = _unpack(data, _JOB_FORMAT, {})
    job = _job(header)
    _expect("sequence number", job.seq, expect_seq)
    _expect("run", job.run_id, expect_run)
    return job


def encode_group(group: RolloutGroup) -> bytes:
    """The file of a finished group. `QueueError` if its arrays do not fit together, e.g.

    A log-probability is NaN.
    """
    import numpy as np

    tensors = {name: array for name in _ARRAYS if (array := getattr(group, name)) is not None}
    reason = _misfit_of_arrays(tensors) or _misfit_of_group(group)
    if reason:
        raise QueueError(f"Group {group.job.seq} cannot be written: {reason}.")
    for what, values in (("completion", group.completions), ("log_extra column", group.extra_columns)):
        _require_exact_json(values, what)
    header = {
        "job": _job_header(group.job),
        "attempt": group.attempt,
        "worker": group.worker,
        "policy_version": group.policy_version,
        "reward_names": list(group.reward_names),
        "metrics": {name: [float(value) for value in values] for name, values in group.metrics.items()},
        "timings": {name: float(getattr(group.timings, name)) for name in _TIMING_FIELDS},
    }
    texts = _to_json({name: getattr(group, name) for name in _TEXT_FIELDS})
    return _pack(_GROUP_FORMAT, header, {**tensors, "texts": np.frombuffer(texts.encode(), np.uint8)})


def decode_group(
    data: bytes | bytearray,
    *,
    expect_seq: int | None = None,
    expect_run: str | None = None,
    expect_attempt: int | None = None,
    expect_worker: str | None = None,
) -> RolloutGroup:
    """The finished group in `data`; `BadFileError` says what is wrong with it.

    Its arrays are writable; those from a bytearray are views of it.
    """
    header, tensors = _unpack(data, _GROUP_FORMAT, _GROUP_TENSORS)
    _check_fields(header, _GROUP_FIELDS, "group")
    _check_fields(header["timings"], _TIMING_FIELDS, "timings")
    texts = _parse(tensors.pop("texts").tobytes())
    _check_fields(texts, _TEXT_FIELDS, "texts")
    if not all(type(name) is str for name in header["reward_names"]):
        _bad("a reward name is not text")
    for named_lists in (header["metrics"], texts["extra_columns"]):
        if not all(type(values) is list for values in named_lists.values()):
            _bad("a metric or an extra column is not a list")
    if not all(type(value) is float for values in header["metrics"].values() for value in values):
        _bad("a metric is not a number")
    group = RolloutGroup(
        job=_job(header["job"]),
        attempt=header["attempt"],
        worker=header["worker"],
        policy_version=header["policy_version"],
        reward_names=tuple(header["reward_names"]),
        completions=texts["completions"],
        metrics=header["metrics"],
        extra_columns=texts["extra_columns"],
        timings=Timings(**header["timings"]),
        tool_mask=tensors.pop("tool_mask", None),
        token_versions=tensors.pop("token_versions", None),
        **tensors,
    )
    _expect("sequence number", group.job.seq, expect_seq)
    _expect("run", group.job.run_id, expect_run)
    _expect("attempt", group.attempt, expect_attempt)
    _expect("worker", group.worker, expect_worker)
    reason = _misfit_of_group(group)
    if reason:
        _bad(reason)
    return group


def _job_header(job: Job) -> dict[str, Any]:
    _require_exact_json(job.row, "dataset column")
    return {name: getattr(job, name) for name in _JOB_FIELDS}


def _job(header: dict[str, Any]) -> Job:
    _check_fields(header, _JOB_FIELDS, "job")
    if header["seq"] < 0 or header["num_generations"] < 1:
        _bad("the job's sequence number or number of generations is out of range")
    return Job(**header)


def _misfit_of_arrays(tensors: Tensors) -> str | None:
    for name, array in tensors.items():
        dtype, dimensions = _GROUP_TENSORS[name]
        if array.dtype.str != _NUMPY_DTYPES[dtype] or array.ndim != dimensions:
            return f"{name} must be {dtype} with {dimensions} dimensions, got {array.dtype} with {array.ndim}"
    return None


def _misfit_of_group(group: RolloutGroup) -> str | None:
    """Why the parts of a group contradict each other, or None. Extremes instead of masks, which cost twice the time."""
    import numpy as np

    least, greatest = np.minimum.reduce, np.maximum.reduce
    ids, generations = group.completion_ids, group.job.num_generations
    lengths, rewards = group.completion_lengths.tolist(), group.rewards.ravel().tolist()
    if len(lengths) != generations or len(group.completions) != generations:
        return f"{len(lengths)} lengths and {len(group.completions)} completions for {generations} generations"
    if min(lengths) < 0 or sum(lengths) != len(ids):
        return f"the completion lengths sum to {sum(lengths)}, there are {len(ids)} tokens"
    if len(group.sampling_logprobs) != len(ids):
        return f"{len(group.sampling_logprobs)} log-probabilities for {len(ids)} tokens"
    if group.rewards.shape != (generations, len(group.reward_names)):
        return f"rewards have shape {group.rewards.shape}, not {(generations, len(group.reward_names))}"
    if not math.isfinite(np.add.reduce(group.sampling_logprobs)) and not np.isfinite(group.sampling_logprobs).all():
        return "a sampling log-probability is not finite"
    if math.inf in rewards or -math.inf in rewards:
        return "a reward is infinite"
    if least(ids, initial=0) < 0 or least(group.prompt_ids, initial=0) < 0:
        return "a token id is negative"
    if group.tool_mask is not None and (len(group.tool_mask) != len(ids) or greatest(group.tool_mask, initial=0) > 1):
        return "the tool mask is not one 0 or 1 a token"
    versions = group.token_versions
    if versions is not None and (
        len(versions) != len(ids) or least(versions, initial=group.policy_version) < group.policy_version
    ):
        return "the token versions are not one a token, none older than the group's"
    return None


def _pack(kind: str, header: dict[str, Any], tensors: Tensors) -> bytes:
    described, end = "", 0
    for name, array in tensors.items():
        begin, end = end, end + array.nbytes
        dtype, shape = _GROUP_TENSORS[name][0], list(array.shape)
        described += f', "{name}": {{"dtype": "{dtype}", "shape": {shape}, "data_offsets": [{begin}, {end}]}}'
    top = f'", "format": "{kind}", "header": {_JSON.encode(_to_json(header))}}}{described}}}'.encode()
    top += b" " * (-(_CHECKSUM_END + len(top)) % 8)
    size = _CHECKSUM_END + len(top) + end
    if size > MAX_FILE_BYTES:
        raise UnsupportedError(
            f"A queue file of {size:,} bytes is over the limit of {MAX_FILE_BYTES:,}: "
            "use fewer or shorter completions a group, or keep large columns out of the dataset."
        )
    before = (_CHECKSUM_END - 8 + len(top)).to_bytes(8, "little") + _BEFORE_CHECKSUM
    after = [top, *(array.data if array.flags.c_contiguous else array.tobytes() for array in tensors.values())]
    return b"".join((before, _checksum(before, *after), *after))


def _unpack(data: bytes | bytearray, kind: str, schema: dict[str, tuple[str, int]]) -> tuple[dict[str, Any], Tensors]:
    if len(data) > MAX_FILE_BYTES:
        _bad(f"{len(data):,} bytes are over the limit of {MAX_FILE_BYTES:,}")
    start = 8 + int.from_bytes(data[:8], "little")
    if len(data) < 8 or start > len(data):
        _bad("it is truncated, or no safetensors file")
    layout = _parse(data[8:start])
    metadata = layout.pop("__metadata__", None)
    if type(metadata) is not dict or not all(type(value) is str for value in metadata.values()):
        _bad("its metadata is not that of a queue file")
    if metadata.get("format") != kind:
        _bad(f"its format is {metadata.get('format', 'none')[:40]!r}, not {kind!r}: another version wrote it")
    if list(metadata) != ["crc32c", "format", "header"]:
        _bad("its metadata is not that of a queue file")
    expected_names = [name for name in schema if name in layout or name not in _OPTIONAL_TENSORS]
    if list(layout) != expected_names:
        _bad(f"its tensors are {list(layout)[:8]}, not {expected_names}")
    end = 0
    for name, about in layout.items():
        end += _tensor_bytes(name, about, schema[name], end)
    if start + end != len(data):
        _bad(f"it has {len(data)} bytes, its tensors need {start + end}: truncated or padded")
    view = memoryview(data)
    checksum = _checksum(view[:_CHECKSUM_AT], view[_CHECKSUM_END:])
    if data[_CHECKSUM_AT:_CHECKSUM_END] != checksum:
        _bad(f"its checksum is {checksum.decode()}, not {metadata['crc32c'][:8]!r}: the content was changed")
    return _parse(metadata["header"]), _arrays(data if type(data) is bytearray else bytearray(data), start, layout)


def _checksum(*parts: bytes | memoryview) -> bytes:
    """Eight hexadecimal digits: CRC-32C of the whole file but the place where they are written."""
    checksum = 0
    for part in parts:
        checksum = crc32c(part, checksum)
    return b"%08x" % checksum


def _arrays(buffer: bytearray, start: int, layout: dict[str, Any]) -> Tensors:
    """The tensors as writable views of a file's bytes, of which those of the first begin at `start`."""
    if not layout:
        return {}
    import numpy as np

    arrays: Tensors = {}
    for name, about in layout.items():
        begin, end = about["data_offsets"]
        count = (end - begin) // _ITEM_BYTES[about["dtype"]]
        flat = np.frombuffer(buffer, _NUMPY_DTYPES[about["dtype"]], count, start + begin if count else 0)
        arrays[name] = flat if len(about["shape"]) == 1 else flat.reshape(about["shape"])
    return arrays


def _tensor_bytes(name: str, about: Any, expected: tuple[str, int], begin: int) -> int:
    """Size of a tensor whose description was found sound; it must start at `begin`."""
    dtype, dimensions = expected
    if type(about) is not dict or about.keys() != {"dtype", "shape", "data_offsets"}:
        _bad(f"tensor {name} is not described as safetensors does")
    shape, offsets = about["shape"], about["data_offsets"]
    if about["dtype"] != dtype or type(shape) is not list or len(shape) != dimensions:
        _bad(f"tensor {name} is not {dtype} with {dimensions} dimensions")
    if not all(type(size) is int and 0 <= size <= MAX_FILE_BYTES for size in shape):
        _bad(f"tensor {name} has an impossible shape")
    size: int = _ITEM_BYTES[dtype]
    for extent in shape:
        size *= extent
    if type(offsets) is not list or [type(offset) for offset in offsets] != [int, int]:
        _bad(f"tensor {name} has no offsets")
    if offsets != [begin, begin + size]:
        _bad(f"tensor {name} lies at {offsets}, not at {[begin, begin + size]}")
    return size


def _to_json(value: dict[str, Any]) -> str:
    text = _JSON.encode(value)
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate in a row: legal in Python, not in UTF-8
        return json.dumps(value)
    return text


def _parse(text: bytes | bytearray | str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        _bad(f"its JSON cannot be read ({type(error).__name__})")
    if type(parsed) is not dict:
        _bad("its JSON is not an object")
    return parsed


def _check_fields(header: dict[str, Any], fields: dict[str, type], what: str) -> None:
    if header.keys() != fields.keys():
        _bad(f"the {what} has fields {sorted(header)[:12]}, not {sorted(fields)}")
    for name, expected in fields.items():
        if type(header[name]) is not expected:
            _bad(f"{name} of the {what} is {type(header[name]).__name__}, not {expected.__name__}")


def _expect(what: str, got: object, expected: object) -> None:
    if expected is not None and got != expected:
        _bad(f"its {what} is {str(got)[:80]!r}, expected {expected!r}")


def _bad(reason: str) -> NoReturn:
    raise BadFileError(reason)


def _require_exact_json(values: dict[str, Any] | list[Any], what: str) -> None:
    """Refuse what JSON would change or cannot hold. NaN and infinity are written and read back."""
    for name, value in values.items() if type(values) is dict else enumerate(values):
        if type(value) is str and type(name) in (str, int):
            continue  # nearly always
        if type(name) not in (str, int):
            raise UnsupportedError(f"A {what} is named by a {type(name).__name__}; only text names can be sent.")
        found = _inexact(value, depth=0)
        if found:
            raise UnsupportedError(
                f"The {what} {name!r} holds {found}, which cannot be sent to workers exactly: a queue file "
                "holds JSON values (text, numbers, true, false, null, lists, objects with text keys). "
                "Convert it or leave it out."
            )


def _inexact(value: Any, depth: int) -> str | None:
    """The first thing in `value` that JSON cannot hold exactly, in words, or None."""
    kind = type(value)
    if kind in (str, float, bool) or value is None:
        return None
    if kind is int:
        return None if value.bit_length() < 4096 else "an integer of over 1,000 digits"
    if depth > 100:
        return "over 100 levels of nesting"
    if kind is dict:
        for key in value:
            if type(key) is not str:
                return f"an object with a key of type {type(key).__name__}"
        inner = value.values()
    elif kind is list:
        inner = value
    else:
        return f"a value of type {kind.__module__}.{kind.__qualname__}".replace("builtins.", "")
    return next((found for item in inner if (found := _inexact(item, depth + 1))), None)
