"""A frontend whose recording stops and goes on with each SIGUSR1: one process can be compared with itself."""

import signal
import sys
from types import FrameType

from kvrouter.cli import main
from kvrouter.service.instrumentation import ServiceInstrumentation
from kvrouter.service.traffic import TrafficRecorder
from kvrouter.wiring import router


class SwitchedInstrumentation(ServiceInstrumentation):
    """Has no ``traffic`` while that is off, as where nobody asked for a recording."""

    is_on = True
    _traffic: TrafficRecorder | None = None

    @property
    def traffic(self) -> TrafficRecorder | None:
        """What records, while it does."""
        return self._traffic if SwitchedInstrumentation.is_on else None

    @traffic.setter
    def traffic(self, traffic: TrafficRecorder | None) -> None:
        self._traffic = traffic


def switch(_number: int, _frame: FrameType | None) -> None:
    """Stop, or go on."""
    SwitchedInstrumentation.is_on = not SwitchedInstrumentation.is_on


if __name__ == "__main__":
    router.ServiceInstrumentation = SwitchedInstrumentation  # type: ignore[attr-defined]
    signal.signal(signal.SIGUSR1, switch)
    sys.exit(main(sys.argv[1:]))
