"""A guard that lets programs of this machine ask its pages and servers, and no page of the web.

A browser lets any page send requests to 127.0.0.1. It names the page in the header `Origin` where a request could
change something, and in `Host` the name that led to this machine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

OUR_NAMES = ("127.0.0.1", "localhost")
GUARD = f"{__name__}.OnlyThisMachine"  # as vLLM's --middleware wants it
_REFUSAL = b"This server answers programs of this machine, which ask 127.0.0.1 or localhost, and no page of the web.\n"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


def is_to_us(host: str) -> bool:
    """Whether the header `Host` is 127.0.0.1 or localhost, whatever port a tunnel gives them."""
    name, _, port = host.partition(":")
    return name.lower() in OUR_NAMES and (not port or port.isdigit())


class OnlyThisMachine:
    """Around a server's application (ASGI): refuses what a page of the web has asked."""

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or _is_ours([(name.lower(), value) for name, value in scope["headers"]]):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(_REFUSAL)).encode())]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": _REFUSAL})
        else:
            await send({"type": "websocket.close", "code": 1008})


def _is_ours(headers: list[tuple[bytes, bytes]]) -> bool:
    hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
    origins = [value.decode("latin-1") for name, value in headers if name == b"origin"]
    return len(hosts) == 1 and is_to_us(hosts[0]) and all(origin == f"http://{hosts[0]}" for origin in origins)
