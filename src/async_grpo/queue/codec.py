"""Bytes of a queue file <-> `Job` or `RolloutGroup`, as the fields of `records.py` declare.

A file is plain safetensors, so stock tools open it. Its `__metadata__` holds three strings: a CRC-32C (Castagnoli,
which processors compute in hardware) of all other bytes of the file, the format with its number, and one JSON header;
safetensors itself has no checksum. The eight hexadecimal digits of the checksum lie at a fixed offset, so a reader can
check a file without rendering it again. A group's fields are in the header, in tensors, and in a last tensor `texts`:
UTF-8 JSON of the completions and extra columns, which the header would escape twice. Images are in a tensor `images`,
each once, and `image_table` says which belongs where in the JSON. Dates, times, decimals and bytes are texts there,
with their types in `typed_table`. A job has no other tensors.

Nothing is unpickled, and everything is checked: names, dtypes, shapes, offsets, types of header fields, ranges of
values, run, sequence number, attempt and worker. The CRC protects against accidents, not against attackers: the 0700
directory is the boundary of trust.
"""

from __future__ import annotations

import json
import math
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from async_grpo.errors import BadFileError, BadGroupError, QueueError, UnsupportedError
from async_grpo.images import EncodedImage, put_back, taken_out
from async_grpo.queue import typed
from async_grpo.queue.schema import IMAGES, TABLE, TYPED, Dtype, Schema
from async_grpo.records import FORMAT, OLDEST_FORMAT, Job, RolloutGroup, distinct
from async_grpo.rundir.reading import bad, parse_deep_object
from async_grpo.tokens.kept_tokens import unpack

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from async_grpo.queue.names import JobName

    Tensors = dict[str, NDArray[Any]]

MAX_FILE_BYTES = 1 << 28  # larger files are refused before they are read

_JSON = json.JSONEncoder(ensure_ascii=False, check_circular=False)
_BEFORE_CHECKSUM = b'{"__metadata__": {"crc32c": "'
_CHECKSUM_AT = 8 + len(_BEFORE_CHECKSUM)
_CHECKSUM_END = _CHECKSUM_AT + 8


_NUMBERS = range(FORMAT, OLDEST_FORMAT - 1, -1)
_JOBS = {schema.format: schema for schema in (Schema(Job, "job", number) for number in _NUMBERS)}
_GROUPS = {schema.format: schema for schema in (Schema(RolloutGroup, "group", number) for number in _NUMBERS)}
_JOB, _GROUP = next(iter(_JOBS.values())), next(iter(_GROUPS.values()))  # what is written


def encode_job(job: Job) -> bytes:
    """The file of a job. `UnsupportedError` names the dataset column that JSON cannot hold exactly."""
    beside: list[Any] = []
    values = {"header": _JOB.header.of(job, beside)}
    if reason := _JOB.header.misfit(values["header"]):
        raise QueueError(f"Job {job.seq} cannot be written: {reason}.")
    values, tensors = _apart(values, beside)
    return _pack(_JOB, values["header"], tensors)


def decode_job(data: bytes | bytearray, name: JobName | None = None, run_id: str | None = None) -> Job:
    """The job in `data`; `BadFileError` says what is wrong with it.

    Args:
        name, run_id: of the file, and of the run that it is in, where they are known: it may be another's.
    """
    schema, header, tensors = _unpack(data, _JOBS)
    _together({"header": header}, tensors)
    job = Job(**schema.header.fields(header))
    _expect("run", job.run_id, run_id)
    _expect("sequence number", job.seq, name and name.seq)
    return job


def encode_group(group: RolloutGroup) -> bytes:
    """The file of a finished group. `BadGroupError`: its parts contradict each other, or a value is not finite."""
    import numpy as np

    tensors = {name: array for name in _GROUP.arrays if (array := getattr(group, name)) is not None}
    beside: list[Any] = []
    try:
        values = {"header": _GROUP.header.of(group, beside), "texts": _GROUP.texts.of(group, beside)}
    except (TypeError, ValueError, OverflowError) as error:  # a metric that is no number
        raise BadGroupError(f"Group {group.job.seq} cannot be written: {error}.") from error
    if reason := _misfit_of_arrays(tensors, _GROUP) or _contradiction(group, tensors, _GROUP):
        raise BadGroupError(f"Group {group.job.seq} cannot be written: {reason}.")
    values, of_values = _apart(values, beside)
    texts = np.frombuffer(_to_json(values["texts"]), np.uint8)
    return _pack(_GROUP, values["header"], {**tensors, "texts": texts, **of_values})


def decode_group(data: bytes | bytearray, name: JobName | None = None, run_id: str | None = None) -> RolloutGroup:
    """The finished group in `data`; `BadFileError` says what is wrong with it.

    Its arrays are writable; those from a bytearray are views of it.

    Args:
        name, run_id: as for `decode_job`.
    """
    schema, header, tensors = _unpack(data, _GROUPS)
    texts = parse_deep_object(tensors.pop("texts").tobytes())
    _together({"header": header, "texts": texts}, tensors)
    values: dict[str, Any] = {**schema.header.fields(header), **schema.texts.fields(texts), **tensors}
    group = RolloutGroup(**{**values, "reward_names": tuple(distinct(values["reward_names"]))})
    _expect("run", group.job.run_id, run_id)
    _expect("sequence number", group.job.seq, name and name.seq)
    _expect("attempt", group.attempt, name and name.attempt)
    _expect("worker", group.worker, name and name.worker)
    if reason := _misfit_of_arrays(tensors, schema) or _contradiction(group, tensors, schema):
        bad(reason)
    return group


def _apart(values: dict[str, Any], beside: list[Any]) -> tuple[dict[str, Any], Tensors]:
    """The JSON values without what is no JSON, `beside`, and this as tensors."""
    import numpy as np

    found: dict[str, bytes] = {}
    if any(type(one) is EncodedImage for one in beside):
        values, images, paths = taken_out(values)
        table = _to_json({"sizes": [len(image.data) for image in images], "places": paths})
        found |= {IMAGES: b"".join(image.data for image in images), TABLE: table}
    if any(type(one) is not EncodedImage for one in beside):
        values, paths = typed.written(values)
        found[TYPED] = _to_json({"places": paths})
    return values, {name: np.frombuffer(data, np.uint8) for name, data in found.items()}


def _together(values: dict[str, Any], tensors: Tensors) -> None:
    """Put what the tensors of a file hold of its values back into them."""
    if TYPED in tensors:
        typed.read(values, parse_deep_object(tensors.pop(TYPED).tobytes()).get("places"))
    if not tensors.keys().isdisjoint((IMAGES, TABLE)):
        _put_images_back(values, tensors)


def _put_images_back(values: dict[str, Any], tensors: Tensors) -> None:
    if not tensors.keys() >= {IMAGES, TABLE}:
        bad(f"its tensors {IMAGES} and {TABLE} must be given together")
    data, table = tensors.pop(IMAGES).tobytes(), parse_deep_object(tensors.pop(TABLE).tobytes())
    sizes = table.get("sizes")
    if type(sizes) is not list or not all(type(size) is int and size >= 0 for size in sizes) or sum(sizes) != len(data):
        bad("its table of images does not fit their bytes")
    ends = list(accumulate(sizes))
    images = [EncodedImage(data[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
    put_back(values, images, table.get("places"))


def _misfit_of_arrays(tensors: Tensors, schema: Schema) -> str | None:
    """Why one of the arrays is not valid by itself, or None.

    Extremes and sums instead of masks, which take twice the time.
    """
    import numpy as np

    add, least, greatest = np.add.reduce, np.minimum.reduce, np.maximum.reduce
    for name, array in tensors.items():
        about, dimensions = schema.arrays[name], schema.dimensions[name]
        if array.dtype.str != schema.dtypes[name].numpy or array.ndim != dimensions:
            return f"{name} must be {about.kind} with {dimensions} dimensions, got {array.dtype} with {array.ndim}"
        if about.kind == "float32":
            if about.finite and not math.isfinite(add(array)) and not np.isfinite(array).all():
                return f"{name} holds a value that is not finite"
        elif about.least is not None and least(array, initial=about.least) < about.least:
            return f"{name} holds a value below {about.least}"
        elif about.most is not None and greatest(array, initial=about.most) > about.most:
            return f"{name} holds a value above {about.most}"
    return None


def _contradiction(group: RolloutGroup, tensors: Tensors, schema: Schema) -> str | None:
    """Why the parts of a group contradict each other, or None."""
    turns, prompts, generations = group.turn_counts, group.prompt_lengths, group.job.num_generations
    shapes: dict[tuple[str, ...], tuple[int, ...]] = {
        ("P",): (sum(prompts.tolist()),) if prompts is not None else group.prompt_ids.shape,
        ("G",): (generations,),
        ("G", "F"): (generations, len(group.reward_names)),
        ("N",): (sum(group.completion_lengths.tolist()),),
        ("T",): (sum(turns.tolist()),) if turns is not None else (),
        ("K",): group.kept_tokens.shape if group.kept_tokens is not None else (),
    }
    for name, array in tensors.items():
        dimensions = schema.arrays[name].shape
        if array.shape != shapes[dimensions]:
            return f"{name} has shape {array.shape}, not {shapes[dimensions]} ({', '.join(dimensions)})"
    if len(group.completions) != generations:
        return f"there are {len(group.completions)} completions for {generations} generations"
    if len(group.prompts) not in (0, 1, generations):
        return f"there are {len(group.prompts)} prompts for {generations} generations"
    if (group.turn_rewards is None) != (turns is None):
        return "turn_rewards and turn_counts must be given together"
    versions = group.token_versions
    if versions is not None and versions.size and int(versions.min()) < group.policy_version:
        return "a token version is older than the group's"
    if group.kept_tokens is not None:
        try:
            unpack(group.kept_tokens, group.completion_ids)
        except BadFileError as error:
            return str(error)
    return None


def _pack(schema: Schema, header: dict[str, Any], tensors: Tensors) -> bytes:
    described, end = "", 0
    for name, array in tensors.items():
        begin, end = end, end + array.nbytes
        dtype, shape = schema.dtypes[name].safetensors, list(array.shape)
        described += f', "{name}": {{"dtype": "{dtype}", "shape": {shape}, "data_offsets": [{begin}, {end}]}}'
    text = _JSON.encode(_to_json(header).decode())
    top = f'", "format": "{schema.format}", "header": {text}}}{described}}}'.encode()
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


def _unpack(data: bytes | bytearray, schemas: dict[str, Schema]) -> tuple[Schema, dict[str, Any], Tensors]:
    if len(data) > MAX_FILE_BYTES:
        bad(f"{len(data):,} bytes are over the limit of {MAX_FILE_BYTES:,}")
    start = 8 + int.from_bytes(data[:8], "little")
    if len(data) < 8 or start > len(data):
        bad("it is truncated, or no safetensors file")
    layout = parse_deep_object(data[8:start])
    metadata = layout.pop("__metadata__", None)
    if type(metadata) is not dict or not all(type(value) is str for value in metadata.values()):
        bad("its metadata is not that of a queue file")
    form = metadata.get("format", "none")
    schema = schemas.get(form)
    if schema is None:
        known = " or ".join(map(repr, schemas))
        bad(f"its format is {form[:40]!r}, not {known}: another version wrote it")
    if list(metadata) != ["crc32c", "format", "header"]:
        bad("its metadata is not that of a queue file")
    if not schema.required <= layout.keys() <= schema.dtypes.keys():
        bad(f"its tensors are {list(layout)[:8]}, not {list(schema.dtypes)}")
    end = 0
    for name, about in layout.items():
        end += _tensor_bytes(name, about, schema.dtypes[name], schema.dimensions[name], end)
    if start + end != len(data):
        bad(f"it has {len(data)} bytes, its tensors need {start + end}: truncated or padded")
    view = memoryview(data)
    checksum = _checksum(view[:_CHECKSUM_AT], view[_CHECKSUM_END:])
    if data[_CHECKSUM_AT:_CHECKSUM_END] != checksum:
        bad(f"its checksum is {checksum.decode()}, not {metadata['crc32c'][:8]!r}: the content was changed")
    arrays = _arrays(data if type(data) is bytearray else bytearray(data), start, layout, schema) if layout else {}
    return schema, parse_deep_object(metadata["header"]), arrays


def _checksum(*parts: bytes | memoryview) -> bytes:
    """Eight hexadecimal digits: CRC-32C of the whole file but the bytes where they are written."""
    from crc32c import crc32c  # here, as `status` needs names only and is to start quickly

    checksum = 0
    for part in parts:
        checksum = crc32c(part, checksum)
    return b"%08x" % checksum


def _arrays(buffer: bytearray, start: int, layout: dict[str, Any], schema: Schema) -> Tensors:
    """The tensors as writable views of a file's bytes, of which those of the first begin at `start`."""
    import numpy as np

    arrays: Tensors = {}
    for name, about in layout.items():
        begin, end = about["data_offsets"]
        dtype = schema.dtypes[name]
        count = (end - begin) // dtype.item_bytes
        flat = np.frombuffer(buffer, dtype.numpy, count, start + begin if count else 0)
        arrays[name] = flat if len(about["shape"]) == 1 else flat.reshape(about["shape"])
    return arrays


def _tensor_bytes(name: str, about: Any, dtype: Dtype, dimensions: int, begin: int) -> int:
    """Size of a tensor whose description was found sound; it must start at `begin`."""
    if type(about) is not dict or about.keys() != {"dtype", "shape", "data_offsets"}:
        bad(f"tensor {name} is not described as safetensors does")
    shape, offsets = about["shape"], about["data_offsets"]
    if about["dtype"] != dtype.safetensors or type(shape) is not list or len(shape) != dimensions:
        bad(f"tensor {name} is not {dtype.safetensors} with {dimensions} dimensions")
    size = dtype.item_bytes
    for extent in shape:
        if type(extent) is not int or not 0 <= extent <= MAX_FILE_BYTES:
            bad(f"tensor {name} has an impossible shape")
        size *= extent
    if type(offsets) is not list or [type(offset) for offset in offsets] != [int, int]:
        bad(f"tensor {name} has no offsets")
    if offsets != [begin, begin + size]:
        bad(f"tensor {name} lies at {offsets}, not at {[begin, begin + size]}")
    return size


def _to_json(value: dict[str, Any]) -> bytes:
    """A lone surrogate, legal in Python and not in UTF-8, is escaped as JSON escapes it."""
    return _JSON.encode(value).encode(errors="backslashreplace")


def _expect(what: str, got: object, expected: object) -> None:
    if expected is not None and got != expected:
        bad(f"its {what} is {str(got)[:80]!r}, expected {expected!r}")
