# Sourced by the scripts beside this file. Both functions write a checkpoint before the walltime ends.
#     main_ppo KEY=VALUE ...    trains on all nodes of the SLURM job, which Ray connects. A job that is submitted again
#                               continues (trainer.resume_mode=auto).
#     train FILE OPTION ...     `async-grpo train` in each task: task R is machine R of the trainer. Without Ray.
# environment: PYTHON (.venv/bin/python of the checkout), FLASH_ATTENTION_DISABLE=1 (attention of torch itself)
# shellcheck shell=bash
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?is not set: submit this script with sbatch, in the checkout}"

nodes=${SLURM_JOB_NUM_NODES:?is not set: submit this script with sbatch}
gpus=${SLURM_GPUS_ON_NODE:-0}
python=${PYTHON:-$PWD/.venv/bin/python}
# Sites set these for AMD's cards; with NVIDIA's, Ray refuses to start beside CUDA_VISIBLE_DEVICES.
unset ROCR_VISIBLE_DEVICES HIP_VISIBLE_DEVICES

main_ppo() {
    local keys=("trainer.nnodes=$nodes")
    if ((gpus)); then keys+=("trainer.n_gpus_per_node=$gpus"); else keys+=(trainer.device=cpu); fi
    if [[ ${FLASH_ATTENTION_DISABLE:-0} == 1 ]]; then
        keys+=("actor_rollout_ref.model.override_config.attn_implementation=sdpa")
    fi
    keys+=("$@") # the last: options of `train` may follow
    # shellcheck disable=SC2016 # the task expands them
    local program=(bash -c 'echo $$ >"$LAUNCHER_PID" && exec "$@"' _ "$python" scripts/main_ppo.py "${keys[@]}")
    program+=(--stop-grace 500)
    if ((nodes > 1)); then
        local hosts
        hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST") # a line each; the first one is the head
        export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300 # seconds; Ray's 30 are few for a cold file system
        program=(ray symmetric-run --address "${hosts%%$'\n'*}:6379" --min-nodes "$nodes" -- "${program[@]}")
    fi
    in_tasks --nodes "$nodes" --ntasks "$nodes" --ntasks-per-node 1 "${program[@]}"
}

train() {
    local address
    address=$(scontrol show node "$SLURMD_NODENAME") # of the first node, which runs this script and task 0
    address=${address#*NodeAddr=}
    address=${address%%[[:space:]]*}:$((20000 + SLURM_JOB_ID % 10000)) # where Linux gives no port by itself
    # shellcheck disable=SC2016 # each task expands them
    in_tasks --ntasks "${SLURM_NTASKS:-$nodes}" bash -c \
        '((SLURM_PROCID)) || echo $$ >"$LAUNCHER_PID"; exec "$@" --machine-rank "$SLURM_PROCID"' _ \
        "$python" -m async_grpo.cli train "$@" --main-process "$address" --stop-grace 500
}

# in_tasks OPTION-OF-SRUN ... PROGRAM: runs srun to its end, and returns its exit code. SLURM's signal goes to this
# script alone (B:). It is passed on to the launcher alone: SLURM's own SIGTERM ends every process of the job, also
# Ray's, before there is a checkpoint. This script and the launcher, whose pid comes into the file $LAUNCHER_PID, are on
# one host.
in_tasks() {
    local step code interrupted=1
    LAUNCHER_PID=$(mktemp)
    export LAUNCHER_PID
    trap 'interrupted=1; echo "the walltime is near: the run writes a checkpoint and ends; sbatch again continues it"
        [[ ! -s $LAUNCHER_PID ]] || kill -TERM "$(<"$LAUNCHER_PID")" || true' USR1 # it may have ended by itself
    srun "$@" &
    step=$!
    while ((interrupted)); do # the signal ends `wait`, not the step
        interrupted=0 code=0
        wait "$step" || code=$?
    done
    rm -f "$LAUNCHER_PID"
    return "$code"
}
