"""A frontend whose recording stops and goes on with each SIGUSR1: one process can be compared with itself.

The recorder's thread is called ``recorder`` in ``/proc`` from the first signal on, and looks for records four
times as often as in other frontends: what was recorded is soon written, and a little dearer.
"""

import signal
import sys
import threading
from pathlib import Path
from types import FrameType

from kvrouter.app import router_build
from kvrouter.cli import main
from kvrouter.recording import recorder
from kvrouter.router.instrumentation import ServiceInstrumentation
from kvrouter.router.traffic import TrafficRecorder

RECORDER = "recorder"
TICK_S = 0.25


class SwitchedInstrumentation(ServiceInstrumentation):
    """Has no ``traffic`` while that is off, as where nobody asked for a recording."""

    is_on = True
    is_named = False
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
    if not SwitchedInstrumentation.is_named:
        SwitchedInstrumentation.is_named = True
        (thread,) = (each for each in threading.enumerate() if each.name == "kvrouter-recorder")
        Path(f"/proc/self/task/{thread.native_id}/comm").write_text(RECORDER)


if __name__ == "__main__":
    recorder.TICK_S = TICK_S
    router_build.ServiceInstrumentation = SwitchedInstrumentation  # type: ignore[attr-defined]
    signal.signal(signal.SIGUSR1, switch)
    sys.exit(main(sys.argv[1:]))
