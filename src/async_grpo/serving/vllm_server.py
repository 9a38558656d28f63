"""A vLLM server as a child of this process.

    with VLLMServerProcess(ServerPlan(model="Qwen/Qwen3-0.6B", port=8000, log=Path("vllm.log"))) as server:
        server.wait_ready()  # asks, and shows the server's last line meanwhile
        ...                  # requests to server.base_url; server.running; server.restart()

The server is the leader of a process group of its own. It is signalled only before it has been waited for, so nothing
else can have its pid, and whatever of the group is left after it is killed. If this process is killed, it ends as well.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection, HTTPException
from importlib.metadata import entry_points
from pathlib import Path
from typing import Self

import psutil

from async_grpo.errors import BadFileError, GeneratorError, UsageError
from async_grpo.formatting import printable
from async_grpo.log import logger
from async_grpo.rundir.reading import read_end
from async_grpo.serving.guard import GUARD
from async_grpo.setup.process import has_ended, path_to_us, start_logged, within
from async_grpo.telemetry.waiting import Reminder

PLUGINS = "vllm.general_plugins"  # entry points that vLLM calls in each of its processes
SHARED_MEMORY, NCCL = "async_grpo_ipc", "nccl"  # how new weights come
READY_S = 300.0
GRACE_S = 20.0  # after SIGTERM
LOOK_S = 5.0  # for an answer to /health
POLL_S = 0.2
END_S = 5.0  # after SIGTERM to one whose weights are another's: it has nothing to save
STARTS = 3  # in a row of a server that is killed before it is ready
DEATHS = 3  # of a server without an answer in between; then something is wrong
LAST_BYTES = 1 << 16
LAST_LINES = 20
TAKEN = "ddress already in use"
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # the requests that bring new weights
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # servers share the cores: none of them may claim one for itself
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    model: str  # a folder, or a name on the hub
    port: int  # if it is taken, the next free one
    log: Path  # standard output and standard error are appended to it
    host: str = "127.0.0.1"
    tensor_parallel_size: int = 1
    weights: str = SHARED_MEMORY
    ready_s: float = READY_S  # how long it may take to answer for the first time
    arguments: Sequence[str] = ()  # more of `vllm serve`
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def command(self) -> list[str]:
        """For a child of this process."""
        return [
            *(sys.executable, "-Pm", "async_grpo.serving.entry", str(os.getpid())),
            *("--model", self.model, "--host", self.host, "--port", str(self.port)),
            *("--tensor-parallel-size", str(self.tensor_parallel_size)),
            *("--weight-transfer-config", json.dumps({"backend": self.weights})),
            *("--logprobs-mode", "processed_logprobs"),  # of the distribution that is sampled from
            *("--middleware", GUARD),  # by itself, vLLM lets every page of the web ask it
            *self.arguments,
        ]

    def environment(self) -> dict[str, str]:
        env = {**ENVIRONMENT, **self.env, "PYTHONPATH": path_to_us(self.env), "VLLM_SERVER_DEV_MODE": "1"}
        plugins = env.get("VLLM_PLUGINS")
        if plugins is not None and SHARED_MEMORY not in plugins.split(","):
            env["VLLM_PLUGINS"] = ",".join(filter(None, (plugins, SHARED_MEMORY)))
        return env


class VLLMServerProcess:
    """One server. Use it from one thread; as a context manager it starts at the beginning and ends at the end."""

    def __init__(self, plan: ServerPlan) -> None:
        self._plan = plan
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self._deaths = 0  # since its last answer
        self.starts = 0

    @property
    def port(self) -> int:
        return self._plan.port

    @property
    def base_url(self) -> str:
        return f"http://{self._plan.host}:{self._plan.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server has not been started"
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process is there; it may be loading, or hang."""
        return self._process is not None and not has_ended(self._process)

    def start(self) -> None:
        """Start the server, on the next free port if its own is taken, and return at once.

        Raises:
            UsageError: vLLM would not find our backend for weights.
        """
        assert not self.running, "the server runs already"
        if self._plan.weights == SHARED_MEMORY and not entry_points(group=PLUGINS, name=SHARED_MEMORY):
            raise UsageError(
                "vLLM would not find the weight-transfer backend async_grpo_ipc: this package was installed before it "
                "had one, or is not installed at all. Install it again where vLLM is: pip install -e ."
            )
        port = free_port(self._plan.host, self._plan.port)
        if port != self._plan.port:
            logger.warning("port {} is taken: the vLLM server listens on {}", self._plan.port, port)
            self._plan = replace(self._plan, port=port)
        log = self._plan.log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = log.stat().st_size if log.exists() else 0
        self._process = start_logged(self._plan.command(), self._plan.environment(), log)
        self.starts += 1

    def answers(self) -> bool:
        """Whether the server says that it is well: itself, not another program that took its port first."""
        return self._says_well() and self.running and self._listens()

    def _says_well(self) -> bool:
        with closing(HTTPConnection(self._plan.host, self.port, timeout=LOOK_S)) as connection:
            try:
                connection.request("GET", "/health")
                return connection.getresponse().status == 200
            except (OSError, HTTPException):
                return False

    def _has_lost_its_port(self) -> bool:
        """Whether another program listens on it. vLLM does so only when it has loaded, and hangs if it cannot."""
        return not is_free(self.port, self._plan.host) and not self._listens()

    def _listens(self) -> bool:
        """Whether one of its processes has the port, as far as this machine lets us look."""
        try:
            leader = psutil.Process(self.pid)
            return any(map(self._has_port, (leader, *leader.children(recursive=True))))
        except psutil.NoSuchProcess:
            return False
        except psutil.AccessDenied:
            return True

    def _has_port(self, process: psutil.Process) -> bool:
        with suppress(psutil.NoSuchProcess):  # a child may have ended
            listening = [one for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
            return any(one.laddr.port == self.port for one in listening)
        return False

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Wait until it answers; it is started again if it is killed meanwhile, or its port was taken from it.

        Raises:
            GeneratorError: it ended, was killed or lost its port three times, or did not answer in time.
        """
        timeout_s = self._plan.ready_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        last_start = self.starts + STARTS - 1
        with Reminder(lambda: f"the vLLM server at {self.base_url} ({self.last_line()})") as reminder:
            while not self.answers():
                if not self.running or self._has_lost_its_port():
                    self._start_again_or_raise(last_start)
                if time.monotonic() > deadline:
                    raise GeneratorError(
                        f"Timed out after {timeout_s:.0f} s waiting for the vLLM server at {self.base_url}. It last "
                        f"wrote: {self.last_line()}. All of it is in {self._plan.log}."
                    )
                reminder.tick()
                time.sleep(POLL_S)

    def restart(self) -> None:
        """End what is left of it and start it again; `wait_ready` comes next."""
        self.end(grace_s=0.0)
        logger.warning("starting the vLLM server at {} again", self.base_url)
        self.start()

    def answered(self) -> None:
        """Forget its deaths until now: an answer has come back."""
        self._deaths = 0

    def revive(self, error: Exception) -> None:
        """`restart` a server whose death showed by `error`.

        Raises:
            GeneratorError: it died three times before without an answer in between.
        """
        self._deaths += 1
        if self._deaths > DEATHS:
            raise GeneratorError(
                f"The vLLM server died {self._deaths} times without an answer in between. Its last words, from "
                f"{self._plan.log}:\n{self.last_words()}"
            ) from error
        logger.warning("the vLLM server at {} died and is started again: {}", self.base_url, error)
        self.restart()

    def end(self, grace_s: float = GRACE_S) -> None:
        """SIGTERM, after a grace SIGKILL, and SIGKILL to what it left behind. Does nothing where none runs."""
        if self._process is None:
            return
        if grace_s > 0:
            self._process.send_signal(signal.SIGTERM)
        within(grace_s, lambda: not self.running, POLL_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its leader has not been waited for, so it is still this one
        self._process.wait()
        self._process = None

    def last_line(self) -> str:
        """The line that it wrote last, for people."""
        lines = self.last_words().splitlines()
        return lines[-1] if lines else "it has written nothing yet"

    def last_words(self) -> str:
        """The last lines since it was started."""
        with suppress(OSError, BadFileError):
            written, start = read_end(self._plan.log, LAST_BYTES)
            lines = printable(written[max(0, self._log_start - start) :].decode(errors="replace")).splitlines()
            return "\n".join([line.strip() for line in lines if line.strip()][-LAST_LINES:])
        return ""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    def _start_again_or_raise(self, last_start: int) -> None:
        words = self.last_words()
        assert self._process is not None
        status = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        killed = status is not None and status.si_code != os.CLD_EXITED
        lives = status is None  # with its port taken
        if self.starts < last_start and (killed or lives or TAKEN in words):
            self.restart()
            return
        self.end(grace_s=0.0)
        how = "was killed" if killed else "lost its port to another program" if lives else "ended"
        raise GeneratorError(
            f"The vLLM server at {self.base_url} {how} before it was ready. Its last words, from {self._plan.log}:\n"
            f"{words}"
        )


def flags(options: Mapping[str, object]) -> list[str]:
    """`{"max_num_seqs": 8, "enforce_eager": True, "max_model_len": None}` -> `--max-num-seqs 8 --enforce-eager`."""
    found: list[str] = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            found.append(flag)
        elif value is not None and value is not False:
            found += [flag, str(value)]
    return found


def free_port(host: str, first: int) -> int:
    """The first port from `first` on that nobody listens on.

    Raises:
        GeneratorError: none of the next hundred is free.
    """
    for port in range(first, min(first + 100, 65536)):
        if is_free(port, host):
            return port
    raise GeneratorError(f"No port from {first} to {first + 99} is free for a vLLM server. Choose another first port.")


def is_free(port: int, host: str = "") -> bool:
    """Whether a server could listen on the port now; without a host, on all addresses of this machine."""
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: TIME_WAIT is no holder
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
