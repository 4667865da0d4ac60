"""The door's own certificates: renewed in time, trusted before they are used."""

import ipaddress
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.x509 import verification

from kvrouter.operator.admission.certificates import (
    AUTHORITIES_MAX,
    AUTHORITY_CERT,
    AUTHORITY_KEY,
    AUTHORITY_VALID,
    SERVING_CERT,
    SERVING_KEY,
    SERVING_VALID,
    renewed,
)

NOW = datetime(2026, 11, 21, tzinfo=UTC)
NAMES = ("kvrouter-admission.kvrouter.svc", "kvrouter-admission.kvrouter.svc.cluster.local", "10.0.0.7")
Data = dict[str, bytes]


def first(now: datetime = NOW) -> Data:
    data = renewed(now, {}, NAMES)
    assert data is not None
    return data


def authorities(data: Data) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates(data[AUTHORITY_CERT])


def serving(data: Data) -> x509.Certificate:
    return x509.load_pem_x509_certificate(data[SERVING_CERT])


def is_trusted(data: Data, by: Data, now: datetime) -> bool:
    """Whether a client who has one Secret's authorities takes the certificate of another."""
    builder = verification.PolicyBuilder().store(verification.Store(authorities(by))).time(now)
    try:
        builder.build_server_verifier(x509.DNSName(NAMES[0])).verify(serving(data), [])
    except verification.VerificationError:
        return False
    return True


def test_empty_secret_gets_an_authority_and_a_serving_certificate() -> None:
    data = first()
    assert set(data) == {AUTHORITY_CERT, AUTHORITY_KEY, SERVING_CERT, SERVING_KEY}
    assert is_trusted(data, data, NOW)
    names = serving(data).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == list(NAMES[:2])
    assert names.get_values_for_type(x509.IPAddress) == [ipaddress.ip_address(NAMES[2])]
    assert not is_trusted(data, first(), NOW)


def test_certificates_are_kept_in_the_first_half_of_their_validity() -> None:
    data = first()
    assert renewed(NOW, data, NAMES) is None
    assert renewed(NOW + SERVING_VALID / 2, data, NAMES) is None


def test_serving_certificate_is_renewed_in_its_last_third_by_its_authority() -> None:
    data = first()
    later = NOW + SERVING_VALID * 0.7
    after = renewed(later, data, NAMES)
    assert after is not None
    assert after[AUTHORITY_CERT] == data[AUTHORITY_CERT]
    assert serving(after).serial_number != serving(data).serial_number
    assert is_trusted(after, data, later)
    assert renewed(later, after, NAMES) is None


def test_changed_server_names_get_a_certificate_of_the_same_authority() -> None:
    data = first()
    after = renewed(NOW, data, ("other.kvrouter.svc",))
    assert after is not None
    assert after[AUTHORITY_CERT] == data[AUTHORITY_CERT]
    assert renewed(NOW, after, ("other.kvrouter.svc",)) is None


def test_a_new_authority_is_trusted_before_it_signs() -> None:
    """For years, day by day: whoever read the authorities a day ago takes the certificate of today."""
    data = first()
    day = timedelta(days=1)
    seen, changes = {authorities(data)[0].serial_number}, 0
    now = NOW
    while now < NOW + 2 * AUTHORITY_VALID:
        now += day * 10
        after = renewed(now, data, NAMES) or data
        assert is_trusted(after, data, now)
        assert renewed(now, after, NAMES) is None
        assert len(authorities(after)) <= AUTHORITIES_MAX
        seen.add(authorities(after)[0].serial_number)
        changes += after is not data
        data = after
    assert len(seen) == 3
    assert changes < 80


def test_expired_authority_is_replaced_by_a_single_new_one() -> None:
    data = first()
    later = NOW + AUTHORITY_VALID + timedelta(days=1)
    after = renewed(later, data, NAMES)
    assert after is not None
    assert is_trusted(after, after, later)
    assert len(authorities(after)) == 1


@pytest.mark.parametrize("broken", [AUTHORITY_CERT, AUTHORITY_KEY, SERVING_CERT, SERVING_KEY])
@pytest.mark.parametrize("bytes_", [b"", b"nonsense", b"\xff"])
def test_unreadable_part_of_the_secret_is_made_again(broken: str, bytes_: bytes) -> None:
    after = renewed(NOW, {**first(), broken: bytes_}, NAMES)
    assert after is not None
    assert is_trusted(after, after, NOW)
    assert renewed(NOW, after, NAMES) is None


@pytest.mark.parametrize("mixed", [AUTHORITY_CERT, AUTHORITY_KEY, SERVING_CERT, SERVING_KEY])
def test_secret_with_a_part_of_another_secret_is_renewed(mixed: str) -> None:
    data, other = first(), first()
    after = renewed(NOW, {**data, mixed: other[mixed]}, NAMES)
    assert after is not None
    assert is_trusted(after, after, NOW)
    assert renewed(NOW, after, NAMES) is None


def test_other_keys_of_the_secret_are_kept() -> None:
    data = renewed(NOW, {"note": b"ours"}, NAMES)
    assert data is not None
    assert data["note"] == b"ours"
