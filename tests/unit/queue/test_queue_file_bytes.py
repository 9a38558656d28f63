"""Bytes of queue files: what goes in comes out exactly, images too; stock tools open it, the rest is refused."""

from __future__ import annotations

import json
import math
import random
import warnings
import zlib
from dataclasses import replace
from functools import reduce
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import safetensors
from PIL import Image
from queue_samples import RUN, make_group, make_job, same_group

from async_grpo.errors import BadFileError, BadGroupError, QueueError, UnsupportedError
from async_grpo.images import MOST_PIXELS, EncodedImage, encoded, opened, put_back
from async_grpo.queue.codec import decode_group, decode_job, encode_group, encode_job
from async_grpo.queue.names import COMPLETE, JobName


def test_a_row_may_hold_nan_infinity_and_lone_surrogates() -> None:
    row = decode_job(encode_job(make_job(1, nan=math.nan, inf=-math.inf, odd="\ud800 é"))).row
    assert math.isnan(row["nan"])
    assert row["inf"] == -math.inf
    assert row["odd"] == "\ud800 é"


@pytest.mark.parametrize("tool_mask", [None, np.array([0, 1, 1, 0, 0, 1, 1], np.uint8)])
def test_a_group_comes_back_exactly(tool_mask: Any) -> None:
    group = make_group(make_job(3), attempt=2, worker="dev4", tool_mask=tool_mask)
    back = decode_group(encode_group(group), JobName(3, 2, COMPLETE, "dev4"), RUN)
    assert same_group(group, back)
    assert back.completion_ids.flags.writeable  # torch.from_numpy takes it without a warning


def test_stock_safetensors_opens_both(tmp_path: Any) -> None:
    job = make_job(1, odd="\ud800 é")
    (tmp_path / "job").write_bytes(encode_job(job))
    (tmp_path / "group").write_bytes(encode_group(make_group(job)))
    with safetensors.safe_open(tmp_path / "job", "np") as file:
        assert set(file.metadata()) == {"format", "header", "crc32c"}
    with safetensors.safe_open(tmp_path / "group", "np") as file:
        assert file.get_tensor("completion_lengths").tolist() == [3, 4]


TURNS = np.array([1, 1], np.int32)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("sampling_logprobs", np.full(7, np.nan, np.float32), "sampling_logprobs holds a value that is not finite"),
        ("rewards", np.zeros((2, 1), np.float32), "rewards has shape"),
        ("completion_lengths", np.array([3, 5], np.int32), r"completion_ids has shape \(7,\), not \(8,\)"),
        ("completion_lengths", np.array([-1, 8], np.int32), "completion_lengths holds a value below 0"),
        ("completion_ids", np.zeros(7, np.int64), "completion_ids must be int32"),
        ("completion_ids", np.full(7, -1, np.int32), "completion_ids holds a value below 0"),
        ("tool_mask", np.full(7, 2, np.uint8), "tool_mask holds a value above 1"),
        ("completions", ["one"], "1 completions"),
        ("prompts", ["one", "two", "three"], "3 prompts for 2 generations"),
        ("prompt_lengths", np.array([2, 2], np.int32), r"prompt_ids has shape \(5,\), not \(4,\)"),
        ("metrics", {"mood": ["good"]}, "could not convert string to float"),
        ("token_versions", np.full(7, 2, np.int32), "a token version is older"),
        ("turn_counts", TURNS, "must be given together"),
        ("turn_rewards", np.zeros(3, np.float32), "turn_rewards has shape"),
    ],
)
def test_a_group_that_contradicts_itself_is_not_written(field: str, value: Any, reason: str) -> None:
    changes = {"turn_counts": TURNS} if field == "turn_rewards" else {}
    with pytest.raises(BadGroupError, match=reason):
        encode_group(make_group(make_job(1), **changes, **{field: value}))


@pytest.mark.parametrize("levels", [101, 102, 500, 900])
@pytest.mark.parametrize("column", ["row", "completions", "extra_columns"])
def test_a_value_is_nested_no_deeper_than_what_is_written(
    column: str, levels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code that goes through such a value would raise RecursionError, at some 490 levels already."""
    value = reduce(lambda inner, _: [inner], range(levels), "x")
    if column == "row":
        group = make_group(make_job(1, deep=value))
    else:
        group = make_group(make_job(1), **{column: [value, "y"] if column == "completions" else {"note": value}})
    if levels == 101:
        decode_group(encode_group(group))
        return
    with pytest.raises(UnsupportedError, match="over 100 levels of nesting"):
        encode_group(group)
    monkeypatch.setattr("async_grpo.queue.schema._inexact", lambda *_, **__: None)
    with pytest.raises(BadFileError, match="is nested too deeply"):
        decode_group(encode_group(group))


def test_a_file_of_an_unknown_format_is_refused_by_name() -> None:
    newer = encode_job(make_job(1)).replace(b"async-grpo-job/2", b"async-grpo-job/3")
    with pytest.raises(BadFileError, match="is 'async-grpo-job/3', not 'async-grpo-job/2' or 'async-grpo-job/1'"):
        decode_job(newer)


def test_every_byte_is_under_the_checksum() -> None:
    data = encode_job(make_job(1))
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 0x01
        with pytest.raises(BadFileError):
            decode_job(damaged)


@pytest.mark.parametrize("number", [10**4000, -(10**4000), 1 << 63])
@pytest.mark.parametrize("field", ["policy_version", "attempt"])
def test_a_group_with_a_number_that_torch_and_numpy_cannot_hold_is_refused(field: str, number: int) -> None:
    data = encode_group(make_group(make_job(1), **{field: number}))
    with pytest.raises(BadFileError, match=f"{field} is not a valid integer"):
        decode_group(data)
    with pytest.raises(QueueError, match="seed is not a valid integer"):
        encode_job(replace(make_job(1), seed=number))


@pytest.mark.parametrize(("version", "sound"), [(1 << 31, False), (3, True), (-(1 << 40), True)])
def test_token_versions_are_compared_with_any_policy_version(version: int, sound: bool) -> None:
    group = make_group(make_job(1), token_versions=np.full(7, 3, np.int32), policy_version=version)
    if sound:
        assert same_group(decode_group(encode_group(group)), group)
    else:
        with pytest.raises(QueueError, match="a token version is older"):
            encode_group(group)


# --- Images of jobs and groups: ----------------------------------------------------------------------------------


def picture(mode: str = "RGB", seed: int = 0) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (5, 7, 4), dtype=np.uint8)
    if mode == "I;16":
        return Image.fromarray(noise[..., 0].astype(np.uint16) * 257)
    if mode == "F":
        return Image.fromarray(noise[..., 0].astype(np.float32) / 7)
    if mode == "I":
        return Image.fromarray(noise[..., 0].astype(np.int32) * 100_003)
    if mode == "LAB":
        return Image.frombytes("LAB", (7, 5), noise[..., :3].tobytes())
    return Image.frombytes("RGBA", (7, 5), noise.tobytes()).convert("RGB").convert(mode)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I", "F", "CMYK", "YCbCr", "LAB"])
def test_the_pixels_of_every_mode_survive(mode: str) -> None:
    image = picture(mode)
    assert image.mode == mode
    again = EncodedImage.of(image).open()
    assert (again.mode, again.size) == (mode, (7, 5))
    assert again.tobytes() == image.tobytes()
    assert again.getpalette() == image.getpalette()


def test_a_mode_that_no_format_holds_is_refused_with_the_way_out() -> None:
    with pytest.raises(UnsupportedError, match=r"'HSV'.*convert\(\"RGB\"\)"):
        EncodedImage.of(picture().convert("HSV"))


def test_transparency_of_a_palette_survives() -> None:
    image = picture("P")
    image.info["transparency"] = 3
    assert EncodedImage.of(image).open().convert("RGBA").tobytes() == image.convert("RGBA").tobytes()


def test_images_anywhere_in_a_row_reach_the_worker() -> None:
    first, second = picture(seed=1), picture("L", seed=2)
    row = {
        "prompt": [{"role": "user", "content": [{"type": "image", "image": first}, {"type": "text", "text": "?"}]}],
        "images": [first, second],
        "image": None,
    }
    job = make_job(3, **encoded(row))
    data = encode_job(job)
    assert decode_job(data) == job
    got = opened(decode_job(data).row)
    assert got["images"][0].tobytes() == first.tobytes()
    assert got["images"][1].tobytes() == second.tobytes()
    assert got["prompt"][0]["content"][0]["image"] is got["images"][0], "the same image is opened once"
    assert got["image"] is None


def test_a_file_holds_each_image_once_and_stock_tools_open_it(tmp_path: Any) -> None:
    image = EncodedImage.of(picture())
    job = make_job(3, image=image, images=[image, image])
    group = replace(make_group(job), completions=[[{"role": "tool", "content": [{"image": image}]}], "text"])
    (tmp_path / "group").write_bytes(encode_group(group))
    assert decode_group((tmp_path / "group").read_bytes()).completions == group.completions
    with safetensors.safe_open(tmp_path / "group", "np") as file:
        assert file.get_tensor("images").tobytes() == image.data
        table = json.loads(file.get_tensor("image_table").tobytes())
    assert table["sizes"] == [len(image.data)]
    assert [0, "header", "job", "row", "images", 1] in table["places"]
    assert [0, "texts", "completions", 0, 0, "content", 0, "image"] in table["places"]


def test_text_is_left_as_it_is() -> None:
    row = {"prompt": "a", "tags": ["x", {"y": 1}]}
    assert encoded(row) is row
    assert opened(row) is row
    assert b"image_table" not in encode_job(make_job(1, **row))


MISFITS = [None, 5, [[0]], [["0", "header"]], [[0, "header", "nowhere"]], [[0, "header", "text", 0]]]
MISFITS += [[[1, "header", "free"]], [[-1, "header", "free"]], [[0, "header", "text"]], [[0, "header", ["free"]]]]
MISFITS += [[[0, "header", "free"], [0, "header", "free"]]]


@pytest.mark.parametrize("table", MISFITS)
def test_a_table_of_images_that_does_not_fit_is_refused(table: Any) -> None:
    with pytest.raises(BadFileError, match="table of images"):
        put_back({"header": {"free": None, "text": "a"}}, [EncodedImage(b"x")], table)


def png(width: int, height: int) -> bytes:
    """A PNG file of one colour, of any size and hardly any bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    shape = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([1, 0, 0, 0, 0])
    rows = zlib.compress(bytes(height * (1 + (width + 7) // 8)), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", shape) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_a_bomb_is_refused_before_it_unfolds() -> None:
    assert EncodedImage(png(64, 64)).open().size == (64, 64)
    side = int(MOST_PIXELS**0.5) + 1
    with pytest.raises(UnsupportedError, match="over the limit"):
        EncodedImage(png(side, side)).open()


def test_broken_images_are_refused_with_a_sentence() -> None:
    """A thousand damaged files: an image, or `UnsupportedError`; nothing else, and never a long wait."""
    draw = random.Random(7)
    files = [EncodedImage.of(picture(mode)).data for mode in ("RGB", "P", "CMYK")]
    for form in ("JPEG", "GIF", "BMP", "WEBP", "PPM"):
        file = BytesIO()
        picture().save(file, form)
        files.append(file.getvalue())
    refused = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(1000):
            data = bytearray(draw.choice(files))
            for _ in range(draw.randint(1, 4)):
                data[draw.randrange(len(data))] = draw.randrange(256)
            if draw.random() < 0.3:
                del data[draw.randrange(len(data)) :]
            try:
                EncodedImage(bytes(data)).open()
            except UnsupportedError as error:
                refused += 1
                assert "Repair it" in str(error) or "over the limit" in str(error)
    assert refused > 100


@pytest.mark.parametrize("data", [b"", b"GIF89a", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"<svg/>", b"\x89PNG\r\n\x1a\n"])
def test_what_is_no_image_is_refused(data: bytes) -> None:
    with pytest.raises(UnsupportedError, match="cannot be read"):
        EncodedImage(data).open()


def test_an_image_whose_file_turns_out_to_be_broken_is_named() -> None:
    """An image of a tool or of `log_extra`: PIL reads pixels when they are asked for."""
    file = BytesIO()
    Image.effect_noise((64, 64), 50).save(file, "JPEG")
    with pytest.raises(UnsupportedError, match=r"64 x 64 pixels cannot be read \(OSError: .*truncated"):
        encoded([Image.open(BytesIO(file.getvalue()[:-900]))])
