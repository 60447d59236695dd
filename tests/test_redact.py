"""Secrets do not leave the process in text, and nothing else is garbled."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

import pytest

from oppo.redact import excerpt, harmless, holds_secret, on_one_line, redacted, redacted_values

ENVIRONMENT = {
    "JUDGE_PASSWORD": 'a"quoted<canary>', "HF_TOKEN": "canary-long-token", "SHORT_TOKEN": "canary-long",
    "AWS_SECRET_ACCESS_KEY": "canary/aws+key", "WANDB_API_KEY": "canary-wandb", "GITHUB_PAT": "canary-pat",
    "MYSQL_PWD": "canary-pwd", "SSHPASS": "canary-pass", "AWS_SESSION": "canary-session",
    "HF_TOKENS": "canary-tokens", "OPENAI_API_KEY2": "canary-second-key", "GITHUB_PAT_1": "canary-first-pat",
    "PROXY_AUTHORIZATION": "canary-authorization", "COOKIE": "canary-cookie", "API_KEYS": "canary-keys",
    "PWD": "/harmless/here", "SSH_ASKPASS": "/usr/bin/harmless", "MAX_TOKENS": "100000", "ACCESS_TOKEN": "31415926",
    "TOKENIZERS_PARALLELISM": "harmless", "SSH_AUTH_SOCK": "/tmp/harmless", "KEYBOARD": "harmless-us",
    "KEYBOARD_1": "harmless-de", "COMPAT2": "harmless-2", "AUTHORIZER": "harmless-one",
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name, value in ENVIRONMENT.items() if "canary" in value])
def test_the_value_of_a_secret_variable_is_hidden_however_it_is_spelt(name: str) -> None:
    value = ENVIRONMENT[name]
    for spelt in (value, json.dumps({"said": value}), escape(value)):
        text = redacted(f"before {spelt} after", ENVIRONMENT)
        assert "canary" not in text
        assert text.startswith("before ")
        assert text.endswith(" after")


@pytest.mark.parametrize(
    "text",
    [
        "step 100000 of 100000 at 31415926",
        "harmless /tmp/harmless harmless-us",
        "https://huggingface.co/org/model?revision=main",
        "file.py:function",
        "the monkey=banana and the token budget",
        '{"token": 3, "score": 0.5}',
        "risk-averse sk-1",
        "eos_token='</s>' pad_token=\"<pad>\"",
        '{"token": 3, "tokens": ["a"], "secretary": "b"}',
        "a basic understanding of authorization, however",
        "/data/hf_checkpoints/policy and hf_checkpoints/actor.safetensors",
        "runs/canary-pat/demo-1 and /tmp/canary-pat: canary-pat/config.toml, canary-pat.toml, my-canary-pat",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redacted(text, ENVIRONMENT) == text


@pytest.mark.parametrize(
    "text",
    [
        "https://user:canary@host/path",
        "https://canary@host/path",
        "postgresql://user:ca%20canary@host:5432/db",
        "https://host/?token=canary",
        "https://host/?a=1&api_key=canary&b=2",
        "https://host/?X-Amz-Signature=canary",
        "Authorization: Bearer canary-canary",
        "hf_canarycanary",
        "sk-canarycanary",
        "github_pat_canarycanary",
        "/cache/hf_canaryCANARY123456789canary/model",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJjYW5hcnkifQ.canary_signature",
        "bearer-eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJjYW5hcnkifQ.canary_signature",
        "sk_live_canary0canary0canary",
        'body {"password": "canary \\" canary", "n": 1}',
        r"body {\"password\": \"canary canary\", \"n\": 1}",
        "{'access_token': 'canary'}",
        "tool --token=canary --n=3",
        "tool --api-token='canary canary'",
        "password=canary, host=here",
        "MYSQL_PWD=canary",
        "-----BEGIN RSA PRIVATE KEY-----\ncanary\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_secrets_in_urls_headers_and_of_known_shapes_are_hidden(text: str) -> None:
    assert "canary" not in redacted(text, {})
    assert "***" in redacted(text, {})


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("GET https://me:pw@host/a?token=x&n=1 failed", "GET https://***@host/a?token=***&n=1 failed"),
        ("AKIAIOSFODNN7EXAMPLE and ASIAIOSFODNN7EXAMPLE", "*** and ***"),
        (f"cannot read {Path(__file__)}", f"cannot read {Path(__file__)}"),
    ],
)
def test_the_rest_of_a_text_stays(text: str, hidden: str) -> None:
    assert redacted(text, {"GOOGLE_APPLICATION_CREDENTIALS": __file__}) == hidden


def test_json_stays_json_and_keeps_its_keys() -> None:
    facts = {"rollout": ["rollout", 3, None], "said": {"password": '{"password": "a\\"b", "n": 1}'}, "ok": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("APP_SECRET", "rollout")
        hidden = redacted_values(facts)
    assert hidden == {"rollout": ["***", 3, None], "said": {"password": '{"password": "***", "n": 1}'}, "ok": True}


@pytest.mark.parametrize(
    ("text", "certain"),
    [
        ("https://me:canary@host/model", True),
        ("/models/hf_canaryCANARY123456789canary", True),
        ("/models/canary-long-token", True),
        ("/runs/canary-pat", False),
        ("canary-pat", False),
        ("org/hf_models", False),
        ('"password": "', False),
    ],
)
def test_only_what_certainly_is_a_secret_counts_as_one_in_settings(text: str, certain: bool) -> None:
    assert holds_secret(text, ENVIRONMENT) is certain


@pytest.mark.parametrize(
    "unit",
    [
        "-",
        "?",
        "a_",
        "hf_",
        "://",
        'password="',
        "eyJ.",
        "-----BEGIN PRIVATE KEY-----",
        "\\",
        "-eyJ",
        "-eyJaaaaaa.eyJaa",
    ],
)
def test_no_text_takes_long(unit: str) -> None:
    redacted(unit * (500_000 // len(unit)), ENVIRONMENT)  # and returns: no pattern goes over a text again and again


def test_an_excerpt_ends_where_it_is_cut_and_shows_no_part_of_a_secret() -> None:
    assert excerpt("a" * 20, 30) == "a" * 20
    assert excerpt("a" * 20 + "\ud800", 10) == "aaaaaaaaaa... (21 characters)"
    assert excerpt("\ud800", 10) == "\\ud800"
    assert "canary" not in excerpt("said https://canary@host " + "x" * 10_000_000, 15)


def test_text_of_several_lines_is_made_harmless_line_by_line() -> None:
    assert harmless("a\x1b[31m\nhttps://me:pw@host\n[bold]") == "a\\x1b[31m\nhttps://***@host\n[bold]"
    assert len(harmless("a\n" * 1_000_000)) < 200_000


def test_text_on_one_line_has_its_control_characters_spelt_out() -> None:
    assert on_one_line("a\nb\tc\x1b[31m\u202e") == "a / b c\\x1b[31m\\u202e"
