"""How long to wait before the API server is asked again."""

import random
from dataclasses import dataclass

FIRST_S = 0.1
MOST_S = 5.0


@dataclass(slots=True)
class Backoff:
    """Doubles from one failure to the next, up to ``most_s``; a chance part keeps many processes apart."""

    most_s: float = MOST_S
    _next_s: float = FIRST_S

    def after(self, error: Exception) -> float:
        """Return the wait after ``error``, in seconds; at least as long as the server asks for."""
        wait_s = min(self._next_s, self.most_s)
        self._next_s = 2 * wait_s
        asked_s = float(getattr(error, "wait_s", 0.0))
        return max(wait_s, asked_s) * random.uniform(1.0, 1.5)

    def reset(self) -> None:
        """It went well."""
        self._next_s = FIRST_S
