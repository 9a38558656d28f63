"""Images of a dataset as the bytes of their files, instead of as pixels that would have to be encoded again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
from datasets.features import LargeList

from async_grpo.images import EncodedImage, encoded

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
