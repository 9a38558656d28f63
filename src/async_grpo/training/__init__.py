"""The trainer's side: prompts become jobs, finished groups become TRL's batches, every step becomes a version.

Generation and scoring are in `async_grpo.rollout`; neither room imports the other. Start with `loop`.
"""
