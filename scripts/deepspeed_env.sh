#!/usr/bin/env bash
# Creates (or repairs) a virtual environment with DeepSpeed, for the CPU: scripts/deepspeed_env.sh DIR
# It borrows everything else from .venv. DeepSpeed is built from its sources, without its kernels. On a CPU its first use
# compiles an extension, which needs a C++ compiler: that is done here, because a process that is killed meanwhile leaves
# a lock at which all later ones wait.
set -euo pipefail
cd "$(dirname "$0")/.."
env=$(realpath -m "$1")
command -v g++ >/dev/null || { echo "g++ was not found; DeepSpeed on a CPU compiles an extension" >&2; exit 1; }
DS_BUILD_OPS=0 scripts/env_beside.sh "$env" deepspeed
PATH="$env/bin:$PATH" DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR="$env/extensions" "$env/bin/python" -c '
from deepspeed.accelerator import get_accelerator
get_accelerator().create_op_builder("ShareMemCommBuilder").load()'
