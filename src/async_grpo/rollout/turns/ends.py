"""How messages end that a tag ends (`</tool>`): as the chat template ends them, by tokens that no model sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from async_grpo.setup.sampling import stop_tags

_SAID = "dummy"


class MessageEnds:
    """Ends of a trainer's messages. Where its tokenizer has no stop tags, every message ends as the model ended it."""

    def __init__(self, trainer: Any) -> None:
        self._tags = stop_tags(trainer)
        self._tokenizer = trainer.processing_class
        self._eos = set(trainer.eos_token_ids) if self._tags else set()
        self._ids = self._written() if self._tags else []

    def missing_after(self, ids: Sequence[int]) -> list[int]:
        """The tokens that the chat template writes after these, where a tag ended the message and not the model."""
        if not self._tags or not ids or ids[-1] in self._eos:
            return []
        tail = self._tokenizer.decode(ids[-max(map(len, self._tags)) :])
        return list(self._ids) if any(tag in tail for tag in self._tags) else []

    def last_missing_after(self, ids: Sequence[int]) -> list[int]:
        """Those of them up to the end token, by which TRL sees that a completion was not cut."""
        missing = self.missing_after(ids)
        ends = [index for index, token in enumerate(missing) if token in self._eos]
        return missing[: ends[0] + 1] if ends else []

    def _written(self) -> list[int]:
        tokenizer = self._tokenizer
        dialogue = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _SAID}]
        text = tokenizer.apply_chat_template(dialogue, tokenize=False).rpartition(_SAID)[2]
        before, eos, _ = text.partition(tokenizer.eos_token)  # as TRL's loop, which aligns at the end token
        return list(tokenizer(before + eos, add_special_tokens=False)["input_ids"])
