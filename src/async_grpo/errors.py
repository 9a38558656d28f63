"""Errors meant for a person: each says what is wrong, why, and what to do."""


class AsyncGRPOError(Exception):
    """A condition that a user can act on. The command line prints its text alone, without a traceback."""

    exit_code = 2  # input that cannot be used


class UsageError(AsyncGRPOError):
    """A flag, an environment variable or a file that the user gave cannot be used."""


class SetupFileError(AsyncGRPOError):
    """The user's trainer file could not be turned into a `trl.GRPOTrainer`."""


class UnsupportedError(AsyncGRPOError):
    """A feature of TRL that cannot run distributed yet, or what one row or completion would need of it."""


class RunRefused(UnsupportedError):
    """A setting, a class or an engine that no worker can do right: raised in one, it ends the run at the first time."""


class RunDirError(AsyncGRPOError):
    """The run directory is in use, belongs to someone else, or holds a run that must not be overwritten."""


class QueueError(AsyncGRPOError):
    """The job queue cannot continue."""

    exit_code = 1


class BadFileError(QueueError):
    """A file of a run is truncated, garbled, foreign, of an unknown schema, or no plain file at all."""


class BadGroupError(QueueError):
    """A finished group cannot be written: what the user's code made of it is not what a group holds."""


class DiskFullError(QueueError):
    """There is no space for a file of the queue. Nothing was lost: wait for space and try again."""


class PeerDiedError(AsyncGRPOError):
    """The process that this one waits for is gone."""

    exit_code = 1


class WeightsError(AsyncGRPOError):
    """The published weights could not be had this time."""

    exit_code = 1


class GeneratorError(AsyncGRPOError):
    """What generates for this worker is gone, or does not do as it is asked: no fault of any job."""

    exit_code = 1


class RunFailedError(AsyncGRPOError):
    """A run that was started from Python has failed, or its process was killed."""

    exit_code = 1


class WaitTimeoutError(AsyncGRPOError):
    """A wait reached its deadline."""

    exit_code = 1


class AllGroupsFailedError(AsyncGRPOError):
    """Every prompt group failed, so there is nothing to train on."""

    exit_code = 1


class DeltaChainError(AsyncGRPOError):
    """A chain of deltas is not there, is another run's, or cannot be rebuilt up to the version asked for."""


MOST_OF_A_REASON = 1_000  # characters


def reason_of(error: BaseException) -> str:
    """The error in one line, for a record of why a run failed; of a traceback that it quotes, the last line."""
    said, quoted, traceback = str(error).partition("Traceback (most recent call last):")
    text = " ".join([*said.split(), *(traceback.strip().splitlines()[-1:] if quoted else [])])
    return (text if isinstance(error, AsyncGRPOError) else f"{type(error).__name__}: {text}")[:MOST_OF_A_REASON]


class UserCodeExit(RuntimeError):
    """Code of the user's (a tool, an environment, a reward) wanted to end the process: an error of that call."""


USER_ERRORS = (Exception, SystemExit, KeyboardInterrupt)  # that code of the user's may raise
