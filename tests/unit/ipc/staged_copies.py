"""Staging over lanes of a GPU that work as late as they may."""

from __future__ import annotations

import random
from typing import Any

import torch

from async_grpo_ipc.staging import Staging


class LateLane:
    """A stream of a GPU that works only while somebody waits for it, whenever `dice` says."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._told: list[Any] = []
        self._done = 0
        self.others: list[LateLane] = []

    def copy(self, into, out_of):
        self._told.append(lambda: into.copy_(out_of))

    def mark(self):
        return self, len(self._told)

    def wait(self, mark):
        self._told.append(mark)

    def begin(self):
        pass

    def finish(self):
        while self._done < len(self._told):
            able = [lane for lane in (self, *self.others) if lane.is_able()]
            assert able, "each lane waits for the other"
            self._dice.choice(able).do_next()

    def is_able(self):
        if self._done == len(self._told):
            return False
        following = self._told[self._done]
        return callable(following) or following[0]._done >= following[1]

    def do_next(self):
        following = self._told[self._done]
        if callable(following):
            following()
        self._done += 1


def staging(seed: int, nbytes: int) -> Staging:
    dice = random.Random(seed)
    down, up = LateLane(dice), LateLane(dice)
    down.others, up.others = [up], [down]
    return Staging((torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)), down, up)
