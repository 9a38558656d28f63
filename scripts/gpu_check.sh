#!/usr/bin/env bash
# Runs everything that needs a GPU and writes a report in Markdown as it goes. Parts come by worth: what has told least
# so far is first. Each ends within ten minutes; one that fails, or is killed, leaves what it had written, and the
# others still run. Timings run alone. What only has to be right runs side by side: tests, kinds and deterministic.
#
# usage: scripts/gpu_check.sh [PART ...] [--budget SECONDS] [--report FILE] [--wheels FOLDER] [--vllm FOLDER]
#                             [--dry-run] [--plan]
#   PART       by default all: smoke, vllm, sampler, engine, kill, one_gpu, async, weights, padding, tests, kinds,
#              deterministic, full, gsm8k, targets
#   --budget   begin nothing whose time limit is more than what is left of this; where at least half of the limit is
#              left, the limit is what is left. The report says what was left out
#   --report   default: gpu_report.md, in $OUT where that is set; figures go next to it as JSON
#   --wheels   install what is missing from this folder first (scripts/collect_wheels.sh fills it), without a network
#   --vllm     unpack vLLM from this folder first (scripts/pack_vllm.sh fills it)
#   --dry-run  the same on a CPU, with tiny sizes: shows that the script itself works
#   --plan     only print the commands in order, each with its time limit, and what a budget leaves out if each part
#              takes its whole limit
# What --wheels and --vllm bring lies in .gpu, which git ignores, and is kept there until the folder has other files.
# environment: PYTHON (python3), GSM8K_PATH (a folder with train.jsonl and test.jsonl; without it that part is left out)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
report=${OUT:-.}/gpu_report.md
budget=
wheels=
vllm=
dry_run=
plan=
all=(smoke vllm sampler engine kill one_gpu async weights padding tests kinds deterministic full gsm8k targets)
side_by_side=(tests kinds deterministic)
parts=()
among() { [[ " ${*:2} " == *" $1 "* ]]; } # among WORD WORD...
while (($#)); do
    case $1 in
        --budget) [[ ${2:-} =~ ^[0-9]+$ ]] || { echo "--budget SECONDS" >&2 && exit 2; } && budget=$2 && shift ;;
        --report) report=${2:?--report FILE} && shift ;;
        --wheels) wheels=${2:?--wheels FOLDER} && shift ;;
        --vllm) vllm=${2:?--vllm FOLDER} && shift ;;
        --dry-run) dry_run=1 ;;
        --plan) plan=1 ;;
        *) among "$1" "${all[@]}" && parts+=("$1") || { echo "unknown: $1" >&2 && exit 2; } ;;
    esac
    shift
done
((${#parts[@]})) || parts=("${all[@]}")
results=$(cd "$(dirname "$report")" && pwd)
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TRL_EXPERIMENTAL_SILENCE=1
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 # nothing here needs the hub
export TORCH_CUDNN_SDPA_DEPRIORITIZED="${TORCH_CUDNN_SDPA_DEPRIORITIZED:-1}" # as in our roles
[[ ! $dry_run ]] || export GPU_TESTS_DEVICE=cpu
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
failed=0
planned=0 # seconds that the parts before may take, in a plan

say() { [[ $plan ]] || printf '%s\n' "$@" >>"$report"; }

# What runs ends with this shell, also when the signal comes before it, or `timeout`, knows its pid: `timeout` leads a
# process group, a part that runs beside others is a shell like this one.
end_what_runs() {
    for job in $(jobs -pr); do kill -- "-$job" || kill "$job"; done 2>/dev/null
    wait
    join_sections
    exit 143
}
trap end_what_runs TERM INT

# Sections of parts that ran side by side, each in a file of its own until then.
join_sections() {
    local name
    for name in "${side_by_side[@]}"; do
        [[ ! -e $report.$name ]] || { cat "$report.$name" >>"$report" && rm "$report.$name"; }
    done
}

# granted SECONDS: the time limit of a part that asks for so many.
granted() {
    local spent=$SECONDS
    [[ ! $plan ]] || spent=$planned
    if [[ -z $budget ]] || ((budget - spent >= $1)); then echo "$1"; else echo $((budget - spent)); fi
}

leave_out() { # NAME REASON
    say "" "## $1" "" "Left out: $2"
    [[ ! $plan ]] || echo "    $1: left out, $2"
}

# part NAME SECONDS COMMAND...: a section of the report with the command line and, line by line, what it prints.
part() {
    local name=$1 limit said=$scratch/said.$BASHPID started=$SECONDS code
    limit=$(granted "$2")
    if ((limit < $2 / 2)); then
        leave_out "$name" "$limit s of the budget were left, its limit is $2."
        return 1
    fi
    if [[ $plan ]]; then
        local command=${*:3}
        printf '    %s, at most %s s: %s\n' "$name" "$limit" "${command%%$'\n'*}"
        ((planned += limit))
        return
    fi
    echo "== $name"
    say "" "## $name" ""
    ((limit == $2)) || say "Its limit is the $limit s that were left of the budget, in place of $2." ""
    say "    ${*:3}" "" '```text'
    [[ -p $said ]] || mkfifo "$said"
    tee -a "$report" <"$said" &
    local tee=$!
    timeout --kill-after=20 "$limit" "${@:3}" >"$said" 2>&1 &
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
    return "$code"
}

# Does memory travel between two processes at all? The rest is worth its time only then.
run_smoke() {
    part "Doctor" 120 "$python" -m async_grpo.cli doctor --run-dir "$scratch/doctor"
    if [[ $dry_run ]]; then
        part "Weights between processes" 120 "$python" -m pytest tests/gpu/test_processes_cuda.py \
            -m gpu -x -rA -q -p no:cacheprovider -k "static"
    else
        part "Weights between processes" 180 "$python" -m pytest tests/gpu/test_weights_cuda.py \
            -m gpu -rA -s -q -p no:cacheprovider
    fi
}

vllm_is_there() {
    [[ $plan ]] || "$python" -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("vllm"))' ||
        { leave_out "vLLM" "${no_vllm:-it is not installed}." && return 1; }
}

has_adapters() {
    [[ $plan ]] || timeout 60 "$python" -c 'from vllm import __version__; exit(__version__ < "0.27")' ||
        { leave_out "Adapters with vLLM" "before 0.27 it lacks names that they need (docs/gpu.md)." && return 1; }
}

# vLLM in a worker: weights by mapped memory, its log-probabilities against the trainer's, an adapter. Nothing runs
# beside it: vLLM refuses to start where another process gives memory back while it looks for its own.
run_vllm() {
    local -x PYTHONPATH="$PYTHONPATH${vllm_site:+:$vllm_site}" # here alone: TRL imports vLLM wherever it finds it
    vllm_is_there || return
    local kinds=vllm limits=(60 330)
    [[ ! $dry_run ]] || kinds="vllm and not adapter" limits=(120 420)
    if ! part "vLLM" "${limits[0]}" "$python" -c 'from vllm import LLM, __version__; print(LLM, __version__)'; then
        leave_out "The rest of vLLM in a worker" "see above."
        return
    fi
    has_adapters || kinds="vllm and not adapter"
    part "vLLM: runs" "${limits[1]}" "$python" -m pytest tests/gpu/test_kinds_of_run_cuda.py -m gpu -rA -s -q \
        -p no:cacheprovider -k "$kinds"
}

# Its engine alone: tokens a second, updates in flight, adapters.
run_engine() {
    local -x PYTHONPATH="$PYTHONPATH${vllm_site:+:$vllm_site}"
    vllm_is_there || return
    local device=cuda:0 kinds="in_flight or two_versions" sizes=(--shape 0.6B) how=(-v -s) limits=(330 180)
    has_adapters || kinds=in_flight
    # On a CPU `make test-vllm` runs such tests anyway.
    [[ ! $dry_run ]] || device=cpu sizes=(--shape small --quick) how=(--collect-only) limits=(360 220)
    LOGURU_LEVEL=INFO part "vLLM: tokens a second" "${limits[0]}" "$python" benchmarks/generators.py "${sizes[@]}" \
        --json "$results/gpu_vllm.json"
    GPU_TESTS_DEVICE=$device part "vLLM: updates in flight, adapters" "${limits[1]}" "$python" -m pytest \
        tests/with_vllm/test_vllm_engine.py "${how[@]}" -W ignore -p no:logging -p no:cacheprovider -k "$kinds"
}

# The graphs and the kernels of `--generator hf` give the tokens of the loop without them.
run_sampler() {
    part "Sampler" 120 "$python" -m pytest tests/gpu/test_sampler_cuda.py -m gpu -rA -s -q -p no:cacheprovider
}

run_kill() {
    local shape=0.6B limit=420
    [[ ! $dry_run ]] || shape=tiny limit=300
    QWEN3_SHAPE=$shape part "Server killed in the middle of a run" $limit \
        "$python" -m pytest tests/gpu/test_runs_cuda.py -m gpu -rA -s -q -p no:cacheprovider
}

run_one_gpu() {
    if [[ $dry_run ]]; then
        part "One GPU" 420 "$python" benchmarks/one_gpu.py --device cpu --shape tiny --limit 400 \
            --json "$results/gpu_one_gpu.json"
    else
        part "One GPU" 560 "$python" benchmarks/one_gpu.py --limit $(($(granted 560) - 20)) \
            --json "$results/gpu_one_gpu.json"
    fi
}

run_async() {
    if [[ $dry_run ]]; then
        part "Asynchronous against TRL alone" 300 "$python" benchmarks/gpu_async.py --device cpu --shape tiny --steps 2 \
            --completion 8 --workers 1 --limit 120 --json "$results/gpu_async.json"
    else
        part "Asynchronous against TRL alone" 420 "$python" benchmarks/gpu_async.py --workers 1,2 --waiting \
            --completion 64 --limit 80 --json "$results/gpu_async.json"
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

fill_the_gpu="nearly_full or only_keeps"

run_tests() {
    if [[ $dry_run ]]; then
        part "Tests marked gpu" 300 "$python" -m pytest tests/gpu -m gpu -rA -q -p no:cacheprovider \
            -k "dead_exporter or isolation" # how often versions are read under load depends on the machine
    else
        part "Tests marked gpu" 420 "$python" -m pytest tests/gpu -m gpu -rA -s -q -p no:cacheprovider \
            --deselect tests/gpu/test_runs_cuda.py --deselect tests/gpu/test_weights_cuda.py \
            --deselect tests/gpu/test_kinds_of_run_cuda.py --deselect tests/gpu/test_sampler_cuda.py -k "not ($fill_the_gpu)"
    fi
}

# Small runs that share the GPU, four at a time.
run_kinds() {
    if [[ $dry_run ]]; then
        part "Each kind of run" 300 "$python" -m pytest tests/gpu/test_kinds_of_run_cuda.py \
            -m gpu -rA -q -p no:cacheprovider -k "sums or tasks"
    else
        part "Each kind of run" 420 "$python" -m pytest tests/gpu/test_kinds_of_run_cuda.py -n 4 --maxschedchunk 1 \
            -m gpu -rA -q -p no:cacheprovider -k "not vllm"
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
                --master-device-id "$4" --worker-device-ids "$4,$4" --generator hf --run-dir "$1/deterministic$run" \
                --set save_steps=4 --set "output_dir=$1/out$run" || exit 1
        done
        sha256sum "$1"/out?/checkpoint-4/model.safetensors
        cmp "$1"/out1/checkpoint-4/model.safetensors "$1"/out2/checkpoint-4/model.safetensors' \
        _ "$scratch" "$(command -v "$python")" "$PWD" "$device"
}

# What takes all of the GPU's memory cannot run beside anything.
run_full() {
    part "A GPU that is full" 120 "$python" -m pytest tests/gpu/test_processes_cuda.py -m gpu -rA -s -q \
        -p no:cacheprovider -k "$fill_the_gpu"
}

# 50 steps of LoRA, or as many as the time allows: that is no failure.
run_gsm8k() {
    if [[ -z ${GSM8K_PATH:-} ]]; then
        leave_out "GSM8K" "GSM8K_PATH names no folder with the data"
        return
    fi
    local model=$scratch/model shape=1.7B steps=50 device=0 limit=405
    [[ $dry_run ]] && shape=tiny steps=1 device=cpu limit=285
    [[ $plan ]] || QWEN3_SHAPE=$shape "$python" benchmarks/setups/qwen3_shape.py "$model" >/dev/null 2>&1
    part "GSM8K" $limit bash -c '
        cd "$1" || exit 1
        timeout "$2" env MODEL_PATH="$3" "$4" -m async_grpo.cli train "$5/src/app/trainer_setup_gsmk.py" \
            --steps "$6" --eval-every 0 --master-device-id "$7" --worker-device-ids "$7,$7" --generator hf \
            --run-dir "$1/worker"
        code=$?
        ((code == 124)) && echo "stopped after its $2 s" && code=0
        exit $code' _ "$scratch" $(($(granted $limit) - 45)) "$model" "$(command -v "$python")" "$PWD" "$steps" "$device"
}

run_targets() {
    say "" "## Targets" ""
    if [[ $plan ]]; then
        echo "    a table of the JSON files"
        return
    fi
    "$python" benchmarks/gpu_targets.py "$results" | tee -a "$report"
}

# beside PART...: at the same time, each with a section of its own.
beside() {
    local name job jobs=() start=$planned end=$planned
    for name in "$@"; do
        if [[ $plan ]]; then
            echo "scripts/gpu_check.sh $name${2:+ (side by side: $*)}"
            planned=$start
            "run_$name"
            ((planned <= end)) || end=$planned
            continue
        fi
        (
            trap end_what_runs TERM INT
            report=$report.$name
            "run_$name"
            exit "$failed"
        ) &
        jobs+=("$!")
    done
    planned=$end
    for job in "${jobs[@]}"; do wait "$job" || failed=1; done
    join_sections
}

run_parts() {
    local group
    while (($#)); do
        group=()
        while (($#)) && among "$1" "${side_by_side[@]}"; do
            group+=("$1") && shift
        done
        if ((${#group[@]})); then
            beside "${group[@]}"
        else
            [[ ! $plan ]] || echo "scripts/gpu_check.sh $1"
            "run_$1"
            shift
        fi
    done
}

# once NAME FOLDER COMMAND: let COMMAND fill .gpu/NAME from the folder, unless it did from the same files.
once() {
    local site=.gpu/$1 sums
    sums=$(cd "$2" && sha256sum -- *) || return 1
    if [[ $(cat "$site.sha256" 2>/dev/null) != "$sums" ]]; then
        rm -rf "$site" "$site.sha256" && mkdir -p "$site" && "$3" "$2" "$site" || return 1
        printf '%s\n' "$sums" >"$site.sha256" # last: what was broken off begins again
    fi
}

install_wheels() { "$python" -m pip install -q --no-index --no-deps --no-cache-dir --target "$2" "$1"/*.whl; }

unpack_vllm() {
    (cd "$1" && sha256sum --quiet -c manifest) && cat "$1"/piece.* | "$python" -c 'import sys, tarfile
tarfile.open(fileobj=sys.stdin.buffer, mode="r|xz").extractall(sys.argv[1], filter="data")' "$2"
}

no_vllm=
vllm_site=
if [[ ! $plan ]]; then
    if [[ $wheels ]]; then
        once wheels-site "$wheels" install_wheels || exit 1
        export PYTHONPATH="$PYTHONPATH:$PWD/.gpu/wheels-site"
    fi
    if [[ $vllm ]]; then
        if once vllm-site "$vllm" unpack_vllm; then
            vllm_site=$PWD/.gpu/vllm-site
        else
            failed=1 no_vllm="the pieces in $vllm could not be unpacked"
        fi
    fi
fi
about_the_machine() {
    say "# GPU check of $(date -u +'%Y-%m-%d %H:%M') UTC" "" '```text'
    [[ $dry_run ]] && say "dry run on a CPU, with tiny sizes: no figure here means anything"
    {
        nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null || echo "no GPU"
        "$python" -c 'import platform; print("Python", platform.python_version())'
        PYTHONPATH="$PYTHONPATH${vllm_site:+:$vllm_site}" "$python" -m pip list 2>/dev/null | grep -iE '^(torch|cupy[a-z0-9-]*|transformers|trl|peft|accelerate|vllm|unsloth|bitsandbytes) '
    } >>"$report"
    say '```'
}

if [[ $plan ]]; then
    run_parts "${parts[@]}"
    echo "all of it: $planned s at most"
    exit
fi
join_sections # of a check that was killed
about_the_machine
run_parts "${parts[@]}"
echo "report: $report"
exit $failed
