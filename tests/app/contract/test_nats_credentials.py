"""A NATS server that takes an operator's users: let in by a credentials file, which may be renewed."""

import asyncio
import base64
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import nkeys  # type: ignore[import-untyped]
import pytest

from kvrouter.app import nats_connection as connection
from kvrouter.app.nats_connection import NatsUnreachable, nats_connection
from kvrouter.settings.planes import PlaneSettings
from kvrouter.transports.events.jetstream.stream import ComponentNames, EventStream, StreamLimits
from tests.testing.constants import SetConstants
from tests.testing.nats_server import NatsServer, running_nats
from tests.testing.processes import eventually

WITHIN_S = 60.0


NO_LIMIT = -1


class Keys:
    """A pair of keys of one kind, and the claims that it signs."""

    def __init__(self, kind: int) -> None:
        self.seed = nkeys.encode_seed(os.urandom(32), kind)
        self._pair = nkeys.from_seed(bytearray(self.seed))
        self.public = self._pair.public_key.decode()

    def signed(self, subject: str, about: dict[str, object], *, ends_at: int | None = None) -> str:
        """A JWT about the owner of the public key ``subject``."""
        claims = {"jti": os.urandom(8).hex(), "iat": int(time.time()), "iss": self.public, "sub": subject}
        claims |= {"name": about["type"], "nats": {"version": 2, **about}}
        if ends_at is not None:
            claims["exp"] = ends_at
        head = {"typ": "JWT", "alg": "ed25519-nkey"}
        body = f"{_text(json.dumps(head).encode())}.{_text(json.dumps(claims).encode())}"
        return f"{body}.{_text(self._pair.sign(body.encode()))}"


class Operator:
    """An operator with an account for us, and one for the server itself."""

    def __init__(self) -> None:
        self._operator = Keys(nkeys.PREFIX_BYTE_OPERATOR)
        self._account = Keys(nkeys.PREFIX_BYTE_ACCOUNT)
        self._system = Keys(nkeys.PREFIX_BYTE_ACCOUNT)

    @property
    def config(self) -> str:
        """What a server needs to take this operator's users, with JetStream for ours."""
        about = {"type": "operator", "system_account": self._system.public}
        ours = _account(storage=NO_LIMIT)
        return "\n".join(
            (
                f"operator: {self._operator.signed(self._operator.public, about)}",
                "resolver: MEMORY",
                "resolver_preload: {",
                f"  {self._account.public}: {self._operator.signed(self._account.public, ours)}",
                f"  {self._system.public}: {self._operator.signed(self._system.public, _account(storage=0))}",
                "}",
            )
        )

    def write_user(self, path: Path, *, lives_s: int | None = None) -> None:
        """Write the credentials of a new user of our account, as ``nsc`` does."""
        user = Keys(nkeys.PREFIX_BYTE_USER)
        about: dict[str, object] = {"type": "user", "subs": NO_LIMIT, "data": NO_LIMIT, "payload": NO_LIMIT}
        ends_at = None if lives_s is None else int(time.time()) + lives_s
        jwt = self._account.signed(user.public, about, ends_at=ends_at)
        half = path.with_suffix(".half")
        half.write_text(
            f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n"
        )
        half.replace(path)


def _account(*, storage: int) -> dict[str, object]:
    names = ("subs", "data", "payload", "imports", "exports", "conn", "leaf", "streams", "consumer")
    limits: dict[str, object] = dict.fromkeys(names, NO_LIMIT)
    limits |= {"wildcards": True, "mem_storage": storage, "disk_storage": storage}
    return {"type": "account", "limits": limits}


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


@pytest.fixture
def operator() -> Operator:
    return Operator()


@pytest.fixture
def server(operator: Operator) -> Iterator[NatsServer]:
    with running_nats(more_config=operator.config) as ours:
        yield ours


async def test_only_users_of_the_nats_operator_are_admitted(
    server: NatsServer, operator: Operator, tmp_path: Path, set_constants: SetConstants
) -> None:
    file = tmp_path / "user.creds"
    operator.write_user(file)
    settings = PlaneSettings(nats_server=server.url, nats_credentials=str(file))
    async with nats_connection(settings, name="test", tls=None) as client:
        stream = EventStream(client.jetstream(), ComponentNames("default", "backend"), StreamLimits())
        assert (await stream.ensure()).messages == 0
    set_constants(connection, CONNECT_LIMIT_S=1.0)
    Operator().write_user(file)
    for stranger in (settings, PlaneSettings(nats_server=server.url)):
        with pytest.raises(NatsUnreachable, match="Authorization Violation"):
            async with nats_connection(stranger, name="test", tls=None):
                pass


async def test_expired_nats_credentials_are_read_again(
    server: NatsServer,
    operator: Operator,
    tmp_path: Path,
    set_constants: SetConstants,
    caplog: pytest.LogCaptureFixture,
) -> None:
    set_constants(connection, RECONNECT_WAIT_S=0.05)
    caplog.set_level(logging.INFO, logger="kvrouter")
    file = tmp_path / "user.creds"
    operator.write_user(file, lives_s=4)
    settings = PlaneSettings(nats_server=server.url, nats_credentials=str(file))
    async with nats_connection(settings, name="test", tls=None) as client, asyncio.timeout(WITHIN_S):

        async def is_sent_away() -> bool:
            return not client.is_connected

        async def is_back() -> bool:
            return client.is_connected

        await eventually(is_sent_away)
        operator.write_user(file)
        await eventually(is_back)
        await client.flush()
    assert "user authentication expired" in str([vars(record) for record in caplog.records])
