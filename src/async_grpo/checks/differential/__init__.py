"""`async-grpo check`: a setup file trained for two steps as a run and in plain TRL on the same completions, compared.

`check` runs both and has the lines. A generated setup file builds the user's trainer by `building` in every process;
`recorder` notes what the user's code is given and what TRL trains on, `plain` is the process of plain TRL, and
`compare` makes the lines from what was noted. Private names of TRL that are recorded or replaced are in `recorder` and
`plain`.
"""
