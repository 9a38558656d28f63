"""Searches for bytes on which a reader of files fails with anything but its own errors, one target after another.

    python benchmarks/fuzz.py [--quick] [--seconds 600] [--only NAME] [--json FILE]

The targets and their inputs are those of `tests/fuzz/targets.py`. Guided by coverage where atheris is installed
(the extra `fuzz`), else by hypothesis alone. Each target runs in a process of its own with 4 GiB of address space
more than it has after its imports, so that memory without bound is an error; an input that takes over 5 s of CPU time,
or waits for a minute, is one too.
What was found is written to `fuzz-findings/`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MEMORY_BYTES = 4 << 30
SLOW_S, STUCK_S = 5.0, 60.0  # of CPU time, and of any
READERS = ("async_grpo", "async_grpo_ipc")  # whose coverage guides the search
HAS_ATHERIS = importlib.util.find_spec("atheris") is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seconds", type=int, default=600, help="for each target")
    parser.add_argument("--only", help="one target")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inside", help=argparse.SUPPRESS)  # the target that this process is to search
    options = parser.parse_args()
    if options.inside:
        search(options.inside, options.seconds)
        return
    seconds = 3 if options.quick else options.seconds
    rows = [row(name, seconds) for name in ([options.only] if options.only else names())]
    if options.json:
        machine = {"system": platform.system(), "kernel": platform.release(), "cores": os.cpu_count()}
        before = json.loads(options.json.read_text())["rows"] if options.json.exists() else []
        by_name = {entry["name"]: entry for entry in (*before, *rows)}  # `--only` replaces one of them
        rows = [by_name[name] for name in names() if name in by_name]
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


def names() -> list[str]:
    return re.findall(r'Target\(\s*"([^"]+)"', (ROOT / "tests" / "fuzz" / "targets.py").read_text())


def row(name: str, seconds: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--inside", name, "--seconds", str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds + 600)
    told: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"inputs"')]
    last = told[-1] if told else {"inputs": 0, "refused": 0, "slowest_s": 0.0}
    sound = done.returncode == 0 and bool(told)
    how = "guided by coverage" if HAS_ATHERIS else "not guided by coverage"
    note = f"{last['refused']:,} refused, the slowest took {last['slowest_s'] * 1e3:.0f} ms; {seconds} s, {how}"
    print(f"{name:<16} {last['inputs']:>9,} inputs  {'ok' if sound else 'FAILED'}  {note}", flush=True)
    if not sound:
        findings = Path("fuzz-findings")
        findings.mkdir(exist_ok=True)
        (findings / f"{name.replace(' ', '_')}.txt").write_text(done.stdout[-20_000:] + done.stderr[-20_000:])
    return {"name": name, "value": last["inputs"], "unit": "inputs", "target": "only its own errors", "ok": sound} | {
        "spread": [],
        "note": note,
    }


def search(name: str, seconds: int) -> None:
    """Try inputs until the time is over; an error that is none of the target's ends the process."""
    sys.path.insert(0, str(ROOT / "tests" / "fuzz"))
    if HAS_ATHERIS:
        import atheris

        with atheris.instrument_imports(include=list(READERS)):
            import targets
    else:
        import targets
    target = next(target for target in targets.TARGETS if target.name == name)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, resource.RLIM_INFINITY))
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        Search(target, Path(folder), seconds).run()


class Search:
    """One target and its counts."""

    def __init__(self, target: Any, folder: Path, seconds: int) -> None:
        self._target, self._folder = target, folder
        self._ends = time.monotonic() + seconds
        self._counts: Counter[str] = Counter()
        self._slowest_s = 0.0

    def run(self) -> None:
        if HAS_ATHERIS:
            self._guided()
        else:
            while time.monotonic() < self._ends:
                self._test(seed=self._counts["inputs"])()
        self._report()

    def _try(self, data: bytes) -> None:
        began = time.process_time()
        self._counts["inputs"] += 1
        try:
            self._target.read(data, self._folder)
        except self._target.errors:
            self._counts["refused"] += 1
        took = time.process_time() - began
        self._slowest_s = max(self._slowest_s, took)
        assert took < SLOW_S, f"{took:.1f} s for {data[:200]!r}"

    def _test(self, seed: int) -> Callable[[], None]:
        from hypothesis import HealthCheck, Phase, given, settings
        from hypothesis import seed as seeded

        phases = [Phase.generate, Phase.shrink]
        every = list(HealthCheck)

        @seeded(seed)
        @settings(max_examples=2000, database=None, deadline=None, phases=phases, suppress_health_check=every)
        @given(self._target.inputs)
        def test(data: bytes) -> None:
            if time.monotonic() < self._ends:
                self._try(data)

        return test

    def _guided(self) -> None:
        import atheris

        fuzz_one_input = self._test(0).hypothesis.fuzz_one_input  # type: ignore[attr-defined]  # hypothesis adds it to the function

        def one(raw: bytes) -> None:
            fuzz_one_input(raw)
            if time.monotonic() > self._ends:
                self._report()
                os._exit(0)

        atheris.Setup([sys.argv[0], "-max_len=4096", "-rss_limit_mb=0", f"-timeout={int(STUCK_S)}"], one)
        atheris.Fuzz()

    def _report(self) -> None:
        print(json.dumps({"inputs": 0, "refused": 0, **self._counts, "slowest_s": self._slowest_s}), flush=True)


if __name__ == "__main__":
    main()
