"""Secrets do not leave the process in text, and nothing else is garbled."""

from __future__ import annotations

import json
from html import escape

import pytest

from oppo.redact import redacted

ENVIRONMENT = {
    "JUDGE_PASSWORD": 'a"quoted<canary>',
    "HF_TOKEN": "canary-long-token",
    "SHORT_TOKEN": "canary-long",
    "AWS_SECRET_ACCESS_KEY": "canary/aws+key",
    "WANDB_API_KEY": "canary-wandb",
    "GITHUB_PAT": "canary-pat",
    "MAX_TOKENS": "100000",
    "ACCESS_TOKEN": "31415926",
    "TOKENIZERS_PARALLELISM": "harmless",
    "SSH_AUTH_SOCK": "/tmp/harmless",
    "KEYBOARD": "harmless-us",
}


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
    ],
)
def test_secrets_in_urls_headers_and_of_known_shapes_are_hidden(text: str) -> None:
    assert "canary" not in redacted(text, {})
    assert "***" in redacted(text, {})


def test_a_url_keeps_what_is_no_secret() -> None:
    assert redacted("GET https://me:pw@host/a?token=x&n=1 failed", {}) == "GET https://***@host/a?token=***&n=1 failed"
