"""The setup file's `GRPOConfig`: the values that `--set` gives it, and the arithmetic of its batch.

`values` reads the texts of the command line, `building` puts them in place while a trainer is built.
"""
