"""One call over a connection of its own: the bytes that came back, and what they say."""

import asyncio

import h11

from tests.system.differential.calls import Call
from tests.system.differential.compare import Observed

WITHIN_S = 30.0
"""Only a call that fails waits as long."""

HOP_BY_HOP = frozenset({"connection", "date", "keep-alive", "server", "transfer-encoding"})
"""Headers of one connection, of one moment, or of one program."""

NOT_COMPARED = HOP_BY_HOP | {"content-length"}
"""The length is compared as the body is: whoever reads it sees that it is right."""
REQUEST_ID = "0123456789abcdef"
"""What every call is called by its client."""


class Unreadable(Exception):
    """The bytes are no HTTP answer, or more or less than one."""


async def received(address: tuple[str, int], call: Call) -> bytes:
    """Send the call; return every byte that comes back until the connection is closed."""
    async with asyncio.timeout(WITHIN_S):
        reader, writer = await asyncio.open_connection(*address)
        try:
            writer.write(sent(address, call))
            return await _all(reader)
        finally:
            writer.close()


async def _all(reader: asyncio.StreamReader) -> bytes:
    pieces = []
    while piece := await reader.read(1 << 16):
        pieces.append(piece)
    return b"".join(pieces)


def sent(address: tuple[str, int], call: Call) -> bytes:
    """The bytes of a call."""
    lines = [f"{call.method} {call.target} HTTP/1.1", f"host: {address[0]}:{address[1]}", "connection: close"]
    lines += [f"{name}: {value}" for name, value in (*call.headers, ("x-request-id", REQUEST_ID))]
    if call.method == "POST" or call.body:
        lines.append(f"content-length: {len(call.body)}")
    return "\r\n".join((*lines, "", "")).encode() + call.body


def parsed(raw: bytes, method: str) -> Observed:
    """Read an answer; raise Unreadable for what is none."""
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method=method, target="/", headers=[("host", "x"), ("connection", "close")]))
    connection.send(h11.EndOfMessage())
    head, pieces = None, []
    try:
        connection.receive_data(raw)
        connection.receive_data(b"")
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Response):
                head = event
            elif isinstance(event, h11.Data):
                pieces.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                break
            else:
                raise Unreadable(f"{event!r} in the middle of an answer")
    except h11.RemoteProtocolError as error:
        raise Unreadable(str(error)) from error
    if head is None or connection.trailing_data[0]:
        raise Unreadable("more than one answer, or none")
    headers = [(name.decode(), value.decode("latin-1")) for name, value in head.headers]
    return Observed(
        f"HTTP/{head.http_version.decode()} {head.status_code} {head.reason.decode('latin-1')}",
        tuple(sorted((name, value) for name, value in headers if name not in NOT_COMPARED)),
        b"".join(pieces),
    )
