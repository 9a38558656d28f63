"""From a setup file and a machine to a trainer that can run: devices, the process, the generator, TRL on a CPU.

`algorithm` is what a trainer class declares of itself, for all who train, sample or check it.

Nothing here knows of jobs or weights. Start with `setup_file`.
"""
