"""The names that a program imports from the package."""

import subprocess
import sys

import pytest

import kvrouter


@pytest.mark.parametrize("name", kvrouter.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(kvrouter, name) is not None


def test_the_specifications_name_is_the_same_class() -> None:
    assert kvrouter.KvPushRouter is kvrouter.KvRouter


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        kvrouter.no_such_name  # noqa: B018


def test_importing_the_package_loads_nothing_else() -> None:
    code = "import sys, kvrouter; print([name for name in sys.modules if name.startswith('kvrouter.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
