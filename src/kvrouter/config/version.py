"""Which kvrouter runs."""

from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str:
    """Return the version of the installed package; ``source`` when it runs without being installed."""
    try:
        return version("kvrouter")
    except PackageNotFoundError:
        return "source"
