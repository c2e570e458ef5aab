"""What a bundle leaves out."""

import json

import pytest

from longleaf.cluster.scrub import cleaned, scrubbed

S = "Hunter2secret9"
"""Stands for a secret."""


def test_what_is_cleaned() -> None:
    container = {
        "env": [{"name": "A", "value": "x"}, {"name": "B", "valueFrom": {"secretKeyRef": {}}}],
        "args": ["--api-key=x", "--api-key", "x", "--max-prefill-tokens=5", "TOKEN=x run"],
        "httpGet": {"httpHeaders": [{"name": "authorization", "value": "x"}]},
    }
    assert cleaned({"spec": [container], "annotations": {"a": "x"}, "managedFields": []}) == {
        "spec": [
            {
                "env": [
                    {"name": "A", "value": "(removed)"},
                    {"name": "B", "valueFrom": {"secretKeyRef": {}}},
                ],
                "args": [
                    *("--api-key=(removed)", "--api-key", "(removed)"),
                    *("--max-prefill-tokens=5", "TOKEN=(removed) run"),
                ],
                "httpGet": {"httpHeaders": [{"name": "authorization", "value": "(removed)"}]},
            }
        ],
        "annotations": {"a": "(removed)"},
    }


@pytest.mark.parametrize(
    "text",
    [
        f"Bearer {S}",
        f"sk-{S}",
        f"hf_{S}",
        f"glpat-{S}",
        f"gho_{S}",
        f"ghp_{S}",
        f"github_pat_{S}",
        f"xoxb-1-{S}",
        f"my_password: {S}",
        f"pwd={S}",
        f"pass={S}",
        f"PGPASSWORD={S} psql",
        f'password="one {S} three"',
        f"passphrase='one {S}'",
        f"https://user:{S}@collector:4318/v1",
        f"otlp to http://{S}@collector failed",
        f"Authorization: Basic {S}",
        f"authorization: {S}",
        f'{{"authorization": "Digest a {S}"}}',
        f"Basic {S}==",
        f"curl -u me:{S} http://x",
        f"curl --user me:{S} http://x",
        f"-----BEGIN RSA PRIVATE KEY-----\\n{S}\\n-----END RSA PRIVATE KEY-----",
        f"-----BEGIN PRIVATE KEY-----\\n{S} and the rest is cut off",
        f'{{"api_key": "{S}"}}',
        f'{{"api_key": "a \\"quoted\\" {S}"}}',
        json.dumps({"said": json.dumps({"token": f"a {S}"})}),
        f"secret_access_key = {S}",
    ],
)
def test_secrets_leave_text(text: str) -> None:
    found = scrubbed(f"refused {text}")
    assert S not in found
    assert found.startswith("refused ")


def test_an_access_key_is_known_by_its_form() -> None:
    assert "AKIAIOSFODNN7EXAMPLE" not in scrubbed("by AKIAIOSFODNN7EXAMPLE here")


@pytest.mark.parametrize(
    "text",
    [
        '{"prompt_tokens": 12, "tokenizer": "a", "status": 200}',
        "GET http://10.0.0.1:30000/v1/loads",
        "longleaf/engine@sha256:0123",
        'longleaf_gateway_replica_state{replica="http://10.0.0.1:30000",state="ready"} 1.0',
        "basic checks passed: 10",
        '{"authorized": true, "passed": true, "api_key": null}',
        "kubectl -n a logs pod -c preflight",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert scrubbed(text) == text


def test_a_scrubbed_log_is_still_json() -> None:
    line = {"token": f"a {S}", "said": json.dumps({"key": S}), "n": 1, "url": f"https://u:{S}@h/"}
    found = json.loads(scrubbed(json.dumps(line)))
    assert found["n"] == 1
    assert S not in json.dumps(found)


@pytest.mark.parametrize(
    "value",
    [
        {"csi": {"driver": "d", "volumeAttributes": {"mountOptions": S}}},
        {"flexVolume": {"options": {"a": S}}},
        {"httpGet": {"path": f"/health?x={S}", "port": 1}},
        {"args": ["--api-key", f"-{S}"]},
        {"args": ["-u", f"me:{S}"]},
        {"command": ["sh", "-c", f"curl -u me:{S} x"]},
        {"args": [f"--otlp-endpoint=https://u:{S}@h"]},
        {"note": f"https://u:{S}@h"},
        {"anything": [{"deep": f"password={S}"}]},
        {"env": [{"name": "A", "value": S}, {"name": "B", "valueFrom": {"x": f"key={S}"}}]},
    ],
)
def test_secrets_leave_objects(value: object) -> None:
    assert S not in json.dumps(cleaned(value))


def test_flags_stay() -> None:
    arguments = ["--tls-key-file", "/etc/tls.key", "--api-key", "--json", "--port=1"]
    assert cleaned({"args": arguments})["args"] == [
        *("--tls-key-file", "(removed)", "--api-key", "--json", "--port=1")
    ]


def test_a_long_word_is_scrubbed_in_a_moment() -> None:
    """Quadratic, it would take minutes."""
    assert scrubbed("a" * 1_000_000) == "a" * 1_000_000
