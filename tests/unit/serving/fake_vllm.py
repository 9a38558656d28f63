"""Stands in for `vllm.entrypoints.openai.api_server`: answers /health after a while, has a child, or fails."""

import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


def main(arguments: list[str]) -> None:
    behaviour = json.loads(os.environ["FAKE_VLLM"])
    started = Path(behaviour["folder"]) / f"{os.getpid()}.json"
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    unfinished = started.with_suffix(".new")
    unfinished.write_text(json.dumps({"arguments": arguments, "child": child.pid}))
    print("Loading the weights", flush=True)
    unfinished.rename(started)
    if behaviour.get("says"):
        child.kill()
        sys.exit(behaviour["says"])
    if behaviour.get("hangs"):
        time.sleep(600)
    while behaviour.get("waits_for") and not Path(behaviour["waits_for"]).exists():
        time.sleep(0.02)
    HTTPServer(("127.0.0.1", int(arguments[arguments.index("--port") + 1])), Handler).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
