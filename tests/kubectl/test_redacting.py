"""What a report must not carry away."""

import pytest

from firn.cli.kube.redacting import TAKEN_OUT, redacted, redacted_text

CERTIFICATE = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----"
KEY = "-----BEGIN EC PRIVATE KEY-----\nMHcCAQEE\n-----END EC PRIVATE KEY-----"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (f"before {KEY} after", f"before {TAKEN_OUT} after"),
        ("cut -----BEGIN PRIVATE KEY-----\nMHcC", f"cut {TAKEN_OUT}"),
        ("token eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJhIn0.c2ln end", f"token {TAKEN_OUT} end"),
        ("Authorization: Bearer abcdefgh123", f"Authorization: Bearer {TAKEN_OUT}"),
        ("https://user:pass@host/path", f"https://{TAKEN_OUT}@host/path"),
        (CERTIFICATE, CERTIFICATE),
        ("main-0-1.main-0.shop.svc:7700 is master", "main-0-1.main-0.shop.svc:7700 is master"),
    ],
)  # fmt: skip
def test_texts_lose_what_looks_like_a_credential(text: str, left: str) -> None:
    assert redacted_text(text) == left


def test_objects_lose_secret_values_and_copies_and_keep_what_explains() -> None:
    item = {
        "kind": "Pod",
        "metadata": {
            "name": "main-0-0",
            "managedFields": [{"manager": "x"}],
            "annotations": {"kubectl.kubernetes.io/last-applied-configuration": '{"env": "p4ss"}', "a": "b"},
        },
        "spec": {
            "env": [
                {"name": "DB_PASSWORD", "value": "p4ss"},
                {"name": "FIRN_TOKEN_FILE", "value": "/etc/firn/token/token"},
                {"name": "FIRN_TOKEN_REVIEW", "value": "firn.dev"},
                {"name": "PLAIN", "value": "v"},
            ],
            "volumes": [{"secret": {"secretName": "main-0-tls"}}],
            "args": [f"--key={KEY}"],
            "apiKey": "k",
        },
    }
    assert redacted(item) == {
        "kind": "Pod",
        "metadata": {"name": "main-0-0", "annotations": {"a": "b"}},
        "spec": {
            "env": [
                {"name": "DB_PASSWORD", "value": TAKEN_OUT},
                {"name": "FIRN_TOKEN_FILE", "value": "/etc/firn/token/token"},
                {"name": "FIRN_TOKEN_REVIEW", "value": "firn.dev"},
                {"name": "PLAIN", "value": "v"},
            ],
            "volumes": [{"secret": {"secretName": "main-0-tls"}}],
            "args": [f"--key={TAKEN_OUT}"],
            "apiKey": TAKEN_OUT,
        },
    }


def test_of_a_secret_only_its_name_is_left() -> None:
    secret = {"kind": "Secret", "metadata": {"name": "s", "annotations": {"x": "y"}}, "data": {"k": "djE="}}
    assert redacted(secret) == {"kind": "Secret", "metadata": {"name": "s"}, "data": TAKEN_OUT}
