"""The logger of this package: its sinks are its own, whatever a setup file does with `loguru.logger`.

loguru makes one logger for all, and its advice to programs begins with `logger.remove()`. This one is made by the same
module, executed a second time.
"""

from __future__ import annotations

from importlib.util import find_spec, module_from_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loguru import Logger

_spec = find_spec("loguru")
assert _spec is not None and _spec.loader is not None
_own = module_from_spec(_spec)
_spec.loader.exec_module(_own)
logger: Logger = _own.logger
