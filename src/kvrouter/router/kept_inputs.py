"""Kept inputs of the last decisions and refusals, from which their candidates are computed when asked for."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

from kvrouter.core.errors import RoutingRefused
from kvrouter.core.ids import RequestId
from kvrouter.kernel.fleet.fleet import Fleet
from kvrouter.kernel.routing.decision_input import DecisionInput

INPUTS_BYTES_MAX = 32 << 20
"""The most bytes of the inputs of decisions, and as many again of refusals; the oldest are dropped first.
With 16 worker ranks an input has about 5 kB, with 1,000 ranks 70 kB.
"""

InputKey = tuple[RequestId, float]
"""The request, and the time of its decision."""


class KeptInputs:
    """The inputs of the last decisions, at most :data:`INPUTS_BYTES_MAX`; those between two changes of a
    fleet share its snapshot, which counts once.
    """

    def __init__(self) -> None:
        self._inputs: OrderedDict[InputKey, DecisionInput] = OrderedDict()
        self._on: dict[Fleet, int] = {}
        """The number of inputs by the snapshot that they share."""
        self.n_bytes = 0

    def __len__(self) -> int:
        return len(self._inputs)

    def put(self, key: InputKey, decision_input: DecisionInput) -> None:
        """Keep an input; the last one is kept whatever its size."""
        if key in self._inputs:
            self.drop(key)
        self._inputs[key] = decision_input
        fleet = decision_input.fleet
        sharing = self._on.get(fleet, 0)
        self._on[fleet] = sharing + 1
        self.n_bytes += decision_input.n_bytes
        if not sharing:
            self.n_bytes += decision_input.fleet_bytes
        while self.n_bytes > INPUTS_BYTES_MAX and len(self._inputs) > 1:
            self.drop(next(iter(self._inputs)))

    def get(self, key: InputKey) -> DecisionInput | None:
        """Return the input of a decision; None where it was dropped."""
        return self._inputs.get(key)

    def drop(self, key: InputKey) -> None:
        """Forget the input of a decision that is kept no longer."""
        dropped = self._inputs.pop(key, None)
        if dropped is None:
            return
        fleet = dropped.fleet
        self.n_bytes -= dropped.n_bytes
        self._on[fleet] -= 1
        if not self._on[fleet]:
            del self._on[fleet]
            self.n_bytes -= dropped.fleet_bytes


class KeptRefusal(NamedTuple):
    """A request that no worker could take: the last attempt's refusal, without its traceback.

    ``input`` is None where it was dropped.
    """

    refused_at_s: float
    request_id: RequestId
    attempt: int
    mode: str
    trace_id: str
    model: str
    code: str
    message: str
    refusals: Mapping[str, int]
    input: DecisionInput | None = None


class RefusalLog:
    """Keeps the refusals of the last ``requests_max`` requests that no worker could take, apart from the
    decisions: however many requests are refused, no decision is dropped for them.
    """

    def __init__(self, *, requests_max: int) -> None:
        self._requests_max = requests_max
        self._refusals: OrderedDict[RequestId, KeptRefusal] = OrderedDict()
        self._inputs = KeptInputs()

    def record(
        self,
        refused: RoutingRefused,
        decision_input: DecisionInput,
        *,
        refused_at_s: float,
        mode: str,
        trace_id: str,
        model: str,
    ) -> None:
        """Keep a refusal, in place of an earlier one of the same request id."""
        if self._requests_max == 0:
            return
        request = decision_input.request
        self._drop(request.request_id)
        if len(self._refusals) >= self._requests_max:
            self._drop(next(iter(self._refusals)))
        self._refusals[request.request_id] = KeptRefusal(
            refused_at_s,
            request.request_id,
            request.attempt,
            mode,
            trace_id,
            model,
            refused.code,
            refused.message,
            {reason.value: count for reason, count in sorted(refused.refusals.items())},
        )
        self._inputs.put((request.request_id, refused_at_s), decision_input)

    def get(self, request_id: RequestId) -> KeptRefusal | None:
        """Return the refusal of a request; None where it was not refused, or the refusal was dropped."""
        kept = self._refusals.get(request_id)
        if kept is None:
            return None
        return kept._replace(input=self._inputs.get((request_id, kept.refused_at_s)))

    def _drop(self, request_id: RequestId) -> None:
        dropped = self._refusals.pop(request_id, None)
        if dropped is not None:
            self._inputs.drop((request_id, dropped.refused_at_s))
