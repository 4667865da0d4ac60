"""The URL, client and console of the commands that ask a running router."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvrouter.settings.option import option

if TYPE_CHECKING:
    from kvrouter.api.client import RouterClient
    from kvrouter.cli.console import TextConsole


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """Which router is asked."""

    url: str = option(
        "The running router.  [KVROUTER_URL; default: http://127.0.0.1:8000]",
        default="http://127.0.0.1:8000",
        variable="KVROUTER_URL",
        hides_default=True,
    )


def plain_console(*, line_chars: int = 140) -> "TextConsole":
    """Return a console for the terminal; other outputs get wide lines without colour."""
    from kvrouter.cli.console import TextConsole  # noqa: PLC0415

    console = TextConsole()
    return console if console.is_terminal else TextConsole(width=line_chars, no_color=True)


def router_at(url: str) -> "RouterClient":
    """Return a client of the router there, with the token of the environment. Raises AskFailed."""
    from kvrouter.api.client import RouterClient  # noqa: PLC0415
    from kvrouter.core.secret import secret_variable  # noqa: PLC0415

    return RouterClient(url, token=secret_variable(os.environ, "KVROUTER_ADMIN_TOKEN"))
