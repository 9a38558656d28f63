"""What must not leave the machine in a bug report, and what must stay readable."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from secret_corpus import harmless, planted

from async_grpo.checks.bug_report import dump
from async_grpo.redaction import MASK, Redactor, is_secret, names_a_secret


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("login with hf_AbCdEfGhIjKlMnOpQrStUvWxYz123456", "hf_AbCd"),
        ("wandb: 0123456789abcdef0123456789abcdef01234567 ok", "0123456789abcdef"),
        ("export OPENAI_API_KEY=sk-proj-abcdefghijklmnop", "sk-proj"),
        ('{"api_key": "correct-horse-battery"}', "correct-horse"),
        ("--token correct-horse-battery", "correct-horse"),
        ("password: hunter2hunter2", "hunter2"),
        ("Authorization: Bearer abc.def.ghi-jkl", "abc.def"),
        ("GET https://user:pa55word@host.example/repo", "pa55word"),
        ("origin https://0123abcd4567ef@sentry.example/1", "0123abcd"),
        ("https://me@corp.example:pa55word@host.example/repo", "pa55word"),
        ("postgres://user:p@ss/word@host.example/db", "word"),
        ("https://bucket.example/model?X-Amz-Signature=deadbeefdeadbeef&x=1", "deadbeef"),
        ("cloned with ghp_0123456789abcdefghij", "ghp_0123"),
        (r'"{\"url\": \"https:\\/\\/me:pa55word@host.example\"}"', "pa55word"),  # JSON within JSON
        (r'"{\"url\": \"https:\\/\\/hooks.slack.com\\/services\\/T01\\/B02\\/a1b2c3d4e5\"}"', "a1b2c3d4e5"),
        ("AKIAIOSFODNN7EXAMPLE", "AKIAIOS"),
        ("jwt eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.sig-nature", "eyJzdWIi"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----", "MIIEow"),
    ],
)
def test_what_looks_like_a_secret_is_removed(text: str, secret: str) -> None:
    cleaned = Redactor()(text)
    assert secret not in cleaned
    assert MASK in cleaned


@pytest.mark.parametrize(
    "text",
    [
        "tokens: 123456, completions/mean_length: 37.5",
        '{"num_tokens": 1234567.0, "step": 3}',
        "run d00d78ab1898, 12 tokens a completion, the token limit is 4096 tokens",
        "0000000042.a00_pending.safetensors",
        "https://github.com/trl@main and me@corp.example",
        "outputs/hf_gsm8k_baseline",
        "https://github.com/huggingface/trl/issues/1",
        'File "/home/me/rewards.py", line 3 in accuracy',
        "step 50/100 reward 0.969  854 rollouts/s",
        "torch==2.13.0+cpu",
        "stop_token_ids=[151643, 151645], prompt_token_ids=[9707,1879], suppress_token_ids=(1234, 5)",
        '"eos_token_id": [151645, 151643], "bad_words_token_ids": [[1,2],[3,4]]',
        "hub/models--Qwen--Qwen2.5-0.5B/snapshots/7ae557604adf67be50417f59c2c2f167def9a775/config.json",
        "commit 7ae557604adf67be50417f59c2c2f167def9a775",
    ],
)
def test_what_a_report_is_made_of_stays(text: str) -> None:
    assert Redactor()(text) == text


def test_values_of_secret_variables_are_removed_wherever_they_are() -> None:
    environment = {"MY_TOKEN": "swordfish", "WANDB_API_KEY": "swordfish-longer", "HOME": "/home/me", "X_KEY": "short"}
    redact = Redactor(dump.secrets_of(environment))
    said = redact("a swordfish and a swordfish-longer in /home/me, short")
    assert said == f"a {MASK} and a {MASK} in /home/me, short"


def test_the_working_directory_is_no_secret_of_the_environment() -> None:
    assert dump.secrets_of({"PWD": "/home/me/project", "OLDPWD": "/home/me"}) == set()
    assert dump.secrets_of({"DB_PASSWORD": "12345678", "MYSQL_PWD": "swordfish"}) == {"12345678", "swordfish"}


def test_only_listed_variables_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"HF_TOKEN": "x", "OMP_NUM_THREADS": "4", "TOKENIZERS_PARALLELISM": "false", "EDITOR": "vi"}
    monkeypatch.setattr(dump.os, "environ", given)
    assert set(dump._environments([])) == {"== doctor", "OMP_NUM_THREADS=4", "TOKENIZERS_PARALLELISM=false"}
    assert dump.secrets_of({"TOKENIZERS_PARALLELISM": "falsefalse"}) == set()


@pytest.fixture(scope="module")
def rates() -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).resolve().parents[2] / "scripts" / "secret_rates.py"))


def test_the_page_has_the_rates_of_this_corpus(rates: dict[str, Any]) -> None:
    assert rates["rates"]() in rates["PAGE"].read_text(), "python scripts/secret_rates.py --write"


def test_most_of_the_planted_are_found_and_the_harmless_stay(rates: dict[str, Any]) -> None:
    assert (len(planted()), len(harmless())) == (100, 100)
    assert len({text for text, _ in planted()} | set(harmless())) == 200
    assert len(rates["missed"]()) <= 5, rates["missed"]()
    assert len(rates["taken"]()) <= 2, rates["taken"]()


def test_what_is_clean_stays_as_it_is() -> None:
    for text, _ in planted():
        cleaned = Redactor()(text)
        assert Redactor()(cleaned) == cleaned


@pytest.mark.parametrize(
    "unit",
    ["://a:", "-eyJaaaaaaaa", 'token="a', 'token=\\"', "cookie:", "a.webhook", "?a-token", "sk-", "x-key", "key="],
)
def test_a_long_line_that_was_made_for_it_takes_no_minutes(unit: str) -> None:
    Redactor()(unit * (40_000 // len(unit)))


def test_a_long_secret_is_removed_to_its_end() -> None:
    for before, after in (("token=", " x"), ('"token": "', '", "n": 1'), ('{\\"token\\": \\"', '\\"}')):
        assert Redactor()(f"{before}{'Ab-' * 9000}{after}") == f"{before}{MASK}{after}"


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("hub_token", "abcdefgh", True),
        ("max_tokens", 512, False),
        ("hub_token", None, False),
        ("eos_token", "<|im_end|>", False),
        ("tokenizer_name", "gpt2", False),
        ("author", "Jane", False),
        ("sort_key", "accuracy", False),
        ("judge_key", "0123456789abcdef", True),
        ("JUDGE_KEY", "swordfish", True),
        ("pwd", "swordfish", True),
        ("PWD", "/home/me", False),
        ("db_password", 12345678, True),
        ("password_attempts", 3, False),
        ("API_TOKENS", "swordfish,herring", True),
    ],
)
def test_a_name_makes_a_secret_of_a_value_that_can_be_one(name: str, value: object, secret: bool) -> None:
    assert is_secret(name, value) is secret


def test_names_of_errors_are_no_names_of_secrets() -> None:
    assert not names_a_secret("AuthenticationError")
