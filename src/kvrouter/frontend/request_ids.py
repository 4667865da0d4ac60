"""Request ids: the client's own where it sends a usable one, so that both sides' logs agree."""

import re
from uuid import uuid4

from kvrouter.core.ids import RequestId

USABLE_REQUEST_ID = re.compile(r"[A-Za-z0-9._:@/-]{1,128}")
"""What an id of a client's own must match as a whole: it goes into headers, paths and log lines."""


class RequestIds:
    """Hands out ids that no running request has."""

    def __init__(self) -> None:
        self._running: set[RequestId] = set()

    def take(self, wished: str | None) -> RequestId:
        """Return ``wished`` when it is usable; with a suffix when a request of this id runs already."""
        if wished is None or USABLE_REQUEST_ID.fullmatch(wished) is None:
            request_id = RequestId(uuid4().hex)
        elif wished in self._running:
            request_id = RequestId(f"{wished}-{uuid4().hex[:8]}")
        else:
            request_id = RequestId(wished)
        self._running.add(request_id)
        return request_id

    def give_back(self, request_id: RequestId) -> None:
        """The request has ended."""
        self._running.discard(request_id)
