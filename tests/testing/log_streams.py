"""Streams that a log is written to, read once all of its lines are there."""

import io

from kvrouter.telemetry.logs import log_output


class LogStream(io.StringIO):
    """What was logged so far."""

    def getvalue(self) -> str:
        """Return the text, with the lines that still wait."""
        output = log_output()
        if output is not None:
            output.writer.flush()
        return super().getvalue()


class LogTerminal(LogStream):
    """A stream that takes itself for a terminal."""

    def isatty(self) -> bool:
        """Whether it is one."""
        return True
