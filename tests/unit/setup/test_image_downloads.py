"""Images that a prompt names by a URL: the whole download has a deadline and a size."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO

import pytest
from PIL import Image
from transformers import image_utils
from transformers.image_processing_base import ImageProcessingMixin

from async_grpo.errors import UnsupportedError
from async_grpo.setup import image_files


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
        loaded: Image.Image = ImageProcessingMixin().fetch_images(f"{url}/moved")
        return loaded

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
