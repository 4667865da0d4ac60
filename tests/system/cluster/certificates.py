"""A certificate authority of the tests' own, which servers, users and webhooks of a control plane trust."""

import ipaddress
from base64 import b64encode
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID_FOR = timedelta(days=2)
CLOCK_SKEW = timedelta(minutes=5)
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class KeyPair:
    """A certificate and its private key, each as PEM."""

    certificate_pem: bytes
    key_pem: bytes

    def write(self, folder: Path, name: str) -> tuple[Path, Path]:
        """Write ``NAME.crt`` and ``NAME.key``; answers with both paths."""
        certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
        certificate.write_bytes(self.certificate_pem)
        key.touch(mode=0o600)
        key.write_bytes(self.key_pem)
        return certificate, key


class Authority:
    """Signs the certificates of servers and of clients."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("kvrouter-tests")
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        self._certificate = (
            _builder(self._name, self._name, self._key.public_key())
            .add_extension(constraints, critical=True)
            .sign(self._key, hashes.SHA256())
        )

    @property
    def certificate_pem(self) -> bytes:
        """What those who trust this authority are given."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def bundle(self) -> str:
        """The same as a manifest's ``caBundle`` has it."""
        return b64encode(self.certificate_pem).decode()

    def for_server(self, *dns_names: str) -> KeyPair:
        """For a server on loopback that is also called by these names."""
        names = [
            x509.IPAddress(ipaddress.ip_address(LOOPBACK)),
            *map(x509.DNSName, ("localhost", *dns_names)),
        ]
        return self._issue(_name("server"), ExtendedKeyUsageOID.SERVER_AUTH, names)

    def for_user(self, user: str, groups: Iterable[str] = ()) -> KeyPair:
        """For a client whom the API server will know by this name, as a member of these groups."""
        return self._issue(_name(user, groups), ExtendedKeyUsageOID.CLIENT_AUTH, [])

    def _issue(
        self, subject: x509.Name, usage: x509.ObjectIdentifier, names: list[x509.GeneralName]
    ) -> KeyPair:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(subject, self._name, key.public_key()).add_extension(
            x509.ExtendedKeyUsage([usage]), critical=False
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        return KeyPair(certificate.public_bytes(serialization.Encoding.PEM), _private_pem(key))


def signing_key_pem() -> bytes:
    """A new private key, for what is signed without a certificate: tokens of service accounts."""
    key = ec.generate_private_key(ec.SECP256R1())
    # Where Kubernetes reads public keys, it takes an EC key in this older form alone.
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )


def _name(common: str, groups: Iterable[str] = ()) -> x509.Name:
    attributes = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
    return x509.Name([*attributes, x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + VALID_FOR)
    )


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
