"""Certificates of the admission server where no cert-manager is: an own authority, kept in a Secret.

Trust comes before use. A new authority is first added to what the API server trusts (``ca.crt``), while the
server still presents the certificate of the old one; only the next serving certificate is signed by the new.
"""

import ipaddress
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvrouter.core.errors import ConfigError

AUTHORITY_CERT = "ca.crt"
"""Trusted authorities, the signing one first: the content of a webhook's ``caBundle``."""
AUTHORITY_KEY = "ca.key"
SERVING_CERT = "tls.crt"
SERVING_KEY = "tls.key"

AUTHORITY_VALID = timedelta(days=5 * 365)
SERVING_VALID = timedelta(days=90)
CLOCK_SKEW = timedelta(hours=1)
"""How much the clocks of two replicas may differ."""
AUTHORITIES_MAX = 3


@dataclass(frozen=True, slots=True)
class _Pair:
    """A certificate and its key."""

    cert: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def renewed(now: datetime, data: Mapping[str, bytes], dns_names: Sequence[str]) -> dict[str, bytes] | None:
    """Return the Secret's new data, or None if it may stay as it is.

    ``now`` is aware of its time zone. ``dns_names`` (or addresses) are the names by which the API server
    calls the server, at least one; the first is its common name. Unreadable parts of ``data`` are made again;
    its other keys stay. A certificate is renewed when a third of its life is left.
    """
    trusted = _trusted(now, data.get(AUTHORITY_CERT, b""))
    key = _key(data.get(AUTHORITY_KEY, b""))
    authority = _Pair(trusted[0], key) if trusted and key is not None and _fits(trusted[0], key) else None
    is_new = authority is None or _is_due(now, authority.cert)
    if authority is None or is_new:
        authority = _new_authority(now)
        trusted = [authority.cert, *trusted][:AUTHORITIES_MAX]
    serving = _serving(data)
    is_served = serving is not None and _may_serve(now, serving, trusted, dns_names)
    if serving is None or not is_served:
        serving = _new_serving(now, authority, dns_names)
    if is_served and not is_new:
        return None
    return {
        **data,
        AUTHORITY_CERT: b"".join(map(_pem, trusted)),
        AUTHORITY_KEY: _key_pem(authority.key),
        SERVING_CERT: _pem(serving.cert),
        SERVING_KEY: _key_pem(serving.key),
    }


def _is_due(now: datetime, cert: x509.Certificate) -> bool:
    start, end = cert.not_valid_before_utc, cert.not_valid_after_utc
    return now < start or end - now < (end - start) / 3


def _may_serve(
    now: datetime, serving: _Pair, trusted: Sequence[x509.Certificate], dns_names: Sequence[str]
) -> bool:
    if _is_due(now, serving.cert) or not any(_signed_by(serving.cert, cert) for cert in trusted):
        return False
    try:
        extension = serving.cert.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (x509.ExtensionNotFound, ValueError):
        return False
    return list(extension.value) == _names(dns_names)


def _signed_by(cert: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        cert.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def _trusted(now: datetime, pem: bytes) -> list[x509.Certificate]:
    try:
        found = x509.load_pem_x509_certificates(pem)
    except ValueError:
        return []
    return [cert for cert in found if cert.not_valid_before_utc <= now < cert.not_valid_after_utc]


def _serving(data: Mapping[str, bytes]) -> _Pair | None:
    key = _key(data.get(SERVING_KEY, b""))
    try:
        cert = x509.load_pem_x509_certificate(data.get(SERVING_CERT, b""))
    except ValueError:
        return None
    return None if key is None or not _fits(cert, key) else _Pair(cert, key)


def _key(pem: bytes) -> ec.EllipticCurvePrivateKey | None:
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return None
    return key if isinstance(key, ec.EllipticCurvePrivateKey) else None


def _fits(cert: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> bool:
    try:
        return cert.public_key() == key.public_key()
    except (ValueError, UnsupportedAlgorithm):
        return False


def _new_authority(now: datetime) -> _Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _common_name("kvrouter-operator admission")
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    cert = (
        _builder(now, AUTHORITY_VALID, key.public_key())
        .subject_name(name)
        .issuer_name(name)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA256())
    )
    return _Pair(cert, key)


def _new_serving(now: datetime, authority: _Pair, dns_names: Sequence[str]) -> _Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    cert = (
        _builder(now, SERVING_VALID, key.public_key())
        .subject_name(_common_name(dns_names[0][:64]))
        .issuer_name(authority.cert.subject)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(_names(dns_names)), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()), critical=False
        )
        .sign(authority.key, hashes.SHA256())
    )
    return _Pair(cert, key)


def _builder(now: datetime, valid: timedelta, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + valid)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _names(dns_names: Sequence[str]) -> list[x509.GeneralName]:
    return [_general_name(name) for name in dns_names]


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(cert: x509.Certificate) -> bytes:
    return cert.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


Stamp = tuple[tuple[int, int, int], ...]


class ServingCertificate:
    """A TLS context with a certificate that can be exchanged between two handshakes.

    Raises ConfigError, naming the file, when the first certificate cannot be read.
    """

    def __init__(self, cert: Path, key: Path) -> None:
        self._cert, self._key = cert, key
        self._stamp = self._stamp_of_files()
        self._latest = self._read()
        self.context = self._read()
        self.context.sni_callback = self._show_latest

    def reread(self) -> bool:
        """Read the files again if they changed; return whether they did.

        Raises ConfigError for files that cannot be read, or do not fit each other: the last certificate
        stays, and they are read again when they change once more.
        """
        stamp = self._stamp_of_files()
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        self._latest = self._read()
        return True

    def _show_latest(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = self._latest

    def _stamp_of_files(self) -> Stamp:
        """Return a value that changes when a Secret's volume exchanges the files."""
        try:
            found = [path.stat() for path in (self._cert, self._key)]
        except OSError:
            return ()
        return tuple((stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in found)

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self._cert, self._key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"{self._cert}, {self._key}: {error}", param="certificate") from error
        return context
