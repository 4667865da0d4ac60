"""The names that a program imports from the package."""

import subprocess
import sys

import pytest

import kvrouter


@pytest.mark.parametrize("name", kvrouter.__all__)
def test_every_public_name_exists(name: str) -> None:
    assert getattr(kvrouter, name) is not None


def test_kv_push_router_is_kv_router() -> None:
    assert kvrouter.KvPushRouter is kvrouter.KvRouter


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        kvrouter.no_such_name  # noqa: B018


def test_importing_the_package_loads_no_submodule() -> None:
    code = "import sys, kvrouter; print([name for name in sys.modules if name.startswith('kvrouter.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
