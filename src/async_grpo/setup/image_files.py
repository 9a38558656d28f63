"""Images of a dataset as the bytes of their files, instead of as pixels that would have to be encoded again.

And those that a prompt names by a URL, which the trainer's processor downloads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
from datasets.features import LargeList

from async_grpo.errors import UnsupportedError
from async_grpo.formatting import size
from async_grpo.images import EncodedImage, encoded

LOAD_S = 60.0  # for the whole download of an image
MOST_BYTES = 1 << 28  # of one
SHOWN = 100  # characters of its URL

Row = dict[str, Any]


def images_as_files(dataset: Any) -> tuple[Any, Callable[[Row], Row]]:
    """`dataset` without the decoding of its images, and what makes an `EncodedImage` of each in a row.

    A stream, and a dataset with a format or a transform of the user's, stay as they are: any value may be an image.
    """
    if not isinstance(dataset, datasets.Dataset) or dataset.format["type"] is not None:
        return dataset, encoded
    features = dataset.features
    if not _has_image(features):
        return dataset, lambda row: row
    undecoded = dataset.with_format(None, dataset.format["columns"])  # a copy
    undecoded.info.features = datasets.Features({name: _undecoded(kind) for name, kind in features.items()})
    return undecoded, partial(_as_files, features)


def _has_image(feature: Any) -> bool:
    return _undecoded(feature) is not feature


def _undecoded(feature: Any) -> Any:
    """The feature with `decode=False` in its images; itself where it has none."""
    if isinstance(feature, datasets.Image):
        return datasets.Image(mode=feature.mode, decode=False) if feature.decode else feature
    if isinstance(feature, dict):
        changed = {name: _undecoded(kind) for name, kind in feature.items()}
        return changed if any(changed[name] is not kind for name, kind in feature.items()) else feature
    if isinstance(feature, (datasets.List, LargeList)) and _undecoded(feature.feature) is not feature.feature:
        inner = _undecoded(feature.feature)
        return datasets.List(inner, feature.length) if isinstance(feature, datasets.List) else LargeList(inner)
    return feature


def _as_files(feature: Any, value: Any) -> Any:
    if value is None or not _has_image(feature):
        return value
    if isinstance(feature, datasets.Image):
        return _as_file(feature, value)
    if isinstance(feature, dict):
        return {name: _as_files(feature[name], item) for name, item in value.items()}
    return [_as_files(feature.feature, item) for item in value]


def _as_file(feature: datasets.Image, stored: dict[str, Any]) -> EncodedImage:
    """The bytes of the file, if the pixels are in them as `datasets` would give them; else these, encoded."""
    data, path = stored["bytes"], stored["path"]
    if data is None and path is not None and Path(path).is_file():
        data = Path(path).read_bytes()
    if data is not None and not feature.mode and not EncodedImage(data).is_turned:
        return EncodedImage(data)
    return EncodedImage.of(feature.decode_example(stored))


def bound_downloads() -> None:
    """Give each download of an image a deadline and a size. transformers sets neither: a server could hold us forever.

    `UnsupportedError` says which image it was.
    """
    from transformers import image_utils

    http: Any = getattr(image_utils, "httpx", None)
    if not isinstance(http, _Bounded | None):  # None: of a later transformers, of whose move the contract test tells
        image_utils.httpx = _Bounded(http)


class _Bounded:
    """What transformers has of httpx."""

    def __init__(self, http: Any) -> None:
        self._http = http

    def __getattr__(self, name: str) -> Any:
        return getattr(self._http, name)

    def get(self, url: str, **options: Any) -> Any:
        """As `httpx.get`; of the answer there is the content only. Its own time limit is one of each read."""
        with ThreadPoolExecutor(max_workers=1) as alone:  # the caller's thread may have an event loop already
            return SimpleNamespace(content=alone.submit(asyncio.run, self._content(url)).result())

    async def _content(self, url: str) -> bytes:
        try:
            return await asyncio.wait_for(self._download(url), LOAD_S)
        except TimeoutError as error:
            raise _refused(url, f"was not there whole after {LOAD_S:g} s") from error

    async def _download(self, url: str) -> bytes:
        data = bytearray()
        async with (
            self._http.AsyncClient(follow_redirects=True, timeout=None) as client,
            client.stream("GET", url) as response,
        ):
            async for part in response.aiter_bytes():
                data += part
                if len(data) > MOST_BYTES:
                    raise _refused(url, f"has more than {size(MOST_BYTES)}")
        return bytes(data)


def _refused(url: str, why: str) -> UnsupportedError:
    shown = f"{url:.{SHOWN}}{'…' if len(url) > SHOWN else ''}"
    return UnsupportedError(f"The image {shown} {why}. Put it where it can be read, or leave out its row.")
