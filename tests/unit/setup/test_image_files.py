"""Images of a dataset travel as their files, and are opened as the pixels that `datasets` gives."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageFeature
from PIL import ExifTags, Image
from PIL.PngImagePlugin import PngInfo
from transformers import image_utils
from transformers.image_processing_base import ImageProcessingMixin

from async_grpo.errors import UnsupportedError
from async_grpo.images import EncodedImage
from async_grpo.setup import image_files
from async_grpo.setup.image_files import images_as_files


def file_of(form: str, *, turned: bool = False) -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)
    exif = Image.Exif()
    if turned:
        exif[ExifTags.Base.Orientation] = 6
    file = BytesIO()
    Image.fromarray(noise).save(file, form, exif=exif)
    return file.getvalue()


def dataset_of(data: bytes | str, feature: ImageFeature | None = None) -> Dataset:
    """One row, whose image is stored as bytes or by its path."""
    stored = {"bytes": None, "path": None, "path" if isinstance(data, str) else "bytes": data}
    return Dataset.from_list([{"image": stored}], features=Features(image=feature or ImageFeature()))


def pixels_and_image(data: bytes | str, feature: ImageFeature | None = None) -> tuple[Image.Image, EncodedImage]:
    """What `datasets` gives for a stored image, and what travels."""
    dataset = dataset_of(data, feature)
    undecoded, as_files = images_as_files(dataset)
    travels = as_files(undecoded[0])["image"]
    assert isinstance(dataset[0]["image"], Image.Image), "the dataset of the user is as it was"
    return dataset[0]["image"], travels


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("turned", [False, True])
def test_the_bytes_of_the_file_unless_it_must_be_turned(form: str, turned: bool) -> None:
    data = file_of(form, turned=turned)
    pixels, travels = pixels_and_image(data)
    assert (travels.data == data) is not turned
    assert travels.open().size == pixels.size == ((6, 9) if turned else (9, 6))
    assert travels.open().tobytes() == pixels.tobytes()


def test_a_look_for_its_orientation_does_not_unfold_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    unfolded: list[Any] = []
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda image: unfolded.append(image))
    assert not any(EncodedImage(file_of(form)).is_turned for form in ("PNG", "JPEG"))
    assert unfolded == []


@pytest.mark.parametrize("keyword", ["XML:com.adobe.xmp", "Raw profile type exif"])
def test_a_png_may_say_in_text_that_it_is_turned(keyword: str) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    profile = "\n".join(["", "exif", str(len(exif.tobytes())), exif.tobytes().hex()])
    texts, file = PngInfo(), BytesIO()
    texts.add_itxt(keyword, profile if "exif" in keyword else '<x tiff:Orientation="6"/>')
    Image.new("RGB", (9, 6)).save(file, "PNG", pnginfo=texts)
    pixels, travels = pixels_and_image(file.getvalue())
    assert pixels.size == travels.open().size == (6, 9)


def test_a_column_that_the_user_hid_stays_hidden() -> None:
    features = Features(image=ImageFeature(), answer=Value("int64"), note=Value("string"))
    row = {"image": {"bytes": file_of("PNG"), "path": None}, "answer": 1, "note": "a"}
    dataset = Dataset.from_list([row], features=features).with_format(None, columns=["image", "answer"])
    undecoded, as_files = images_as_files(dataset)
    assert as_files(undecoded[0]).keys() == dataset[0].keys() == {"image", "answer"}


def test_a_mode_that_the_dataset_asks_for() -> None:
    pixels, travels = pixels_and_image(file_of("JPEG"), ImageFeature(mode="L"))
    assert travels.open().mode == pixels.mode == "L"
    assert travels.open().tobytes() == pixels.tobytes()


def test_a_file_on_disk(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(file_of("JPEG"))
    _, travels = pixels_and_image(str(tmp_path / "a.jpg"))
    assert travels.data == file_of("JPEG")


def test_images_deep_in_a_row_and_rows_without() -> None:
    part = {"type": Value("string"), "image": ImageFeature()}
    features = Features(prompt=List({"content": List(part)}), images=List(ImageFeature()), n=Value("int64"))
    data = file_of("JPEG")
    row = {"prompt": [{"content": [{"type": "image", "image": {"bytes": data}}, {"type": "text", "image": None}]}]}
    dataset = Dataset.from_list([{**row, "images": [], "n": 3}, {"prompt": None, "images": None, "n": 4}], features)
    undecoded, as_files = images_as_files(dataset)
    first, second = (as_files(undecoded[index]) for index in range(2))
    parts = first["prompt"][0]["content"]
    assert [part["image"] for part in parts] == [EncodedImage(data), None]
    assert (first["images"], first["n"]) == ([], 3)
    assert second == {"prompt": None, "images": None, "n": 4}


def test_a_broken_file_is_left_to_the_worker_whose_group_it_costs() -> None:
    undecoded, as_files = images_as_files(dataset_of(b"GIF89a, but broken"))
    with pytest.raises(UnsupportedError):
        as_files(undecoded[0])["image"].open()


def test_a_transform_of_the_user_stays() -> None:
    def shrink(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {"image": [image.resize((3, 3)) for image in rows["image"]]}

    left, as_files = images_as_files(dataset_of(file_of("PNG")).with_transform(shrink))
    assert as_files(left[0])["image"].open().size == (3, 3)


# --- Images that a prompt names by a URL: ------------------------------------------------------------------------


class Handler(BaseHTTPRequestHandler):
    """`/drips` and `/drips-headers` send a byte every now and then, for ever; `/moved` leads to the image."""

    over = threading.Event()

    def do_GET(self) -> None:
        with suppress(OSError):
            if self.path == "/moved":
                self.send_response(302)
                self.send_header("Location", "/image.png")
                self.end_headers()
                return
            if self.path != "/drips-headers":
                self.send_response(200)
                self.end_headers()
            while self.path.startswith("/drips") and not self.over.wait(0.01):
                self.wfile.write(b"H")
            file = BytesIO()
            Image.new("RGB", (2, 1), (1, 2, 3)).save(file, "PNG")
            self.wfile.write(file.getvalue())

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(image_utils, "httpx", image_utils.httpx)  # as it was, afterwards
    image_files.bound_downloads()
    image_files.bound_downloads()
    Handler.over.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        Handler.over.set()
        server.shutdown()


def test_an_image_is_loaded_also_inside_an_event_loop(url: str) -> None:
    async def load() -> Image.Image:
        return ImageProcessingMixin().fetch_images(f"{url}/moved")

    assert asyncio.run(load()).getpixel((1, 0)) == (1, 2, 3)


@pytest.mark.parametrize("path", ["drips", "drips-headers"])
def test_a_server_that_drips_holds_nobody_forever(url: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_files, "LOAD_S", 0.2)
    with pytest.raises(UnsupportedError, match=rf"The image {url}/{path} was not there whole after 0.2 s\. .*its row"):
        ImageProcessingMixin().fetch_images(f"{url}/{path}")


def test_an_image_may_not_have_any_size(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_files, "MOST_BYTES", 50)
    with pytest.raises(UnsupportedError, match=r"image\.png has more than 50 bytes"):
        ImageProcessingMixin().fetch_images(f"{url}/image.png")
