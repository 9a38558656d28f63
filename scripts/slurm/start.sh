# Sourced by the scripts beside this file: `main_ppo KEY=VALUE ...` trains on all nodes of the SLURM job, and writes a
# checkpoint before the walltime ends. A job that is submitted again continues (trainer.resume_mode=auto).
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
    local keys=("trainer.nnodes=$nodes") pid_file step code interrupted=1
    if ((gpus)); then keys+=("trainer.n_gpus_per_node=$gpus"); else keys+=(trainer.device=cpu); fi
    if [[ ${FLASH_ATTENTION_DISABLE:-0} == 1 ]]; then
        keys+=("actor_rollout_ref.model.override_config.attn_implementation=sdpa")
    fi
    keys+=("$@") # the last: options of `train` may follow
    # SLURM's signal goes to this script alone (B:). It is passed on to the launcher alone: SLURM's own SIGTERM ends
    # every process of the job, also Ray's, before there is a checkpoint. This script and the launcher are on one host.
    pid_file=$(mktemp)
    local program=(bash -c 'echo $$ >"$0" && exec "$@"' "$pid_file" "$python" scripts/main_ppo.py "${keys[@]}")
    program+=(--stop-grace 500)
    if ((nodes > 1)); then
        local hosts
        hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST") # a line each; the first one is the head
        export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300 # seconds; Ray's 30 are few for a cold file system
        program=(ray symmetric-run --address "${hosts%%$'\n'*}:6379" --min-nodes "$nodes" -- "${program[@]}")
    fi
    trap 'interrupted=1; echo "the walltime is near: the run writes a checkpoint and ends; sbatch again continues it"
        [[ ! -s $pid_file ]] || kill -TERM "$(<"$pid_file")" || true' USR1 # it may have ended by itself
    srun --nodes "$nodes" --ntasks "$nodes" --ntasks-per-node 1 "${program[@]}" &
    step=$!
    while ((interrupted)); do # the signal ends `wait`, not the step
        interrupted=0 code=0
        wait "$step" || code=$?
    done
    rm -f "$pid_file"
    return "$code"
}
