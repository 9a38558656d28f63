#!/usr/bin/env bash
# A setup file of your own, whose trainer is on all nodes of the job, without Ray. Submit it in the checkout:
#
#     sbatch --nodes=2 scripts/slurm/train.sh my_trainer.py --accelerate-config two.yaml --worker-device-ids 6,7
#
# two.yaml has `num_machines: 2`. All that follows the name of the script is said to `async-grpo train` on each node,
# and `--main-process HOST:PORT --machine-rank R` with it. Workers are on the first node. `--resume` continues. Never
# run here: SLURM with several nodes, a GPU.
#SBATCH --job-name=async-grpo
#SBATCH --nodes=2
#SBATCH --gres=gpu:8
#SBATCH --exclusive
#SBATCH --ntasks-per-node=1
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --output=slurm-%x-%j.out
source "${SLURM_SUBMIT_DIR:?is not set: submit this script with sbatch, in the checkout}/scripts/slurm/start.sh"

train "$@"
