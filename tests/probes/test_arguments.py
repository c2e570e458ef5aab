"""What probes are told: what cannot be meant is refused before anything runs."""

import pytest
from click.testing import CliRunner

from longleaf.exporters.command import exporter_command
from longleaf.options import http_url
from longleaf.probes.command import probe_command
from longleaf.probes.target import ApiKey, Url

SOMEWHERE = "http://127.0.0.1:1"


@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("commit", "--timeout"),
        ("commit", "--temperature"),
        ("step", "--timeout"),
        ("step", "--kv-bytes-per-token"),
        ("step", "--peak-bytes-per-second"),
        ("step", "--max-ratio"),
        ("gpu", "--seconds"),
        ("gpu", "--settle"),
        ("gpu", "--interval"),
        ("watch", "--every"),
        ("watch", "--start-seconds"),
    ],
)
def test_a_number_is_finite_and_within_its_bounds(command: str, option: str, value: str) -> None:
    done = CliRunner().invoke(probe_command, [command, "--url", SOMEWHERE, option, value])
    assert done.exit_code == 2
    assert f"Invalid value for '{option}': " in done.output


def test_the_exporters_interval_is_a_number() -> None:
    done = CliRunner().invoke(exporter_command, ["gpu", "--interval", "nan"])
    assert done.exit_code == 2
    assert "nan is not a finite number" in done.output


@pytest.mark.parametrize(
    "url",
    [
        *("", "nonsense", "127.0.0.1:1", "http://", "http://[::1", "http://a:99999", "http://a:0"),
        *("ftp://a", "http://a b", "http://a\n"),
    ],
)
@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("commit", "--url"),
        ("commit", "--metrics-url"),
        ("step", "--against"),
        ("gpu", "--gpu-metrics-url"),
        ("watch", "--url"),
    ],
)
def test_a_url_is_one(command: str, option: str, url: str) -> None:
    done = CliRunner().invoke(probe_command, [command, "--url", SOMEWHERE, option, url])
    assert done.exit_code == 2
    assert f"Invalid value for '{option}'" in done.output
    assert "is no URL such as http://127.0.0.1:30000" in done.output


def test_urls_lose_the_slash_at_their_end_and_may_hold_no_password() -> None:
    for url in ("http://[::1]:80", "https://gateway.example/longleaf"):
        assert Url().convert(f"{url}/", None, None) == url
    done = CliRunner().invoke(probe_command, ["commit", "--url", "http://me:secret@a:1"])
    assert done.exit_code == 2
    assert "credentials do not belong into a URL: --api-key" in done.output
    assert "secret" not in done.output


@pytest.mark.parametrize("key", ["two words", "two\nlines", "schlüssel"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_told(key: str) -> None:
    given = ["commit", "--url", SOMEWHERE, "--api-key", key]
    done = CliRunner().invoke(probe_command, given)
    assert done.exit_code == 2
    assert "a key is of printable ASCII characters" in done.output
    assert key not in done.output
    assert ApiKey().convert(" a-secret\n", None, None) == "a-secret"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("gpu", "--context", "1k,2k"), "--context: one length, please"),
        (
            ("step", "--card", "h200", "--peak-bytes-per-second", "1e12"),
            "--card and --peak-bytes-per-second exclude each other",
        ),
        (("step", "--max-ratio", "2"), "--max-ratio needs --card or --peak-bytes-per-second"),
    ],
)
def test_what_does_not_go_together(options: tuple[str, ...], why: str) -> None:
    done = CliRunner().invoke(probe_command, [*options, "--url", SOMEWHERE])
    assert done.exit_code == 2
    assert why in done.output


def test_urls_of_what_listens() -> None:
    assert http_url("127.0.0.1", 9400) == "http://127.0.0.1:9400"
    assert http_url("::1", 9400) == "http://[::1]:9400"
