#!/usr/bin/env bash
# Qwen2.5-32B on mathematics, GRPO, evaluated on MATH-500. Submit it in the checkout:
#
#     SHARED_DATA_PATH=/shared/guru BASE_MODEL=/shared/Qwen2.5-32B sbatch scripts/slurm/multinode_math.sh
#
# The trainer is on all nodes (trainer.trainer_nodes): 32 B parameters take 16 bytes each, 18 GB on each of 4 × 7 GPUs
# before activations. The last GPU of each node generates, and has them whole: 64 GB in bf16, beside its cache, so this
# wants GPUs of 141 GB, or on those of 80 GB rollout.gpu_memory_utilization=0.95. The folder of the checkpoints must be
# one that all nodes share. `--dry-run` after the script's name says what fits. TRAIN_FILES and VAL_FILES replace the
# files; further keys, or options of `async-grpo train`, may follow. Never run here: SLURM with several nodes, a GPU,
# 32 B.
#SBATCH --job-name=async-grpo-math
#SBATCH --nodes=4
#SBATCH --gres=gpu:8
#SBATCH --exclusive
#SBATCH --ntasks-per-node=1
#SBATCH --time=48:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --output=slurm-%x-%j.out
source "${SLURM_SUBMIT_DIR:?is not set: submit this script with sbatch, in the checkout}/scripts/slurm/start.sh"

data=${SHARED_DATA_PATH:?is the folder of the parquet files}

main_ppo \
    data.train_files="${TRAIN_FILES:-['$data/math__combined_54.4k.parquet']}" \
    data.val_files="${VAL_FILES:-['$data/math__math_500.parquet']}" \
    data.train_batch_size=56 \
    data.max_prompt_length=2048 \
    data.max_response_length=8192 \
    data.filter_overlong_prompts=true \
    actor_rollout_ref.model.path="${BASE_MODEL:-Qwen/Qwen2.5-32B}" \
    actor_rollout_ref.actor.ppo_mini_batch_size=14 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \
    actor_rollout_ref.rollout.n=8 \
    +async.trainer_gpus_per_node=7 \
    algorithm.adv_estimator=grpo \
    "trainer.logger=['console']" \
    trainer.val_before_train=false \
    trainer.total_epochs=3 \
    trainer.test_freq=20 \
    trainer.save_freq=20 \
    trainer.resume_mode=auto \
    trainer.project_name=math \
    trainer.experiment_name=qwen2.5-32b \
    "$@"
