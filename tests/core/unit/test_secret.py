"""Secrets of variables and files: what is taken off, what is refused, and that no message has them."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.errors import ConfigError
from kvrouter.core.secret import SECRET_MAX_BYTES, checked_secret, secret_file, secret_variable
from kvrouter.fleetfile.fleet_checks import load_fleet
from kvrouter.settings.problems import parse_document
from kvrouter.settings.sources import load_settings

NOBODY = 65534
ENDINGS = ["", "\n", "\r\n", "\n\n", " ", "\t\n"]
WRONG = {
    "": "is empty",
    "\n": "is empty",
    "hu\nsh": "line break",
    "\nhush": "line break",
    "hu\x00sh": "control character",
    "hu\x7fsh": "control character",
    "s" * (SECRET_MAX_BYTES + 1): "is longer than",
}


@pytest.mark.parametrize("ending", ENDINGS, ids=repr)
def test_trailing_white_space_of_a_secret_is_removed(ending: str, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(f"s3cret ü{ending}".encode())
    assert secret_file(path, "api_key_file") == "s3cret ü"
    assert secret_variable({"KEY": f"s3cret ü{ending}"}, "KEY") == "s3cret ü"


@pytest.mark.parametrize("text", WRONG, ids=lambda text: repr(text[:9]))
def test_an_invalid_secret_is_refused_by_name_without_its_text(text: str, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        secret_file(path, "workers[0].engine.api_key_file")
    assert refused.value.message.startswith(f"workers[0].engine.api_key_file: {path}: {WRONG[text]}"[:30])
    assert WRONG[text] in refused.value.message
    assert "sh" not in refused.value.message.replace(str(path), "")
    if text.strip():
        with pytest.raises(ConfigError, match=r"^KEY: "):
            secret_variable({"KEY": text}, "KEY")


@pytest.mark.parametrize("environ", [{}, {"KEY": ""}, {"KEY": " \n"}])
def test_an_unset_or_blank_variable_has_no_secret(environ: dict[str, str]) -> None:
    assert secret_variable(environ, "KEY") is None


def test_an_absent_irregular_or_non_utf8_secret_file_is_reported(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "latin").write_bytes(b"schl\xfcssel")
    for name, why in {
        "absent": "is not there",
        ".": "is no regular file",
        "pipe": "is no regular file",
        "latin": "must be UTF-8 text",
        "a\0b": "cannot be read",
    }.items():
        with pytest.raises(ConfigError, match=rf"^field: .*: {why}"):
            secret_file(tmp_path / name, "field")


def test_a_secret_file_without_read_permission_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.touch(mode=0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)  # root may read everything
    try:
        with pytest.raises(ConfigError, match="may not be read by this process"):
            secret_file(path, "field")
    finally:
        os.seteuid(user)


@given(st.text(st.characters(blacklist_categories=("Cc", "Cs")), min_size=1).map(str.strip).filter(bool))
def test_any_line_of_text_is_accepted_as_a_secret(text: str) -> None:
    assert checked_secret(f"{text}\n", "KEY") == text


SETTINGS = ("KVROUTER_ADMIN_TOKEN", "KVROUTER_PLANE_TOKEN", "NATS_AUTH_PASSWORD", "NATS_AUTH_TOKEN")


@pytest.mark.parametrize("variable", SETTINGS)
def test_secret_settings_are_stripped_and_never_shown_in_errors(variable: str) -> None:
    settings = load_settings(flags={}, environ={variable: "hush\n"}).settings
    secrets = (
        settings.frontend.admin_token,
        settings.planes.plane_token,
        settings.planes.nats_password,
        settings.planes.nats_token,
    )
    assert [each.get_secret_value() for each in secrets if each is not None] == ["hush"]
    with pytest.raises(ConfigError, match=rf"{variable}.*: holds a line break") as refused:
        load_settings(flags={}, environ={variable: "hush\nhush"})
    assert "hush" not in refused.value.message


@pytest.mark.parametrize("written", ["12345", "''", "[12345]", '"12345\\n12345"'])
def test_an_invalid_secret_in_a_fleet_file_is_not_shown(written: str) -> None:
    document = parse_document(f"frontend: {{admin_token: {written}}}", "fleet.yaml")
    with pytest.raises(ConfigError, match=r"fleet.yaml:1: frontend.admin_token: ") as refused:
        load_settings(flags={}, environ={}, document=document)
    assert "123" not in refused.value.message


@pytest.mark.parametrize("written", ["sk-12345", "KVROUTER_PLANE_TOKEN", "KVROUTER_ENGINE_API_KEYS", "A-B"])
def test_api_key_env_refuses_invalid_names_without_showing_them(written: str) -> None:
    engine = f"{{kind: vllm, url: 'http://a:1', api_key_env: {written}}}"
    text = f"version: 1\nmodels: [{{name: m}}]\nworkers: [{{name: w, engine: {engine}}}]"
    with pytest.raises(ConfigError, match=r"workers\[0\].engine.api_key_env: must be ") as refused:
        load_fleet(parse_document(text, "fleet.yaml"))
    assert "123" not in refused.value.message


def test_api_key_env_and_api_key_file_exclude_each_other() -> None:
    engine = "{kind: vllm, url: 'http://a:1', api_key_env: A, api_key_file: b}"
    text = f"version: 1\nmodels: [{{name: m}}]\nworkers: [{{name: w, engine: {engine}}}]"
    with pytest.raises(ConfigError, match="api_key_file: contradicts api_key_env: give one of the two"):
        load_fleet(parse_document(text, "fleet.yaml"))
