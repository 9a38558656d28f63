"""Images in rows, prompts and completions: PIL objects for the user's code, files of images in the queue.

An `EncodedImage` stands in a record wherever the user's data has an image. A queue file keeps the bytes of all of them
in one tensor, each once, and null in their places in its JSON; a table says which belongs where.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from typing import TYPE_CHECKING, Any

from async_grpo.errors import BadFileError, UnsupportedError
from async_grpo.formatting import size

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PIXELS = 1 << 26  # of an image; opening a larger one is refused: a small file may unfold to any size
_READ = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000")  # PIL hands others to other programs
_WRITTEN = {"PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"), "TIFF": ("CMYK", "LAB", "I", "F")}
_YCBCR, _MODE = "YCbCr", "async-grpo mode"  # Pillow 12 cannot read its own TIFF of this mode: a PNG that names it
_TURNING = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")  # one of these names a PNG's orientation
_FORMATS = {mode: name for name, modes in _WRITTEN.items() for mode in modes}  # without loss

MODEL_INPUTS = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)
"""What TRL's loss has of images: keys of its inputs, parameters of `_get_per_token_logps_and_entropies`."""

KeyPath = list[str | int]  # keys and indices that lead to an image


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An image as the bytes of its file."""

    data: bytes

    def __repr__(self) -> str:
        return f"<image of {size(len(self.data))}>"

    @classmethod
    def of(cls, image: Image) -> EncodedImage:
        """Encode pixels without loss. `UnsupportedError`: they cannot be read, or no format holds this mode."""
        if image.mode not in _FORMATS and image.mode != _YCBCR:
            raise UnsupportedError(
                f"An image of PIL's mode {image.mode!r} cannot be sent to workers exactly. Convert it, for example "
                'with image.convert("RGB").'
            )
        file = BytesIO()
        try:
            kind = _FORMATS.get(image.mode, "PNG")
            options: dict[str, Any] = {"compress_level": 1} if kind == "PNG" else {}
            if image.mode == _YCBCR:
                image, options["pnginfo"] = _as_rgb(image)
            image.save(file, kind, **options)
        except Exception as error:  # PIL reads a file's pixels only now
            raise UnsupportedError(
                f"An image of {image.width} x {image.height} pixels cannot be read ({type(error).__name__}: {error}). "
                "Repair it or leave it out."
            ) from error
        return cls(file.getvalue())

    def open(self) -> Image:
        """The pixels. `UnsupportedError`: the bytes are no image, or of too large a one."""
        import PIL.Image

        try:
            image = self._described()
            image.load()
            if image.info.get(_MODE) == _YCBCR and image.mode == "RGB":
                return PIL.Image.frombytes(_YCBCR, image.size, image.tobytes())
        except UnsupportedError:
            raise
        except Exception as error:  # whatever PIL's many readers raise for broken bytes
            raise UnsupportedError(
                f"An image of {size(len(self.data))} cannot be read ({type(error).__name__}: {error}). "
                "Repair it or take its row out of the dataset."
            ) from error
        return image

    @property
    def is_turned(self) -> bool:
        """Whether the file says that its pixels are to be turned; False where it cannot be read."""
        from PIL.ExifTags import Base

        try:
            image = self._described()
            if image.format == "PNG" and not any(name in self.data for name in _TURNING):
                return False  # PIL would unfold the pixels to look for them at the end
            return Base.Orientation in image.getexif()
        except Exception:  # noqa: BLE001  # see `open`
            return False

    def _described(self) -> Image:
        """The image before its pixels are unfolded."""
        import PIL.Image

        PIL.Image.init()  # all readers; it does nothing the second time
        image = PIL.Image.open(BytesIO(self.data), formats=_READ)
        if image.width * image.height > MOST_PIXELS:
            raise UnsupportedError(
                f"An image has {image.width:,} x {image.height:,} pixels, over the limit of {MOST_PIXELS:,} in all. "
                "Make it smaller or take its row out of the dataset."
            )
        return image


def _as_rgb(image: Image) -> tuple[Image, Any]:
    """The same bytes as an image of mode RGB, and the text of a PNG that names the true mode."""
    import PIL.Image
    from PIL.PngImagePlugin import PngInfo

    named = PngInfo()
    named.add_text(_MODE, _YCBCR)
    return PIL.Image.frombytes("RGB", image.size, image.tobytes()), named


def encoded(value: Any) -> Any:
    """`value` with an `EncodedImage` in place of each PIL image; `value` itself where it has none."""
    pil = sys.modules.get("PIL.Image")
    if pil is None:  # nobody can have made an image
        return value
    known: dict[int, EncodedImage] = {}

    def encode(image: Any) -> EncodedImage:
        if id(image) not in known:
            known[id(image)] = EncodedImage.of(image)
        return known[id(image)]

    return _replaced(value, lambda leaf: encode(leaf) if isinstance(leaf, pil.Image) else leaf)


def opened(value: Any) -> Any:
    """`value` with a PIL image in place of each `EncodedImage`; `value` itself where it has none."""
    decode = cache(EncodedImage.open)  # equal ones once
    return _replaced(value, lambda leaf: decode(leaf) if type(leaf) is EncodedImage else leaf)


def encoded_in(value: Any) -> list[EncodedImage]:
    """The images anywhere in `value`, each once, in their order."""
    return taken_out({"": value})[1]


def images_in(messages: Any, role: str | None = None) -> list[Any]:
    """The images in a prompt or a completion, or in its messages of one role, in their order."""
    found = []
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and role in (None, message.get("role")):
            content = message.get("content")
            parts = content if isinstance(content, list) else []  # of which a tool may have returned anything
            found += [part["image"] for part in parts if isinstance(part, dict) and part.get("type") == "image"]
    return found


def _replaced(value: Any, replace: Callable[[Any], Any]) -> Any:
    """`value` with its leaves replaced. What stays the same is shared with it."""
    kind = type(value)
    if kind is str:
        return value
    if kind is dict:
        entries = {name: _replaced(item, replace) for name, item in value.items()}
        return entries if any(entries[name] is not item for name, item in value.items()) else value
    if kind is list:
        items = [_replaced(item, replace) for item in value]
        return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    return replace(value)


def taken_out(values: dict[str, Any]) -> tuple[dict[str, Any], list[EncodedImage], list[list[Any]]]:
    """`values` with null in place of each image, the images, each once, and the table: `[image, key, key, …]`."""
    images: dict[EncodedImage, int] = {}
    table: list[list[Any]] = []

    def take(value: Any, path: KeyPath) -> Any:
        if type(value) is dict:
            return {name: take(item, [*path, name]) for name, item in value.items()}
        if type(value) is list:
            return [take(item, [*path, index]) for index, item in enumerate(value)]
        if type(value) is EncodedImage:
            table.append([images.setdefault(value, len(images)), *path])
            return None
        return value

    return take(values, []), list(images), table


def put_back(values: dict[str, Any], images: list[EncodedImage], table: Any) -> None:
    """Undo `taken_out`, in place. `BadFileError`: the table does not fit."""
    try:
        for index, *path in table:
            inner: Any = values
            for key in path[:-1]:
                inner = inner[key]
            if inner[path[-1]] is not None or type(index) is not int or index < 0:
                raise LookupError("the place of an image is taken")
            inner[path[-1]] = images[index]
    except (LookupError, TypeError, ValueError) as error:
        raise BadFileError(f"its table of images does not fit: {error}") from error
