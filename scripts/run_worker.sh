#!/usr/bin/env bash
# Start one rollout worker by hand: scripts/run_worker.sh DEVICE [SETUP_FILE] [more options of `worker`]
# DEVICE is a GPU index or "cpu". The log is worker/log_worker_N.txt, N being the worker's number.
set -euo pipefail
device=${1:?usage: scripts/run_worker.sh DEVICE [SETUP_FILE] [options]}
shift
config=()
if [[ $# -gt 0 && $1 != -* ]]; then
    config=(--config "$1")
    shift
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$root/.venv/bin/python
[[ -x $python ]] || python=python3
exec "$python" "$root/src/cli/worker.py" --device "$device" "${config[@]}" "$@"
