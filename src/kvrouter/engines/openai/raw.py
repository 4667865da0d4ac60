"""The engine's own bytes of a stream, as they would be had only the client asked."""

import msgspec

from kvrouter.engines.openai.events import AnswerEvent, Unasked, without_token_ids


class RawEvents:
    """Takes out of the events of one stream what was asked for the router's sake.

    An engine that is asked for the usage writes its fingerprint beside that, and else into the last event of
    the answer: that one waits for the usage, which comes right behind it, and gets the fingerprint back.
    """

    def __init__(self, *, added_token_ids: bool, unasked: Unasked, added_usage: bool) -> None:
        self._added_token_ids = added_token_ids
        self._unasked = unasked
        self._added_usage = added_usage
        self._last = b""

    @property
    def is_waiting(self) -> bool:
        """Whether bytes wait here: the tokens that belong to them wait too."""
        return bool(self._last)

    def take(self, event: AnswerEvent, raw: bytes) -> bytes:
        """Return what of ``raw``, and of what waits, goes to the client now."""
        if self._added_usage and event.is_usage_alone:
            return self._released(event.system_fingerprint)
        if self._added_token_ids:
            raw = without_token_ids(raw, self._unasked)
        if self._added_usage and event.finish is not None and event.is_first_choice_alone:
            waited, self._last = self._last, raw
            return waited
        return self._released(None) + raw

    def end(self, raw: bytes) -> bytes:
        """Return what still waits, and ``raw``, which ends the stream."""
        return self._released(None) + raw

    def _released(self, fingerprint: str | None) -> bytes:
        raw, self._last = self._last, b""
        if not raw or fingerprint is None:
            return raw
        body, brace, end = raw.rpartition(b"}")
        return b'%b,"system_fingerprint":%b%b%b' % (body, msgspec.json.encode(fingerprint), brace, end)
