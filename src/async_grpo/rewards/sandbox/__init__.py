"""Run code that a model wrote, for rewards that need its output. Off by default; without isolation nothing is run.

The program is a new Python (`-I -S`, empty environment, no open files but its own three) in new namespaces: it sees
Python and the system's libraries read-only, one small writable directory in memory, no network, no device, no process
but its own, and has no right of its user. A filter takes system calls away from it that no ordinary program needs. Its
time, memory, files, processes and output are limited, each sandbox for itself, and whatever it started ends with it.
bubblewrap makes the namespaces and what the program sees of the disk; without it nothing is run. SECURITY.md says what
holds where.

Not contained: bugs of the kernel, which is shared, and what the libraries in /usr reveal about the machine. For
adversaries use a virtual machine.

`run` starts a program with bubblewrap and watches it, `stage` is process 1 in the namespaces, and `seccomp` is the
filter of system calls.
"""

from async_grpo.rewards.sandbox.run import SWITCH, Limits, SandboxError, SandboxResult, run_code

__all__ = ["SWITCH", "Limits", "SandboxError", "SandboxResult", "run_code"]
