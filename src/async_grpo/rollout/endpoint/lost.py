"""Tells the errors of a connection that broke from an agent's other errors."""

from __future__ import annotations

from aiohttp import ServerDisconnectedError

from async_grpo.rollout.failures import causes_of

_HTTPX_DISCONNECTED = "RemoteProtocolError"  # httpx is installed with `openai` only


def is_lost_connection(error: BaseException, base_url: str) -> bool:
    """Whether an agent's error is that its connection to the endpoint broke.

    An error that names another address, such as that of a search engine, is not. Where a client waited for too long, it
    hung up itself.
    """
    causes = causes_of(error)
    if any(not url.startswith(base_url) for url in filter(None, map(_url, causes))):
        return False
    return any(
        isinstance(cause, (ConnectionError, ServerDisconnectedError)) or type(cause).__name__ == _HTTPX_DISCONNECTED
        for cause in causes
    )


def _url(error: BaseException) -> str | None:
    """The address of the request that failed, as `openai`, httpx and requests note it."""
    try:
        return str(error.request.url)  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):  # httpx: it was not noted
        return None
