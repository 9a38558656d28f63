"""Which errors of an agent are a connection to the endpoint that broke, and which are its own."""

from __future__ import annotations

import http.client
from types import SimpleNamespace

import aiohttp
import pytest

from async_grpo.rollout.endpoint.harness import is_lost_connection

BASE = "http://127.0.0.1:4242/v1"


def raised_for(cause: BaseException, error: Exception) -> Exception:
    error.__cause__ = cause
    return error


def with_url(url: str, error: Exception) -> Exception:
    error.request = SimpleNamespace(url=url)  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (ConnectionResetError(), True),
        (http.client.RemoteDisconnected("closed"), True),
        (aiohttp.ServerDisconnectedError(), True),
        (raised_for(BrokenPipeError(), ValueError("no answer")), True),
        (ExceptionGroup("tasks", [ValueError(), ConnectionResetError()]), True),
        (raised_for(ConnectionResetError(), with_url(f"{BASE}/chat/completions", ValueError())), True),
        (raised_for(ConnectionResetError(), with_url("https://search.example/?q=a", ValueError())), False),
        (ValueError("of its own"), False),
        (TimeoutError("it hung up itself"), False),
    ],
)
def test_errors_of_connections(error: Exception, lost: bool) -> None:
    assert is_lost_connection(error, BASE) is lost


def test_the_errors_of_httpx_and_openai() -> None:
    httpx, openai = pytest.importorskip("httpx"), pytest.importorskip("openai")
    for url, lost in ((f"{BASE}/chat/completions", True), ("https://search.example", False)):
        request = httpx.Request("POST", url)
        disconnected = httpx.RemoteProtocolError("Server disconnected", request=request)
        assert is_lost_connection(disconnected, BASE) is lost
        assert is_lost_connection(raised_for(disconnected, openai.APIConnectionError(request=request)), BASE) is lost
    assert is_lost_connection(httpx.RemoteProtocolError("Server disconnected"), BASE)
    assert not is_lost_connection(openai.APITimeoutError(httpx.Request("POST", BASE)), BASE)
