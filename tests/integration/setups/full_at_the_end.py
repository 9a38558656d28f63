"""The setup of `random_model.py` on a disk that is full at the end: `TEST_FULL` writes find no room."""

import errno
import os
from pathlib import Path

import random_model

write_text = Path.write_text
left = int(os.environ["TEST_FULL"])


def on_a_full_disk(path: Path, text: str, *args, **kwargs) -> int:
    global left
    if left > 0 and '"state": "finished"' in text and path.name.startswith((".run.json", ".summary.json")):
        left -= 1
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    return write_text(path, text, *args, **kwargs)


Path.write_text = on_a_full_disk
get_trainer = random_model.get_trainer
