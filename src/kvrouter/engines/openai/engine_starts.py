"""Tells a restarted engine from several engines that answer at one URL."""

from collections import deque

STARTS_KEPT = 32
"""The starts that are remembered; of more engines behind one address, some take a turn again soon."""

CHECKS_ALIKE = 30
"""After so many checks in a row with the same start, one engine answers at the URL."""


class EngineStarts:
    """The starts that an engine's URL has answered with, such as the start times of its process.

    A restart brings a start that was not seen before, and no earlier one comes back. Engines behind one
    address, such as a Kubernetes Service or a load balancer, take turns: an earlier start does come back.
    """

    def __init__(self, started: object = None) -> None:
        self.is_several = False
        """Whether several engines answer at the URL."""

        self.last = started
        """The last start that it answered with; None before one."""
        self._seen: deque[object] = deque(() if started is None else (started,), maxlen=STARTS_KEPT)
        self._n_alike = 0

    def note(self, started: object, *, is_check: bool = False) -> bool:
        """Note a start that was observed just now, None where none was; return whether it is a restart, or
        ``is_several`` changed.

        ``is_check``: it was asked on a new connection, which an address of several engines may lead to
        another one than the last.
        """
        if started is None:
            return False
        if started == self.last:
            self._n_alike += is_check
            if not self.is_several or self._n_alike < CHECKS_ALIKE:
                return False
            self.is_several = False
            self._seen.clear()
            self._seen.append(started)
            return True
        self.last, self._n_alike = started, 0
        was_several = self.is_several
        if started in self._seen:
            self.is_several = True
            return not was_several
        self._seen.append(started)
        return not was_several
