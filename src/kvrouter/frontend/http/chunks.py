"""Chunked transfer coding: where a chunked body ends, found without a look at what its chunks hold.

This is a second reading of the framing beside llhttp's, which judges it. It is read only to hand llhttp one
message at a time: where the two disagree, the message that begins inside a piece is refused.
"""

import re

__all__ = ["ChunkScanner"]

_SHORT = re.compile(b"(?s:%b)*+" % b"|".join(rb"%x\r\n.{%d}\r\n" % (size, size) for size in range(1, 16)))
_LINE = re.compile(rb"0{0,40}+([0-9A-Fa-f]{1,16})(?:;[^\r\n]*+)?\r\n")
_SIZE = re.compile(rb"0*+([0-9A-Fa-f]{0,16})(?![0-9A-Fa-f])")
_LINE_BYTES_KEPT = 64
_LINE_END_BYTES = 2


class ChunkScanner:
    """Finds the end of one chunked body, whatever parts it comes in."""

    def __init__(self) -> None:
        self._skip_bytes = 0  # what is left of a chunk and of the line end behind it
        self._line = b""  # the first bytes of a line that is not whole
        self._in_trailers = False
        self._over = False  # at its end, or at a line that is no chunk's

    def end(self, data: bytes, at: int) -> int:
        """The position behind the body, or the length of ``data``, all of which then belongs to it."""
        size = len(data)
        if self._over:
            return size
        at += self._skip_bytes
        while at < size:
            if not (self._line or self._in_trailers):
                at = _at_end(_SHORT, data, at)
                line = _LINE.match(data, at)
                chunk_bytes = int(line[1], 16) if line is not None else 0
                if line is not None and chunk_bytes:
                    at = line.end() + chunk_bytes + _LINE_END_BYTES
                    continue
                if at == size:
                    break
            line_end = data.find(b"\n", at)
            if line_end < 0:
                self._line += data[at : at + _LINE_BYTES_KEPT - len(self._line)]
                self._skip_bytes = 0
                return size
            text = self._line + data[at : min(line_end, at + _LINE_BYTES_KEPT - len(self._line))]
            self._line = b""
            at = line_end + 1
            if self._in_trailers:
                if text == b"\r":
                    self._over = True
                    return at
                continue
            found = _SIZE.match(text)
            if found is None or found.end() in (0, _LINE_BYTES_KEPT):
                self._over = True
                return size
            chunk_bytes = int(found[1] or b"0", 16)
            self._in_trailers = chunk_bytes == 0
            if chunk_bytes:
                at += chunk_bytes + _LINE_END_BYTES
        self._skip_bytes = at - size
        return size


def _at_end(pattern: re.Pattern[bytes], data: bytes, at: int) -> int:
    found = pattern.match(data, at)
    return at if found is None else found.end()
