"""The trainer that `trl grpo` would train, built by TRL's own code: `trl.scripts.grpo`, up to the trainer."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from async_grpo.errors import SetupFileError, UsageError
from async_grpo.setup.generated.trl_arguments import environment_of, unrecognized
from async_grpo.setup.grpo_config.batch import BatchError
from async_grpo.setup.replaced import instead

if TYPE_CHECKING:
    from transformers import TrainerCallback
    from trl import GRPOTrainer

_END = "async_grpo_at_the_end"  # attribute of the trainer: what TRL's command does when the training is over


class TRLCommand:
    """`trl grpo` with these arguments, given in `directory`.

    Raises:
        UsageError: the YAML file cannot be used.
    """

    def __init__(self, arguments: Sequence[str], directory: str) -> None:
        self._arguments, self._directory = list(arguments), directory
        wanted = environment_of(arguments)
        self._env = {name: os.environ.get(name, value) for name, value in wanted.items()}  # the launcher decides
        os.environ.update(self._env)

    def trainer(self) -> GRPOTrainer:
        """Build the trainer, and let its training end as TRL's command ends.

        Raises:
            UsageError: TRL's parser, or a configuration that it makes, refuses the arguments.
        """
        with _working_in(Path(self._directory)):
            from trl.scripts import grpo

            parsed = self._parsed(grpo)
            trainer = _built_by(grpo.main, parsed)
        trainer.add_callback(_end_as_trl_does(trainer, parsed[0].dataset_name))
        return trainer

    def _parsed(self, grpo: Any) -> list[Any]:
        """Script, GRPO, model and dataset arguments."""

        def refuse(message: str) -> NoReturn:
            raise UsageError(f"trl grpo: error: {message}")

        parser = grpo.make_parser(prog="trl grpo")
        parser.error = refuse
        try:
            *parsed, of_file, of_flags = parser.parse_args_and_config(
                self._arguments, return_remaining_strings=True, separate_remaining_strings=True
            )
        except BatchError:
            raise
        except ValueError as error:
            raise UsageError(f"trl grpo: error: {error}") from error
        finally:
            os.environ.update(self._env)  # the parser has set what the YAML file says
        if unknown := [text for text in (*of_file, *of_flags) if text.startswith("--")]:
            refuse(unrecognized(unknown))
        return parsed


class _Built(BaseException):
    """Ends TRL's `main` where it has made its trainer."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.trainer = trainer


def _built_by(main: Any, parsed: Sequence[Any]) -> GRPOTrainer:
    import trl

    trainer_class = trl.GRPOTrainer

    def build(*args: Any, **kwargs: Any) -> NoReturn:
        raise _Built(trainer_class(*args, **kwargs))

    try:
        with instead(trl, GRPOTrainer=build):
            main(*parsed)
    except _Built as built:
        return built.trainer
    raise SetupFileError(
        "TRL's command has made no trainer: this version of TRL builds it in another way. Install the tested version "
        "(`async-grpo doctor` names it), or write a setup file: async-grpo init my_trainer.py."
    )


@contextmanager
def _working_in(directory: Path) -> Iterator[None]:
    """Work in the folder where the command was given, for what is relative; if it is gone, in the present one."""
    here = Path.cwd()
    with suppress(FileNotFoundError, NotADirectoryError):
        os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(here)


def end_as_trl_does(trainer: GRPOTrainer) -> None:
    """What is still to do where a resumed run has done its steps already: it was killed before it had done it."""
    end = getattr(trainer, _END, None)  # of a setup file of the user's own: nothing
    if end is not None:
        end()


def _end_as_trl_does(trainer: GRPOTrainer, dataset_name: str | None) -> TrainerCallback:
    from transformers import TrainerCallback

    def end() -> None:
        """What TRL's `main` does after the training: the model goes into `output_dir`, and to the Hub if asked."""
        trainer.save_model(trainer.args.output_dir)
        trainer.accelerator.print(f"model saved to {trainer.args.output_dir}")
        if trainer.args.push_to_hub:
            trainer.push_to_hub(dataset_name=dataset_name)

    class SavesTheModel(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step >= state.max_steps:  # else it was stopped: --resume goes on
                end()

    setattr(trainer, _END, end)
    return SavesTheModel()
