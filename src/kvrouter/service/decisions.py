"""The last decisions, kept by request id, for "why did that request go there?"."""

from collections import OrderedDict, deque

from kvrouter.core.ids import RequestId
from kvrouter.routing.decision import Decision

ATTEMPTS_MAX = 16
"""Decisions kept for one request id: of a client that sends one id again and again, the last ones."""


class DecisionLog:
    """Holds the attempts of the last ``requests_max`` requests; the oldest request is forgotten first."""

    def __init__(self, *, requests_max: int) -> None:
        self._requests_max = requests_max
        self._by_request: OrderedDict[RequestId, deque[tuple[float, Decision]]] = OrderedDict()

    def record(self, decision: Decision, *, decided_at_s: float) -> None:
        """Add one attempt's decision; ``decided_at_s`` is a wall-clock time."""
        if self._requests_max == 0:
            return
        attempts = self._by_request.get(decision.request_id)
        if attempts is None:
            attempts = self._by_request[decision.request_id] = deque(maxlen=ATTEMPTS_MAX)
            if len(self._by_request) > self._requests_max:
                self._by_request.popitem(last=False)
        attempts.append((decided_at_s, decision))

    def get(self, request_id: RequestId) -> list[tuple[float, Decision]] | None:
        """Every attempt's decision in order, or None when the request is unknown or forgotten."""
        attempts = self._by_request.get(request_id)
        return None if attempts is None else list(attempts)
