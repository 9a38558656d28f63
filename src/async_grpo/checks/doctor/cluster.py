"""Whether workers can be on other machines: which Ray reaches, and what they have."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import TimeoutError as NotYet
from typing import TYPE_CHECKING

from async_grpo.checks.doctor.finding import Asked, Finding, error, ok, warning
from async_grpo.errors import PeerDiedError, UsageError

if TYPE_CHECKING:
    from async_grpo.nodes.cluster import Cluster, Machine

ANSWER_S = 60.0  # an actor that starts imports what a worker does
SUBJECT = "nodes"


def cluster(asked: Asked) -> Iterator[Finding]:
    """Look at each machine of the cluster that `--ray` names."""
    if asked.ray is None:
        return
    from async_grpo.nodes.cluster import Cluster
    from async_grpo.nodes.node import facts
    from async_grpo.nodes.request import require_ray

    try:
        require_ray()
        with Cluster(asked.ray, nodes=2, cpus=1, run_id="doctor") as found:
            yield from _tokens(found)
            here, machines = facts(), found.machines()
            if not machines:
                yield error(
                    SUBJECT, "this machine is alone in the cluster", "Start Ray on others: ray start --address=…"
                )
            for machine in machines:
                yield _machine(found, machine, here["versions"])
    except (UsageError, PeerDiedError) as refusal:
        yield error(SUBJECT, str(refusal), "Correct that first.")


def _tokens(found: Cluster) -> Iterator[Finding]:
    if why := found.open_to_the_network():
        yield warning(
            SUBJECT, why, "ray get-auth-token --generate, and RAY_AUTH_MODE=token on all nodes (SECURITY.md)."
        )
    else:
        yield ok(SUBJECT, "only this machine can reach the cluster, or a token is asked for")


def _machine(found: Cluster, machine: Machine, here: dict[str, str]) -> Finding:
    node = found.start(machine, workers=0, gpus=0)
    try:
        facts = node.facts().result(ANSWER_S)
        began = time.monotonic()
        node.facts().result(ANSWER_S)
        took_ms = 1000 * (time.monotonic() - began)
    except NotYet:
        return error(SUBJECT, f"{machine.name} has not answered within {ANSWER_S:g} s", "See its logs in /tmp/ray.")
    except Exception as failure:  # noqa: BLE001 - whatever Ray makes of a machine that cannot
        return error(SUBJECT, f"{machine.name}: {failure}", "pip install 'async-grpo[ray]' there, as here.")
    finally:
        node.kill()
    has = f"{machine.name} ({machine.address}): {machine.free}"
    others = [name for name, version in facts["versions"].items() if version != here.get(name)]
    if others:
        named = ", ".join(f"{name} {facts['versions'][name] or '(not installed)'}" for name in others)
        return error(SUBJECT, f"{has}; it has {named}", "Install the same versions on all nodes.")
    return ok(SUBJECT, f"{has}; the same versions as here; a call takes {took_ms:.1f} ms")
