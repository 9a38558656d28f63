"""Warnings of TRL and PEFT, for the screen of a run: the first of each kind becomes a line of our own log.

What libraries print stays in the log file of the process, where nobody looks during a run. A kind is a line of the
library's code; what it says again goes where it went before.
"""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

from async_grpo.log import logger

SAID_BY = "said by"  # how such a line begins: the screen shows it once, though every process may say it
LIBRARIES = ("trl", "peft")
_RANK_0 = "[RANK 0] "  # which accelerate writes before what TRL says


def show_library_warnings() -> None:
    """From now on in this process. Harmless to call twice."""
    if getattr(warnings.showwarning, "__self__", None) is not None:
        return
    kinds = _Kinds(warnings.showwarning)
    warnings.showwarning = kinds.show
    for library in LIBRARIES:
        logging.getLogger(library).addHandler(_ShownRecords(kinds))


class _Kinds:
    """Says what each line of a library warns of first. Other warnings are shown by `otherwise`."""

    def __init__(self, otherwise: Any) -> None:
        self._otherwise = otherwise
        self._known: set[tuple[str, int]] = set()

    def tell(self, module: str, line: int, text: str) -> bool:
        """Whether it was new, and was told."""
        if (module, line) in self._known:
            return False
        self._known.add((module, line))
        logger.warning("{} {}: {}", SAID_BY, module, " ".join(text.removeprefix(_RANK_0).split()))
        return True

    def show(self, message: Warning | str, *args: Any, **kwargs: Any) -> None:
        """In the place of `warnings.showwarning`."""
        warner = sys._getframe(2)  # it calls `warnings.warn`, which names the caller of a function that is misused
        module = str(warner.f_globals.get("__name__", ""))
        ours = module.partition(".")[0] in LIBRARIES
        if not (ours and self.tell(module, warner.f_lineno, str(message))):
            self._otherwise(message, *args, **kwargs)


class _ShownRecords(logging.Handler):
    """A handler of the library's logger. Where nobody has set another one up, Python writes the record to stderr."""

    def __init__(self, kinds: _Kinds) -> None:
        super().__init__(logging.WARNING)
        self._kinds = kinds

    def emit(self, record: logging.LogRecord) -> None:
        new = self._kinds.tell(record.name, record.lineno, record.getMessage())
        if not new and not logging.getLogger().handlers and logging.lastResort is not None:
            logging.lastResort.handle(record)
