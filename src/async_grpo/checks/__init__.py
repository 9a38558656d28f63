"""Before a run and after a failure: the plan of a dry run, the doctor's checks, and the archive for a bug report.

A run in progress is looked at by `async_grpo.status`. Start with `doctor/checkup` or `plan/dry_run`.
"""
