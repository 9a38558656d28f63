#!/usr/bin/env bash
# Qwen2.5-7B on six tasks, PPO with a critic, gradients by PCGrad. Submit it in the checkout:
#
#     SHARED_DATA_PATH=/shared/guru BASE_MODEL=/shared/Qwen2.5-7B sbatch scripts/slurm/multinode_mtl.sh
#
# It trains on half of the GPUs of all nodes, and generates on the others; the folder of the checkpoints must be one
# that all nodes share. `--nodes 1` tries it on one machine. TRAIN_FILES replaces the files; further keys, or options of
# `async-grpo train`, may follow the name of the script. Rows of codegen need ASYNC_GRPO_RUN_MODEL_CODE=1, those of
# stem_web a judge at STEM_LLM_JUDGE_URL. Never run here: SLURM with several nodes, a GPU, these files.
#SBATCH --job-name=async-grpo-mtl
#SBATCH --nodes=4
#SBATCH --gres=gpu:8
#SBATCH --exclusive
#SBATCH --ntasks-per-node=1
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --output=slurm-%x-%j.out
source "${SLURM_SUBMIT_DIR:?is not set: submit this script with sbatch, in the checkout}/scripts/slurm/start.sh"

data=${SHARED_DATA_PATH:?is the folder of the parquet files}
TRAIN_FILES=${TRAIN_FILES:-"{
    'math': '$data/math__combined_54.4k.parquet',
    'codegen': ['$data/codegen__leetcode2k_1.3k.parquet', '$data/codegen__taco_8.8k.parquet'],
    'logic': ['$data/logic__zebra_puzzle_1.3k.parquet', '$data/logic__ordering_puzzle_1.9k.parquet'],
    'simulation': '$data/simulation__codeio_3.7k.parquet',
    'table': '$data/table__hitab_4.3k.parquet',
    'stem': '$data/stem__web_3.6k.parquet',
}"}

main_ppo \
    data.train_files="$TRAIN_FILES" \
    data.train_batch_size=192 \
    data.max_prompt_length=4096 \
    data.max_response_length=8192 \
    data.filter_overlong_prompts=true \
    actor_rollout_ref.model.path="${BASE_MODEL:-Qwen/Qwen2.5-7B}" \
    actor_rollout_ref.actor.ppo_mini_batch_size=96 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 \
    actor_rollout_ref.actor.clip_ratio_c=10 \
    algorithm.adv_estimator=gae \
    mtl.enabled=true \
    mtl.method=pcgrad \
    mtl.num_tasks_expected=6 \
    mtl.ensure_all_tasks_per_step=true \
    "trainer.logger=['console']" \
    trainer.val_before_train=false \
    trainer.total_epochs=3 \
    trainer.save_freq=20 \
    trainer.resume_mode=auto \
    trainer.project_name=mtl \
    trainer.experiment_name=qwen2.5-7b-pcgrad \
    "$@"
