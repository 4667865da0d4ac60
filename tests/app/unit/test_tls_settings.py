"""TLS of a process from its settings: what is made of them, and what is refused by its name."""

import ssl
from pathlib import Path

import pytest
import trustme

from kvrouter.app.tls import tls_of
from kvrouter.core.errors import ConfigError
from kvrouter.settings.planes import PlaneSettings


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    authority = trustme.CA()
    mine = authority.issue_cert("localhost")
    cert, key, ca = (tmp_path / name for name in ("cert.pem", "key.pem", "ca.pem"))
    mine.cert_chain_pems[0].write_to_path(str(cert))
    mine.private_key_pem.write_to_path(str(key))
    authority.cert_pem.write_to_path(str(ca))
    return {"tls_cert": str(cert), "tls_key": str(key), "tls_ca": str(ca)}


def settings(**chosen: str | None) -> PlaneSettings:
    return PlaneSettings.model_validate(chosen)


def test_tls_is_off_without_files() -> None:
    assert tls_of(settings()) == (None, None)


def test_both_ends_ask_for_a_certificate_of_the_authority(files: dict[str, str]) -> None:
    for context in tls_of(settings(**files)):
        assert context is not None
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.minimum_version >= ssl.TLSVersion.TLSv1_2
        assert len(context.get_ca_certs()) == 1
    client = tls_of(settings(**files)).client
    assert client is not None
    assert client.check_hostname


def test_tls_authority_alone_gives_only_a_client_context(files: dict[str, str]) -> None:
    server, client = tls_of(settings(tls_ca=files["tls_ca"]))
    assert server is None
    assert client is not None
    assert client.verify_mode is ssl.CERT_REQUIRED


@pytest.mark.parametrize("missing", ["tls_cert", "tls_key", "tls_ca"])
def test_incomplete_set_of_tls_files_is_refused_naming_the_missing_one(
    files: dict[str, str], missing: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        tls_of(settings(**{**files, missing: None}))
    assert refused.value.param == missing


@pytest.mark.parametrize("broken", ["tls_cert", "tls_ca"])
@pytest.mark.parametrize("text", [None, "no PEM at all"])
def test_unreadable_tls_file_is_named(
    files: dict[str, str], tmp_path: Path, broken: str, text: str | None
) -> None:
    path = tmp_path / "broken.pem"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        tls_of(settings(**{**files, broken: str(path)}))
    assert refused.value.param == broken
    assert str(path) in refused.value.message
