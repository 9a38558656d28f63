"""`async-grpo check`: a setup file trained for two steps as a run and in plain TRL on the same completions, compared.

`check` runs both and orders the lines. Generated setup files build the trainer by `checked_trainer` in every process;
`recorder` and `user_code` note what is trained on and what the user's code is given, `plain` is the process of plain
TRL. `called`, `scored` and `trained` make the lines. Private names of TRL are in `recorder` and `plain`.
"""
