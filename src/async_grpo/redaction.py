"""What is a secret, by its name or by its looks, and text without it. Too much is taken rather than too little."""

from __future__ import annotations

import re
from collections.abc import Iterable

MASK = "[removed]"

_SECRET_NAME = re.compile(
    r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|_KEY$|^KEY$|AUTH|COOKIE|DSN|WEBHOOK",
    re.IGNORECASE,
)
_CREDENTIALS_IN_URL = re.compile(r"(?<=://)(?:[^/\s'\"]*:[^\s'\"]*|[^/\s'\"]+)(?=@)")  # user:password, or a token alone
_HEADER = re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{6,}")
_KNOWN_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|api_org_\w{8,}|sk-[\w-]{12,}|gh[pousr]_\w{12,}|github_pat_\w{12,}|glpat-[\w-]{12,}"
    r"|xox[abeprs]-[\w-]{8,}|A[KS]IA[0-9A-Z]{12,}|AIza[\w-]{20,}|pypi-[\w-]{16,}|wandb_v\d_\w{8,}"
    r"|eyJ[\w-]{8,}\.[\w-]{4,}(?:\.[\w-]*)?|[0-9a-f]{40,})\b"
)
_KEY_BLOCK = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
# NAME=value, "name": "value", --token value; a bare number is a count of tokens, no secret
_ASSIGNED = re.compile(
    r"(?i)((?:[\w-]*(?:token|secret|passw(?:or)?d|passphrase|credentials?|api[_-]?key|access[_-]?key|private[_-]?key)|"
    r"authorization)[\"']?\s*(?:[=:]|(?<=\w)\s)\s*[\"']?)(?![\d.,]+(?:[\s,;}\"')]|$))([^\s\"',;}]{6,})"
)
_URL_PARAMETER = re.compile(r"(?i)([?&](?:[\w-]*(?:token|key|secret|signature|sig|password))=)[^&\s\"']+")


def names_a_secret(name: str) -> bool:
    """Whether an environment variable, an option or a key of this name may hold one."""
    return _SECRET_NAME.search(name) is not None


class Redactor:
    """Removes given secrets, in whatever text, and what looks like one."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        longest_first = sorted(set(secrets), key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def __call__(self, text: str) -> str:
        if self._known is not None:
            text = self._known.sub(MASK, text)
        text = _KEY_BLOCK.sub(MASK, text)
        text = _CREDENTIALS_IN_URL.sub(MASK, text)
        text = _HEADER.sub(rf"\1 {MASK}", text)
        text = _KNOWN_SHAPES.sub(MASK, text)
        text = _URL_PARAMETER.sub(rf"\1{MASK}", text)
        return _ASSIGNED.sub(rf"\1{MASK}", text)
