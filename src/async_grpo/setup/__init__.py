"""From a setup file and a machine to a trainer that can run: devices, the process, the generator, TRL on a CPU.

Nothing here knows of jobs or weights. Start with `setup_file`.
"""
