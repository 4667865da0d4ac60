"""The file that ``kvrouter calibrate`` writes: the times of an engine's steps."""

from pathlib import Path

from pydantic import ValidationError

from kvrouter.core.timing import Timing
from kvrouter.fleetfile.fleet_engines import MockTiming
from kvrouter.settings.problems import config_error, problem_of, read_document


def read_timing(path: Path) -> Timing:
    """Read a timing from a YAML file; raises ConfigError that names line and field."""
    document = read_document(path)
    try:
        return Timing(**MockTiming.model_validate(document.content).model_dump())
    except ValidationError as error:
        raise config_error(
            [problem_of(item, MockTiming) for item in error.errors()], document.place
        ) from error
