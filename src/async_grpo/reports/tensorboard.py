"""TensorBoard inside this process: its threads, and its data server that ends with us."""

from __future__ import annotations

import io
import logging
from contextlib import redirect_stderr
from pathlib import Path

from async_grpo.errors import UsageError


def start(folder: Path, port: int) -> str:
    """Serve the event files below `folder` on 127.0.0.1; returns the address.

    Args:
        port: 0 takes any free one.

    Raises:
        UsageError: the port is taken.
    """
    from tensorboard import assets, default, program

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    server = program.TensorBoard(default.get_plugins(), assets.get_default_assets_zip_provider())
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
