#!/usr/bin/env bash
# Trains five steps with plain TRL, to see whether a dataset and a machine fit: scripts/test_single_instance.sh gsm8k
# Further arguments go to scripts/train_trl_grpo.py. What it writes ends with test_instance (a second start writes below
# run2/, a third below run3/), and whatever happens, it ends what it has started.
set -euo pipefail

dataset=${1:?usage: scripts/test_single_instance.sh gsm8k|math|mbpp [OPTIONS]}
shift
here=$(cd "$(dirname "$0")" && pwd)
base=.
number=1
while [ -e "$base/outputs/trl_${dataset}_test_instance" ]; do
    number=$((number + 1))
    base=run$number
done
log=$base/logs/test_instance/training.log
mkdir -p "$(dirname "$log")"

trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
"${PYTHON:-python3}" "$here/train_trl_grpo.py" --dataset "$dataset" --run-suffix test_instance --base "$base" --steps 5 \
    "$@" >"$log" 2>&1 &

echo "training in $base/outputs/trl_${dataset}_test_instance, log $log"
if wait $!; then
    echo "test_instance of $dataset: passed"
else
    code=$?
    echo "test_instance of $dataset: failed with exit code $code. Its last words:" >&2
    tail -n 20 "$log" >&2
    exit "$code"
fi
