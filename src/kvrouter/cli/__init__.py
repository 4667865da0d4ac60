"""The command line of ``kvrouter``: a folder for each command, and the error messages and exit codes of all.

A folder has ``flags.py``, the options and help; ``run.py``, the work; ``report.py``, how its result is shown.
"""

import os
from collections.abc import Sequence

# read when numpy is imported: its linear algebra, which no request needs, would begin a thread for each core
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import click

from kvrouter.cli.commands import kvrouter
from kvrouter.cli.output import echo
from kvrouter.core.errors import INTERRUPTED, ConfigError, KvrouterError, TopologyUnavailable

RUNTIME_ERROR = 1
USAGE_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    A mistake in flags, settings or files is reported in one line each on standard error, with exit code 2; a
    later error, with 1.
    """
    try:
        kvrouter.main(args=arguments, prog_name="kvrouter", standalone_mode=False)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        echo(error.format_message(), err=True)
        return USAGE_ERROR
    except click.ClickException as error:
        return _report(error.format_message(), USAGE_ERROR)
    except TopologyUnavailable as error:
        return _report(error.message, RUNTIME_ERROR)
    except ConfigError as error:
        return _report(error.message, USAGE_ERROR)
    except (KvrouterError, OSError) as error:
        return _report(str(error), RUNTIME_ERROR)
    except click.Abort:
        return INTERRUPTED
    return 0


def _report(message: str, code: int) -> int:
    for line in message.splitlines():
        echo(f"kvrouter: {line}", err=True)
    return code
