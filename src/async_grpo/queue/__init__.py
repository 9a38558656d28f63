"""The queue of prompt groups between one parameter server and many workers: a directory, and renames in it.

The life of a job, each arrow one rename (`names` has the names, `transitions` the moves):

    server.submit        tmp/… ──────────────▶ queue/S.a00_pending
    worker.claim         queue/S.a00_pending ─▶ queue/S.a00_processing_by_dev1
    worker.complete      tmp/… ──────────────▶ queue/S.a00_complete_from_dev1, then the claim is removed
    server.take          queue/S.a00_complete_from_dev1 ─▶ done/…, and the group is the trainer's
    worker.hand_back     queue/S.a00_processing_by_dev1 ─▶ queue/S.a00_pending        (the same attempt)
    worker.fail, death   queue/S.a00_processing_by_dev1 ─▶ queue/S.a01_pending        (the next attempt)
    … for the last time  queue/S.a02_processing_by_dev1 ─▶ quarantine/S.a02_failed (with a .reason)
    unusable file        queue/S.a00_… ─▶ quarantine/S.a00_broken_…, and the server issues S.a01_pending

Why nothing is lost. A file appears whole (temporary file, rename). A result is published before its claim is
removed, so between the two there is one file too many, never one too few. A worker holds a kernel lock before
it claims; a process that gets that lock knows that the worker is dead, and keeps it while the claims are
made pending. A restarted worker does that for its own leftovers before its first claim; otherwise they would look alive
for ever. The server keeps every open job in memory: one that is nowhere to be seen in three looks at the
directory is issued again and counted; were it there after all, the second result would be archived unused.

Why nothing is used twice. The server takes a result only if the job is open, and closes it with that. The
trainer's checkpoint carries the set of sequence numbers that it consumed; `ServerQueue.open` is given it, and
what lies in done/ beyond it is given back when the job is submitted again. Submitting is idempotent: a job
whose file exists is adopted.

Why a poison job takes no others along. A job that failed before is claimed alone.

No operation waits, no wall clock is read. Files are checked by `codec`; nothing is unpickled.
"""

from async_grpo.queue.listing import quarantined
from async_grpo.queue.recovery import retry_given_up
from async_grpo.queue.server import ServerQueue
from async_grpo.queue.worker import Claim, WorkerQueue

__all__ = ["Claim", "ServerQueue", "WorkerQueue", "quarantined", "retry_given_up"]
