"""What tests share. Imported as `kit`, whose folder is on the path of pytest.

A user's trainer: `tiny_trainer`, `tiny_vlm`, `own_code`, `tools`, `turns`; setup files in `setups`.
A run in this process: `in_process`, `scripted`, `agents`; held against TRL by `compared_with_trl`, `recorded_batches`.
A run by command: `runs`, `several_ranks`, `learnt_by_heart`, `real_experiment`, `verl_files`.
A command in this process, and what it says: `commands`.
Stand-ins: `worker_fakes`, `training_fakes`, `engines`, `fake_cuda`, `fake_vllm_server`, `plans`, `archived_run`.
Waits for a condition, and for the end of processes: `waiting`.
"""
