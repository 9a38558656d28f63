#!/usr/bin/env bash
# Runs everything that needs a GPU and writes a report in Markdown as it goes. Each part ends within 7 minutes; a part
# that fails, or is killed, leaves what it had written, and the others still run.
#
# usage: scripts/gpu_check.sh [PART ...] [--report FILE] [--wheels FOLDER] [--dry-run] [--plan]
#   PART       in this order: smoke, tests, kill, kinds, async, padding, weights, deterministic, gsm8k, targets; all by default
#   --report   default: gpu_report.md, in $OUT where that is set; figures go next to it as JSON
#   --wheels   install what is missing from this folder first (scripts/collect_wheels.sh fills it), without a network
#   --dry-run  the same on a CPU, with tiny sizes: shows that the script itself works
#   --plan     only print the commands in order, each with its time limit; a part takes less than ten minutes
# environment: PYTHON (python3), GSM8K_PATH (a folder with train.jsonl and test.jsonl; without it that part is left out)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
report=${OUT:-.}/gpu_report.md
wheels=
dry_run=
plan=
parts=()
while (($#)); do
    case $1 in
        --report) report=${2:?--report FILE} && shift ;;
        --wheels) wheels=${2:?--wheels FOLDER} && shift ;;
        --dry-run) dry_run=1 ;;
        --plan) plan=1 ;;
        smoke | tests | kill | kinds | async | padding | weights | deterministic | gsm8k | targets) parts+=("$1") ;;
        *) echo "unknown: $1" >&2 && exit 2 ;;
    esac
    shift
done
((${#parts[@]})) || parts=(smoke tests kill kinds async padding weights deterministic gsm8k targets)
results=$(cd "$(dirname "$report")" && pwd)
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TRL_EXPERIMENTAL_SILENCE=1
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 # nothing here needs the hub
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# The part that runs ends with this script, also when the signal comes before this shell, or `timeout`, knows its pid:
# `timeout` leads a process group.
trap 'for job in $(jobs -pr); do kill -- "-$job" || kill "$job"; done 2>/dev/null; exit 143' TERM INT
mkfifo "$scratch/said"
failed=0

say() { [[ $plan ]] || printf '%s\n' "$@" >>"$report"; }

# part NAME SECONDS COMMAND...: a section of the report with the command line and, line by line, what it prints.
part() {
    local name=$1 limit=$2 started=$SECONDS code
    shift 2
    if [[ $plan ]]; then
        local command=$*
        printf '    %s, at most %s s: %s\n' "$name" "$limit" "${command%%$'\n'*}"
        return
    fi
    echo "== $name"
    say "" "## $name" "" "    $*" "" '```text'
    tee -a "$report" <"$scratch/said" &
    local tee=$!
    timeout --kill-after=20 "$limit" "$@" >"$scratch/said" 2>&1 &
    wait "$!"
    code=$?
    wait "$tee"
    say '```' ""
    if ((code == 0)); then
        say "Done in $((SECONDS - started)) s."
    else
        failed=1
        say "**Failed** with exit code $code after $((SECONDS - started)) s$( ((code == 124)) && echo ", its time limit")."
    fi
}

# Does memory travel between two processes at all? The rest is worth its time only then.
run_smoke() {
    part "Doctor" 120 "$python" -m async_grpo.cli doctor --run-dir "$scratch/doctor"
    if [[ $dry_run ]]; then
        GPU_TESTS_DEVICE=cpu part "Weights between processes" 120 "$python" -m pytest tests/gpu/test_weights_cuda.py \
            -m gpu -x -rA -q -p no:cacheprovider -k "static"
    else
        part "Weights between processes" 180 "$python" -m pytest tests/gpu/test_weights_cuda.py \
            -m gpu -rA -s -q -p no:cacheprovider
    fi
}

run_tests() {
    if [[ $dry_run ]]; then
        GPU_TESTS_DEVICE=cpu part "Tests marked gpu" 300 "$python" -m pytest tests/gpu -m gpu -rA -q -p no:cacheprovider \
            -k "torn or isolation"
    else
        part "Tests marked gpu" 420 "$python" -m pytest tests/gpu -m gpu -rA -s -q -p no:cacheprovider \
            --deselect tests/gpu/test_runs_cuda.py --deselect tests/gpu/test_weights_cuda.py \
            --deselect tests/gpu/test_kinds_of_run_cuda.py
    fi
}

run_kill() {
    if [[ $dry_run ]]; then
        QWEN3_SHAPE=tiny GPU_TESTS_DEVICE=cpu part "Server killed in the middle of a run" 300 \
            "$python" -m pytest tests/gpu/test_runs_cuda.py -m gpu -rA -s -q -p no:cacheprovider
    else
        QWEN3_SHAPE=0.6B part "Server killed in the middle of a run" 420 \
            "$python" -m pytest tests/gpu/test_runs_cuda.py -m gpu -rA -s -q -p no:cacheprovider
    fi
}

# Small runs that share the GPU, four at a time.
run_kinds() {
    if [[ $dry_run ]]; then
        GPU_TESTS_DEVICE=cpu part "Each kind of run" 300 "$python" -m pytest tests/gpu/test_kinds_of_run_cuda.py \
            -m gpu -rA -q -p no:cacheprovider -k "sums or tasks"
    else
        part "Each kind of run" 420 "$python" -m pytest tests/gpu/test_kinds_of_run_cuda.py -n 4 --maxschedchunk 1 \
            -m gpu -rA -q -p no:cacheprovider
    fi
}

run_async() {
    if [[ $dry_run ]]; then
        part "Asynchronous against TRL alone" 300 "$python" benchmarks/gpu_async.py --device cpu --shape tiny --steps 2 \
            --completion 8 --workers 1 --limit 120 --json "$results/gpu_async.json"
    else
        part "Asynchronous against TRL alone" 420 "$python" benchmarks/gpu_async.py --workers 1,2 --waiting \
            --completion 64 --limit 95 --json "$results/gpu_async.json"
    fi
}

# The same loss with TRL's padding and without it.
run_padding() {
    if [[ $dry_run ]]; then
        part "Training steps without padding" 120 "$python" benchmarks/padding.py --quick --lengths lognormal \
            --json "$results/gpu_padding.json"
    else
        part "Training steps without padding" 120 "$python" benchmarks/padding.py --device cuda --shape 0.6B --rows 64 \
            --pairs 20 --lengths lognormal --checkpointing with --json "$results/gpu_padding.json"
    fi
}

run_weights() {
    if [[ $dry_run ]]; then
        part "Weights" 300 "$python" benchmarks/weights.py --help
    else
        part "Weights" 420 "$python" benchmarks/weights.py --device cuda --sizes 1B/100M \
            --json "$results/gpu_weights.json"
    fi
}

# The same run twice, with two workers: the weights have one hash.
run_deterministic() {
    local device=0
    [[ $dry_run ]] && device=cpu
    part "Deterministic" 300 bash -c '
        cd "$1" || exit 1
        for run in 1 2; do
            "$2" -m async_grpo.cli train "$3/src/app/trainer_setup_tiny.py" --deterministic --steps 4 --eval-every 0 \
                --master-device-id "$4" --worker-device-ids "$4,$4" --run-dir "$1/deterministic$run" \
                --set save_steps=4 --set "output_dir=$1/out$run" || exit 1
        done
        sha256sum "$1"/out?/checkpoint-4/model.safetensors
        cmp "$1"/out1/checkpoint-4/model.safetensors "$1"/out2/checkpoint-4/model.safetensors' \
        _ "$scratch" "$(command -v "$python")" "$PWD" "$device"
}

# 50 steps of LoRA, or as many as the time allows: that is no failure.
run_gsm8k() {
    if [[ -z ${GSM8K_PATH:-} ]]; then
        say "" "## GSM8K" "" "Left out: GSM8K_PATH names no folder with the data."
        [[ ! $plan ]] || echo "    GSM8K: left out, GSM8K_PATH names no folder with the data"
        return
    fi
    local model=$scratch/model shape=1.7B steps=50 device=0 limit=360
    [[ $dry_run ]] && shape=tiny steps=1 device=cpu limit=240
    [[ $plan ]] || QWEN3_SHAPE=$shape "$python" benchmarks/setups/qwen3_shape.py "$model" >/dev/null 2>&1
    part "GSM8K" $((limit + 45)) bash -c '
        cd "$1" || exit 1
        timeout "$2" env MODEL_PATH="$3" "$4" -m async_grpo.cli train "$5/src/app/trainer_setup_gsmk.py" \
            --steps "$6" --eval-every 0 --master-device-id "$7" --worker-device-ids "$7,$7" \
            --run-dir "$1/worker"
        code=$?
        ((code == 124)) && echo "stopped after its $2 s" && code=0
        exit $code' _ "$scratch" "$limit" "$model" "$(command -v "$python")" "$PWD" "$steps" "$device"
}

run_targets() {
    say "" "## Targets" ""
    if [[ $plan ]]; then
        echo "    a table of the JSON files"
        return
    fi
    "$python" benchmarks/gpu_targets.py "$results" | tee -a "$report"
}

if [[ $wheels && ! $plan ]]; then
    "$python" -m pip install -q --no-index --no-deps --no-cache-dir --target "$scratch/site" "$wheels"/*.whl || exit 1
    export PYTHONPATH="$PYTHONPATH:$scratch/site"
fi
about_the_machine() {
    say "# GPU check of $(date -u +'%Y-%m-%d %H:%M') UTC" "" '```text'
    [[ $dry_run ]] && say "dry run on a CPU, with tiny sizes: no figure here means anything"
    {
        nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null || echo "no GPU"
        "$python" -c 'import platform; print("Python", platform.python_version())'
        "$python" -m pip list 2>/dev/null | grep -iE '^(torch|cupy[a-z0-9-]*|transformers|trl|peft|accelerate|vllm|unsloth|bitsandbytes) '
    } >>"$report"
    say '```'
}

[[ $plan ]] || about_the_machine
for name in "${parts[@]}"; do
    [[ ! $plan ]] || echo "scripts/gpu_check.sh $name"
    "run_$name"
done
[[ $plan ]] || echo "report: $report"
exit $failed
