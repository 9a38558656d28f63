"""TensorBoard inside this process: its threads, and its data server that ends with us."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterable
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_grpo.errors import UsageError
from async_grpo.serving.guard import is_to_us

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

_REFUSAL = b"""This page is for this machine only, as 127.0.0.1 or localhost, and was asked for under another name.
With a name of its own for this address, any web page could read your run (DNS rebinding).
Behind a proxy of your own, let it send the header Host: localhost
"""


def start(folder: Path, port: int) -> str:
    """Serve the event files below `folder` on 127.0.0.1, by any free port where it is 0; returns the address.

    Raises:
        UsageError: the port is taken.
    """
    from tensorboard import assets, default, program

    logging.getLogger("tensorboard").setLevel(logging.ERROR)

    class Server(program.WerkzeugServer):
        def __init__(self, app: WSGIApplication, flags: Any) -> None:
            super().__init__(only_for_this_machine(app), flags)

    server = program.TensorBoard(default.get_plugins(), assets.get_default_assets_zip_provider(), server_class=Server)
    arguments = ["--logdir", str(folder), "--host", "127.0.0.1", "--port", str(port), "--reload_interval", "5"]
    server.configure(["tensorboard", *arguments])
    try:
        with redirect_stderr(io.StringIO()):  # an advertisement of its faster loader
            return str(server.launch())
    except program.TensorBoardServerException as error:
        raise UsageError(
            f"TensorBoard cannot use port {port}: another program has it, perhaps another TensorBoard. "
            f"Choose one with --port, or --port 0 for any free one."
        ) from error


def only_for_this_machine(app: WSGIApplication) -> WSGIApplication:
    """Answer only requests that were made to 127.0.0.1 or localhost by name, whatever port a tunnel gives them."""

    def guarded(request: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if is_to_us(str(request.get("HTTP_HOST", ""))):
            return app(request, start_response)
        start_response("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
        return [_REFUSAL]

    return guarded
