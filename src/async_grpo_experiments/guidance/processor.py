"""The logits processor that adds a head's offsets to the likeliest candidates, in one pass of the head a token.

Letters after names are shapes: B rows (b of them are still decoded), L tokens so far, n of them new, k candidates, V
tokens of the vocabulary.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from async_grpo.errors import RunRefused, UnsupportedError, UsageError
from async_grpo_experiments.guidance.divergence import divergence_of_offsets
from async_grpo_experiments.guidance.head import (
    HeadRecord,
    ValueHead,
    checked_record,
    tokens_of,
    vocabulary_of,
    weights_digest,
)
from async_grpo_experiments.guidance.offsets import DISABLED, MODES, centred, check_mode, offsets
from async_grpo_experiments.guidance.strength import one_eta


class Guidance:
    """How decoding follows a head.

    Args:
        head: its folder, or the head itself.
        eta: η, in units of the reward; smaller follows the head more.
        inverse_eta: 1/η, in place of `eta`.
        mode: of `offsets`; by default the first that the head's loss allows, `log_odds` for preferences. `disabled`
            leaves the logits alone.
        top_k: how many of the likeliest tokens are scored; -1: all.
        use_cache: keep the head's keys and values from token to token.

    Raises:
        UsageError: an argument cannot be used, or the folder holds no head.
        BadFileError: the head's files are damaged.
    """

    def __init__(
        self,
        *,
        head: str | Path | ValueHead,
        eta: float | None = None,
        inverse_eta: float | None = None,
        mode: str | None = None,
        top_k: int = 20,
        use_cache: bool = True,
    ) -> None:
        if top_k != -1 and top_k < 1:
            raise UsageError(f"top_k must be at least 1, or -1 for all tokens, got {top_k}.")
        self.head = head
        self.record = head.record if isinstance(head, ValueHead) else checked_record(head)
        self.eta = one_eta(eta, inverse_eta)
        self.mode = mode or _default_mode(self.record)
        check_mode(self.mode, self.record.loss)
        self.top_k, self.use_cache = top_k, use_cache
        self._checked, self._size = None, 0  # the tokenizer that was checked last, and its tokens

    def processors(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        *,
        attention_mask: Tensor | None,
        temperature: float,
        eta: float | None = None,
    ) -> LogitsProcessorList:
        """The processors of one call of `model.generate`; none with `disabled`.

        Args:
            attention_mask: [B, P], of the prompts; None where none is padded.
            temperature: of the sampler; 0: greedy.
            eta: another strength than `self.eta`.

        Raises:
            RunRefused: the head's values are of another temperature, model or tokenizer.
        """
        if self.mode == DISABLED:
            return LogitsProcessorList()
        self.check_tokenizer(tokenizer)
        self._check_sampler(model, temperature)
        head = self.head if isinstance(self.head, ValueHead) else _loaded(Path(self.head), self.record.weights_hash)
        processor = GuidanceProcessor(
            head.to(model.device),
            self,
            eta=self.eta if eta is None else one_eta(eta, None),
            attention_mask=attention_mask,
            tokens=self._size,
            pad_token_id=getattr(tokenizer, "pad_token_id", None),
            is_greedy=temperature == 0,
        )
        return LogitsProcessorList([processor])

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Raise `RunRefused`, with the first token that differs, where the head's tokens are not the tokenizer's."""
        if tokenizer is self._checked:
            return
        ours = self.head.tokens if isinstance(self.head, ValueHead) else tokens_of(self.head)
        theirs = vocabulary_of(tokenizer)
        pairs = enumerate(zip_longest(ours, theirs))
        if (differs := next((index for index, (one, other) in pairs if one != other), None)) is not None:
            one, other = (_token(tokens, differs) for tokens in (ours, theirs))
            raise RunRefused(
                f"{self._name} is of the tokenizer {self.record.tokenizer or 'of its model'} ({len(ours):,} tokens), "
                f"and the model decodes with {getattr(tokenizer, 'name_or_path', '') or 'another'} ({len(theirs):,} "
                f"tokens). The first that differs is {differs}: {one} there, {other} here. Train a head for this one."
            )
        self._checked, self._size = tokenizer, len(theirs)

    def _check_sampler(self, model: PreTrainedModel, temperature: float) -> None:
        record = self.record
        if temperature not in (0, record.temperature):
            raise RunRefused(
                f"{self._name} has values of the sampler at temperature {record.temperature}, and decoding is at "
                f"{temperature}. Set the temperature to {record.temperature}, or to 0 for greedy decoding."
            )
        if weights_digest(model) != record.model_hash:
            raise RunRefused(
                f"{self._name} has values of {record.model or 'another model'}, whose weights are not those of the "
                "model that decodes. Decode with that one, or train a head for this one."
            )

    @property
    def _name(self) -> str:
        return "The head" if isinstance(self.head, ValueHead) else f"The head {self.head}"


class GuidanceProcessor(LogitsProcessor):
    """Adds T·o to the logits of the `top_k` likeliest tokens: it comes before the temperature. Of one `generate`.

    Attributes:
        divergences_b: KL(q‖π) of the last token's distribution, in nats; None before the first, and with greedy
            decoding.
    """

    divergences_b: Tensor | None = None

    def __init__(
        self,
        head: ValueHead,
        guidance: Guidance,
        *,
        eta: float,
        attention_mask: Tensor | None,
        tokens: int,
        pad_token_id: int | None,
        is_greedy: bool,
    ) -> None:
        self._head, self._guidance, self._eta, self._tokens = head.eval(), guidance, eta, tokens
        self._pad_token_id, self._is_greedy = pad_token_id, is_greedy
        self._mask_bP = attention_mask
        self._levels = head.record.levels.to(head.scores.weight.device, torch.float32)
        self._cache = DynamicCache() if guidance.use_cache and _attends_to_all(head.backbone) else None
        self._cached_bL: Tensor | None = None  # tokens whose keys and values are in the cache

    def __call__(self, input_ids_bL: Tensor, scores_bV: Tensor) -> Tensor:
        mask_bL = self._mask_of(input_ids_bL)
        known_bV = scores_bV[:, : self._tokens]  # rows that pad the embedding are no candidates
        k = known_bV.shape[1] if self._guidance.top_k == -1 else min(self._guidance.top_k, known_bV.shape[1])
        candidates_bk = known_bV.topk(k, dim=-1).indices
        with torch.no_grad():
            score = self._score_alone if self._cache is None else self._score_cached
            logits_bkK = score(input_ids_bL, mask_bL, candidates_bk)
        record = self._head.record
        offsets_bk = centred(
            offsets(
                self._guidance.mode,
                logits_bkK,
                eta=self._eta,
                levels=self._levels,
                v_min=record.v_min,
                v_max=record.v_max,
                beta=record.beta,
            )
        )
        offsets_bV = torch.zeros_like(scores_bV, dtype=torch.float32).scatter(1, candidates_bk, offsets_bk)
        if not self._is_greedy:
            logprobs_bV = torch.log_softmax(scores_bV.float() / record.temperature, dim=-1)
            self.divergences_b = divergence_of_offsets(logprobs_bV, offsets_bV)
        return scores_bV + record.temperature * offsets_bV

    def keep(self, rows_b: Tensor) -> None:
        """Forget all rows but these, numbered among those of the last call: the next call has only them."""
        if self._mask_bP is not None:
            self._mask_bP = self._mask_bP[rows_b]
        if self._cache is not None and self._cached_bL is not None:
            self._cache.batch_select_indices(rows_b)
            self._cached_bL = self._cached_bL[rows_b]

    def _mask_of(self, input_ids_bL: Tensor) -> Tensor:
        """1 for tokens, 0 for padding."""
        ones_bL = torch.ones_like(input_ids_bL)
        if self._mask_bP is None:
            pad = self._pad_token_id
            if self._cached_bL is None and pad is not None and bool(input_ids_bL[:, 0].eq(pad).any()):
                raise UsageError(
                    "A prompt begins with the padding token, and guidance has no attention_mask: give it the one that "
                    "generate gets."
                )
            return ones_bL
        if len(self._mask_bP) != len(input_ids_bL):
            raise UsageError(
                f"The attention_mask has {len(self._mask_bP)} rows, and generate decodes {len(input_ids_bL)}: repeat "
                "the prompts yourself, in place of num_return_sequences."
            )
        return torch.cat([self._mask_bP.to(ones_bL), ones_bL[:, self._mask_bP.shape[1] :]], dim=1)

    def _score_alone(self, input_ids_bL: Tensor, mask_bL: Tensor, candidates_bk: Tensor) -> Tensor:
        """Each candidate behind a whole copy of its prefix: [b, k, K]."""
        b, k = candidates_bk.shape
        ids = torch.cat([input_ids_bL.repeat_interleave(k, dim=0), candidates_bk.reshape(-1, 1)], dim=1)
        mask = torch.cat([mask_bL, mask_bL.new_ones(b, 1)], dim=1).repeat_interleave(k, dim=0)
        return self._head(ids, mask, _positions(mask)).logits[:, -1].view(b, k, -1)

    def _score_cached(self, input_ids_bL: Tensor, mask_bL: Tensor, candidates_bk: Tensor) -> Tensor:
        """The new tokens and then all candidates, in one pass behind the cached prefix: [b, k, K].

        A new token sees what is before it. A candidate sees the whole prefix and itself, at the same position.
        """
        assert self._cache is not None
        seen = self._seen(input_ids_bL)
        (b, length), k = input_ids_bL.shape, candidates_bk.shape[1]
        n = length - seen
        sees = torch.ones(n + k, length + k, dtype=torch.bool, device=input_ids_bL.device)
        sees[:n, :length].tril_(seen)
        sees[:n, length:] = False
        sees[n:, length:] = torch.eye(k, dtype=torch.bool, device=sees.device)
        real_bL = torch.cat([mask_bL.bool(), mask_bL.new_ones(b, k, dtype=torch.bool)], dim=1)
        itself = torch.zeros_like(sees)
        itself.diagonal(seen).fill_(True)  # so that a row of padding has something to attend to
        sees_b = (sees & real_bL[:, None, None, :]) | itself
        dtype = self._head.backbone.dtype
        block = torch.zeros(sees_b.shape, dtype=dtype, device=sees.device).masked_fill(~sees_b, torch.finfo(dtype).min)
        ids = torch.cat([input_ids_bL[:, seen:], candidates_bk], dim=1)
        positions_bL = _positions(mask_bL)
        positions = torch.cat([positions_bL[:, seen:], (positions_bL[:, -1:] + 1).expand(b, k)], dim=1)
        found = self._head(ids, block, positions, past_key_values=self._cache, use_cache=True)
        self._cache.crop(-k)
        self._cached_bL = input_ids_bL
        return found.logits[:, n:]

    def _seen(self, input_ids_bL: Tensor) -> int:
        """How many tokens are in the cache; the others are new."""
        if self._cached_bL is None:
            return 0
        seen = self._cached_bL.shape[1]
        if not torch.equal(input_ids_bL[:, :seen], self._cached_bL):
            raise UnsupportedError(
                "The rows are not those of the last token, with one more: guidance needs new processors for each "
                "generate, and rows that keep their places (no beams)."
            )
        return seen


def _default_mode(record: HeadRecord) -> str:
    modes = MODES[record.loss]
    return "log_odds" if record.kind == "preference" and "log_odds" in modes else modes[0]


def _token(tokens: list[str | None], index: int) -> str:
    return repr(tokens[index]) if index < len(tokens) else "none"


def _positions(mask_bL: Tensor) -> Tensor:
    return (mask_bL.cumsum(dim=1) - 1).clamp_min(0)


def _attends_to_all(backbone: PreTrainedModel) -> bool:
    """Whether a mask alone decides what a token sees: other attention, or a recurrent state, decodes without cache."""
    config = backbone.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    windowed = getattr(config, "sliding_window", None) if kinds is None else set(kinds) != {"full_attention"}
    return not windowed and not backbone._is_stateful and config._attn_implementation in ("sdpa", "eager")


@lru_cache(maxsize=1)
def _loaded(folder: Path, weights_hash: str) -> ValueHead:
    """One copy for all strengths; another one where the folder was written again."""
    return ValueHead.load(folder)
