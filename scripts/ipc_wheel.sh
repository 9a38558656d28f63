#!/usr/bin/env bash
# Builds the wheel of async_grpo_ipc alone: scripts/ipc_wheel.sh [FOLDER, by default dist]. PYTHON needs pip and setuptools.
# With --check it is also installed where nothing else of this project is, and two processes share a tensor with it.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$(realpath -s "${PYTHON:-$root/.venv/bin/python}")
check=
if [[ ${1:-} == --check ]]; then check=1; shift; fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/source"
cp -r "$root/packages/async-grpo-ipc/." "$root/LICENSE" "$root/src/async_grpo_ipc" "$folder/source/"
sed -n 's/^__version__ = "\(.*\)"$/\1/p' "$root/src/async_grpo/version.py" > "$folder/source/VERSION"
"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps \
  --wheel-dir "${1:-$root/dist}" "$folder/source"
wheel=$(ls -t "${1:-$root/dist}"/async_grpo_ipc-*.whl | head -1)
echo "$wheel"
[[ -n $check ]] || exit 0

"$python" -m zipfile -e "$wheel" "$folder/site"
cd "$folder"
# No site-packages but torch's: nothing of async_grpo can be imported by mistake.
PYTHONPATH=$folder/site "$python" - <<'PYTHON'
import subprocess
import sys
from importlib.metadata import entry_points, version

import torch

import async_grpo_ipc

assert async_grpo_ipc.__file__.startswith(sys.path[1]), async_grpo_ipc.__file__
assert entry_points(group="vllm.general_plugins", name="async_grpo_ipc")
read = "from async_grpo_ipc import *; import torch; m = torch.nn.Linear(2, 2); print(open_remote_memory('h.json').pull(m))"
with async_grpo_ipc.WeightExporter.from_model(torch.nn.Linear(2, 2), "h.json") as exporter:
    exporter.publish(3)
    assert subprocess.check_output([sys.executable, "-c", read], text=True).strip() == "3"
assert not [name for name in sys.modules if name.split(".")[0] in ("async_grpo", "trl", "transformers", "zstandard")]
print("the wheel of async_grpo_ipc works:", version("async-grpo-ipc"))
PYTHON
