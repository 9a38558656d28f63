"""Other queues for one machine, each with the least adapter that lets it carry bytes from one process to another.

They are the extra `bench`; Redis also needs `redis-server` (Debian's package of that name). "Synced" is a queue whose
operations are on the disk when they return, and survive a power cut.
"""

from __future__ import annotations

import importlib
import mailbox
import os
import shutil
import sqlite3
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from benchmarks.processes import wait_until

BARE = "bare renames of unchecked bytes"  # for comparison: no queue that anyone uses


class Channel(Protocol):
    """One direction of a peer: jobs go through one, results through another."""

    def put(self, data: bytes) -> None: ...

    def claim(self) -> tuple[Any, bytes] | None: ...

    def done(self, token: Any) -> None: ...


class Renames:
    """tmp/, new/, cur/ and renames by hand, without any check: what the rest of ours costs."""

    def __init__(self, path: Path) -> None:
        self._path, self._count, self._names = path, 0, deque[str]()
        for name in ("tmp", "new", "cur"):
            (path / name).mkdir(parents=True, exist_ok=True)

    def put(self, data: bytes) -> None:
        name = f"{time.monotonic_ns():020d}.{os.getpid()}.{self._count}"
        self._count += 1
        (self._path / "tmp" / name).write_bytes(data)
        (self._path / "tmp" / name).rename(self._path / "new" / name)

    def claim(self) -> tuple[Any, bytes] | None:
        if not self._names:
            self._names.extend(sorted(os.listdir(self._path / "new"))[:64])  # noqa: PTH208 - pathlib is slower
        while self._names:
            name = self._names.popleft()
            with suppress(FileNotFoundError):
                taken = (self._path / "new" / name).rename(self._path / "cur" / name)
                return taken, taken.read_bytes()
        return None

    def done(self, token: Any) -> None:
        token.unlink()


class Maildir:
    """`mailbox.Maildir`, which syncs every message."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._box, self._path = mailbox.Maildir(path), path

    def put(self, data: bytes) -> None:
        self._box.add(b"\n\n" + data)

    def claim(self) -> tuple[Any, bytes] | None:
        for path in sorted((self._path / "new").iterdir()):
            with suppress(FileNotFoundError):
                taken = path.rename(self._path / "cur" / path.name)
                return taken, taken.read_bytes()[2:]
        return None

    def done(self, token: Any) -> None:
        token.unlink()


class Sqlite:
    """One table, WAL."""

    def __init__(self, path: Path, synchronous: str = "normal") -> None:
        path.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(path / "db", isolation_level=None, timeout=30)
        self._db.execute("pragma journal_mode=wal")
        self._db.execute(f"pragma synchronous={synchronous}")
        self._db.execute("create table if not exists q (id integer primary key, state int default 0, data blob)")
        self._db.execute("create index if not exists s on q (state, id)")

    def put(self, data: bytes) -> None:
        self._db.execute("insert into q (data) values (?)", (data,))

    def claim(self) -> tuple[Any, bytes] | None:
        found = self._db.execute(
            "update q set state = 1 where id = (select id from q where state = 0 order by id limit 1) "
            "returning id, data"
        ).fetchall()
        return found[0] if found else None

    def done(self, token: Any) -> None:
        self._db.execute("delete from q where id = ?", (token,))


class PersistQueue:
    """persist-queue, SQLiteAckQueue."""

    def __init__(self, path: Path) -> None:
        self._queue = importlib.import_module("persistqueue").SQLiteAckQueue(str(path), auto_resume=False)

    def put(self, data: bytes) -> None:
        self._queue.put(data)

    def claim(self) -> tuple[Any, bytes] | None:
        with suppress(importlib.import_module("persistqueue").Empty):
            found = self._queue.get(block=False, raw=True)
            return found["pqid"], found["data"]
        return None

    def done(self, token: Any) -> None:
        self._queue.ack(id=token)


class HueyFile:
    """huey, FileStorage."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._storage = self._make(path)

    def _make(self, path: Path) -> Any:
        return importlib.import_module("huey.storage").FileStorage("bench", str(path))

    def put(self, data: bytes) -> None:
        self._storage.enqueue(data)

    def claim(self) -> tuple[Any, bytes] | None:
        data = self._storage.dequeue()
        return (None, data) if data else None

    def done(self, token: Any) -> None:
        """A dequeued task is gone."""


class HueySqlite(HueyFile):
    """huey, SqliteStorage."""

    def _make(self, path: Path) -> Any:
        return importlib.import_module("huey.storage").SqliteStorage("bench", f"{path}.db")


class DiskCache:
    """diskcache, Deque."""

    def __init__(self, path: Path) -> None:
        self._deque = importlib.import_module("diskcache").Deque(directory=str(path))

    def put(self, data: bytes) -> None:
        self._deque.append(data)

    def claim(self) -> tuple[Any, bytes] | None:
        with suppress(IndexError):
            return None, self._deque.popleft()
        return None

    def done(self, token: Any) -> None:
        """A popped item is gone."""


class LiteQueue:
    """litequeue."""

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self._queue = importlib.import_module("litequeue").LiteQueue(str(path / "db"))

    def put(self, data: bytes) -> None:
        self._queue.put(data)

    def claim(self) -> tuple[Any, bytes] | None:
        message = self._queue.pop()
        return (message.message_id, message.data) if message else None

    def done(self, token: Any) -> None:
        self._queue.done(token)


class Dirq:
    """dirq, QueueSimple: a hard link locks an element."""

    def __init__(self, path: Path) -> None:
        self._queue = importlib.import_module("dirq.QueueSimple").QueueSimple(str(path))
        self._names: Iterator[str] = iter(())

    def put(self, data: bytes) -> None:
        self._queue.add(data)

    def claim(self) -> tuple[Any, bytes] | None:
        for fresh in (False, True):
            if fresh:
                self._names = iter(self._queue)
            for name in self._names:
                with suppress(OSError):
                    if self._queue.lock(name):
                        return name, self._queue.get(name)
        return None

    def done(self, token: Any) -> None:
        self._queue.remove(token)


class Redis:
    """Redis, one list of waiting and one of claimed items, append-only file synced every second."""

    def __init__(self, path: Path) -> None:
        self._redis = importlib.import_module("redis").Redis(unix_socket_path=str(path.parent / "socket"))
        self._name = path.name

    def put(self, data: bytes) -> None:
        self._redis.lpush(self._name, data)

    def claim(self) -> tuple[Any, bytes] | None:
        data = self._redis.lmove(self._name, f"{self._name}-claimed", "RIGHT", "LEFT")
        return (data, data) if data else None

    def done(self, token: Any) -> None:
        self._redis.lrem(f"{self._name}-claimed", 1, token)


@contextmanager
def redis_server(root: Path) -> Iterator[None]:
    options = ["--port", "0", "--unixsocket", str(root / "socket"), "--dir", str(root), "--appendonly", "yes"]
    server = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL)
    try:
        wait_until((root / "socket").exists)
        yield
    finally:
        server.kill()
        server.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A queue to be measured, if its module can be imported and its program is there."""

    module: str
    channel: Callable[[Path], Channel]
    kept: bool = True  # whether a claim outlives its worker at all
    claim: str  # what becomes of a claim whose worker is killed
    synced: bool = False
    program: str = ""
    server: Callable[[Path], AbstractContextManager[None]] = lambda root: nullcontext()

    @property
    def is_here(self) -> bool:
        with suppress(ImportError):
            importlib.import_module(self.module)
            return not self.program or shutil.which(self.program) is not None
        return False


_GONE = "a killed worker's job is gone"
_CLAIMED = "a killed worker's row stays claimed for good"
PEERS: dict[str, Peer] = {
    "Maildir": Peer(
        module="mailbox",
        channel=Maildir,
        claim="a killed worker's message stays in cur/ and looks like a live one's",
        synced=True,
    ),
    "SQLite WAL NORMAL": Peer(module="sqlite3", channel=Sqlite, claim=_CLAIMED),
    "SQLite WAL FULL": Peer(module="sqlite3", channel=partial(Sqlite, synchronous="full"), claim=_CLAIMED, synced=True),
    "persist-queue": Peer(
        module="persistqueue", channel=PersistQueue, claim="given back when the queue is opened again", synced=True
    ),
    "huey file": Peer(module="huey", channel=HueyFile, kept=False, claim=_GONE),
    "huey sqlite": Peer(module="huey", channel=HueySqlite, kept=False, claim=_GONE, synced=True),
    "diskcache": Peer(module="diskcache", channel=DiskCache, kept=False, claim=_GONE),
    "litequeue": Peer(module="litequeue", channel=LiteQueue, claim="stays locked until somebody calls retry() for it"),
    "dirq": Peer(
        module="dirq",
        channel=Dirq,
        claim="stays locked until somebody calls purge(), which goes by age: 10 minutes",
    ),
    "Redis": Peer(
        module="redis",
        channel=Redis,
        claim="stays in the list of claimed jobs for good",
        program="redis-server",
        server=redis_server,
    ),
    BARE: Peer(module="os", channel=Renames, claim="stays claimed for good"),
}


def missing() -> str:
    """What cannot be measured, and how to have it."""
    left_out = [name for name, peer in PEERS.items() if not peer.is_here]
    if not left_out:
        return "every peer is installed"
    server = "" if shutil.which("redis-server") else " Redis also needs `apt-get install redis-server`."
    return f"not installed: {', '.join(left_out)}. `make bench` installs the extra `bench`.{server}"
