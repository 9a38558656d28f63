"""What is a secret, by its name, by its looks or by where it stands, and text without it.

Too much is taken rather than too little. `scripts/secret_rates.py` counts what is found in 100 planted strings and what
is taken from 100 harmless ones, and SECURITY.md has the counts. A scanner of source code is no substitute: of the same
100 strings, detect-secrets 1.5 reports 27.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

MASK = "[removed]"

_SECRET_NAME = re.compile(
    r"TOKEN(?!I[ZS]|S)|(?:API|AUTH|ACCESS|HUB)[_-]?TOKENS|SECRET|PASSW|PASSPHRASE|PASSCODE|PWD|CREDENTIAL|(?:API|ACCESS|ACCOUNT|PRIVATE|SHARED)[_.-]?KEY"
    r"|(?:^|[_.-])PASS$|AUTH(?!OR(?!I[ZS]))|COOKIE|(?:^|_)DSN$|WEBHOOK",
    re.IGNORECASE,
)
_PASSWORD_NAME = re.compile(r"PASSW|PASSPHRASE|PASSCODE|PWD|(?:^|[_.-])PASS$|SECRET", re.IGNORECASE)
_KEY_NAME = re.compile(r"(?:.*[_-])?key", re.IGNORECASE)  # of a cipher, or of a dictionary
_NO_VARIABLE = re.compile(r"(?:Error|Exception|Warning|Failed|Failure)$")

_URL_CREDENTIALS = re.compile(
    r"(:(?:\\*+/){2})(?!git@)(?:[^/\s'\"<>\\@]{0,99}:[^\s'\"<>]{0,400}|[^/\s'\"<>\\]{1,400})(?=@)"
)
_WEBHOOK = re.compile(
    r"(?i)((?:hooks\.slack\.com\\*+/(?:services|workflows|triggers)|discord(?:app)?\.com\\*+/api\\*+/webhooks"
    r"|webhook\.office\.com\\*+/webhookb2|hooks\.zapier\.com\\*+/hooks\\*+/catch)\\*+/)[^\s\"'<>)]+"
)
_URL_PARAMETER = re.compile(
    r"(?i)([?&;](?:[\w.-]{0,60}(?:token|key|secret|signature|sig|passw(?:or)?d|pwd|credential)|code|auth)=)[^&\s\"'<>]+"
)
_HEADER = re.compile(
    r"(?i)((?<![\w-])(?:(?:proxy-)?authorization|(?:set-)?cookie|x-(?=[\w-]*(?:key|token|secret|auth))[\w-]++)"
    r"(?:\\*[\"'])?\s*(?::|=|,)\s*+(?:[bf]?\\*[\"'])?+)(?!\$|\w+ \{)[^\n\"'\\]{3,}"
)
_SCHEME = re.compile(r"(?i)\b(bearer|basic|negotiate)(\s+|%20)(?=[\w.~+/-]*[\d=._+/-])[\w.~+/-]{8,}=*")
_LOGIN = re.compile(r"(?i)(\blogin\s+\S+\s+password\s+|\s(?:-u|--user)[ =][^\s:]+:)[^\s\"']+")  # .netrc, curl
_KEY_BLOCK = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|\Z)", re.DOTALL
)

_SHAPES = (
    r"hf_[A-Za-z0-9]{16,}|api_org_\w{8,}",  # Hugging Face
    r"sk-[\w-]{12,}|gsk_\w{20,}|xai-\w{20,}|pplx-\w{20,}|nvapi-[\w-]{20,}|r8_\w{20,}|fw_\w{20,}|tgp_v1_[\w-]{20,}",
    r"wandb_v\d_\w{8,}",
    r"gh[pousr]_\w{12,}|github_pat_\w{12,}|gl(?:pat|dt|ft|soat|rt|cbt|ptt|oas|imt|agent)-[\w-]{12,}",
    r"xox[abeoprs]-[\w-]{8,}|xapp-[\w-]{8,}",  # Slack
    r"A(?:K|S|BI|CC)IA[0-9A-Z]{12,}",  # AWS
    r"AIza[\w-]{20,}|ya29\.[\w-]{16,}|GOCSPX-[\w-]{16,}",  # Google
    r"pypi-[\w-]{16,}|npm_\w{20,}|dckr_pat_[\w-]{16,}|dop_v1_\w{20,}|shp(?:at|ss|ca|pa)_\w{16,}",
    r"SG\.[\w-]{16,200}+\.[\w-]{16,}|[rsp]k_(?:live|test)_\w{10,}|whsec_\w{16,}|sq0[a-z]{3}-[\w-]{16,}",
    r"dapi[0-9a-f]{32}|hv[sb]\.[\w-]{16,}|dp\.pt\.\w{16,}|lin_api_\w{16,}|ntn_\w{16,}|sntry[su]_[\w=-]{16,}",
    r"figd_[\w-]{16,}|tskey-[\w-]{12,}|glsa_\w{16,}|key-[0-9a-f]{32}|[0-9a-f]{32}-us\d{1,2}|SK[0-9a-f]{32}",
    r"AGE-SECRET-KEY-1\w{16,}|\d{8,10}:AA[\w-]{30,}|[MNO][\w-]{23,25}\.[\w-]{6}\.[\w-]{27,}",  # age, Telegram, Discord
    r"eyJ[\w-]{8,2000}+\.[\w-]{4,}(?:\.[\w-]*)?",  # JSON web tokens
    r"(?<!/snapshots/)(?<!commit )(?<!sha256:)[0-9a-f]{40,}",  # wandb's former keys; most digests too
)
_KNOWN_SHAPES = re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(_SHAPES)})(?![A-Za-z0-9])")
_RANDOM = re.compile(  # nobody names a thing like this
    r"(?<![A-Za-z0-9])(?=(?:[A-Za-z]*\d){3})(?=(?:[a-z\d]*[A-Z]){3})(?=(?:[A-Z\d]*[a-z]){3})[A-Za-z0-9]{32,}"
)

# name=value, "name": "value", \"name\": \"value\", ('name', 'value'), --name value, <name>value<
_NAMED = re.compile(
    r"(?<![\w.])([A-Za-z_][\w.-]{0,79}+)(?:(?:\\*[\"'])?\s{0,3}(?:=>|:=|[=:])\s{0,3}b?|\\*[\"'],\s{0,3}|>)"
    r"|(?<![\w-])--([A-Za-z][\w-]{0,79})\s+(?!-)"
)
_VALUE = re.compile(
    r"(?P<quote>\\+[\"'])(?P<escaped>.+?)(?=(?P=quote)|$)|(?P<plain>[\"'])(?P<quoted>(?:\\.|(?!(?P=plain))[^\\\n])+)"
    r"|(?P<bare>(?:[^\s\"',;&<}\]\\]|[,;&](?!\s|$|[\w-]+\s*=)|'(?=\w)|\\(?![\"'nrt]))+)",
    re.MULTILINE,
)

_SHORTEST = 3  # characters of a secret
_LOOKED_AT = 400  # characters of a value, to tell whether it is one: a line may be names and values all over
_SHORTEST_NUMBER = 4
_NUMBER = re.compile(r"[\[(]*-?[\d.,_]+(?:e-?\d+)?[%sMGTkB]*(?: -?[\d.,_]+)*[\])]*")  # or a list of them: token ids
_HARMLESS = re.compile(
    r"(?:true|false|none|null|nan|str|int|bool|bytes|string)\)*|optional\b.*|"
    r"<[^>]*>?|\[[A-Z_]+\]?|\$.*|%\(.*|\{.*|\*+|x{3,}|\.{3}|removed|"  # placeholders, and the model's special tokens
    r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*[(\[].*|(?:self|args|os|config|settings|cls)\..*",  # code that reads it
    re.IGNORECASE | re.DOTALL,
)


def names_a_secret(name: str) -> bool:
    """Whether an environment variable, an option or a key of this name may hold one."""
    named = _SECRET_NAME.search(name) or _KEY_NAME.fullmatch(name)
    return named is not None and _NO_VARIABLE.search(name) is None


def is_secret(name: str, value: object) -> bool:
    """Whether `value` is a secret because of its name. A switch never is, and a number only as a password."""
    if value is None or isinstance(value, bool) or not names_a_secret(name):
        return False
    text = str(value)
    if _NUMBER.fullmatch(text):
        return len(text) >= _SHORTEST_NUMBER and _PASSWORD_NAME.search(name) is not None
    if text == name or _HARMLESS.fullmatch(text) or (name.upper().endswith("PWD") and text.startswith("/")):
        return False
    looks_random = len(text) >= 12 and re.search(r"\d", text) is not None
    return looks_random or name.isupper() or _SECRET_NAME.search(name) is not None


class Redactor:
    """Removes given secrets, in whatever text, and what looks like one."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        longest_first = sorted(set(secrets), key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def __call__(self, text: str) -> str:
        if self._known is not None:
            text = self._known.sub(MASK, text)
        text = _KEY_BLOCK.sub(MASK, text)
        for kept_before in (_URL_CREDENTIALS, _WEBHOOK, _URL_PARAMETER, _HEADER, _LOGIN):
            text = kept_before.sub(rf"\g<1>{MASK}", text)
        text = _SCHEME.sub(rf"\1\2{MASK}", text)
        text = _KNOWN_SHAPES.sub(MASK, text)
        text = _RANDOM.sub(MASK, text)
        return _without_named(text)


def _without_named(text: str) -> str:
    """`text` without the values that have the name of a secret in front of them."""
    parts, copied = [], 0
    for found in _NAMED.finditer(text):
        name = found[1] or found[2]
        if found.start() < copied or not names_a_secret(name):
            continue
        begins = _VALUE.match(text, found.end(), found.end() + _LOOKED_AT)
        if begins is None:
            continue
        shown = begins[str(begins.lastgroup)]
        if len(shown) >= _SHORTEST and not shown.startswith(MASK) and is_secret(name, shown):
            value = _VALUE.match(text, found.end()) or begins
            kind = str(value.lastgroup)
            parts += [text[copied : value.start(kind)], MASK]
            copied = value.end(kind)
    return "".join([*parts, text[copied:]])
