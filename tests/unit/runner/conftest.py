"""Puts this folder on the path, for `experiment_yard`."""

import sys
from pathlib import Path

from kit.commands import printed, refused

__all__ = ["printed", "refused"]

sys.path.insert(0, str(Path(__file__).parent))
