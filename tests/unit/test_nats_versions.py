"""The NATS client whose private methods are overridden is of a version that the tests know."""

from importlib.metadata import version

import pytest
from nats.aio.client import Client

TESTED = "2.16."
OVERRIDDEN = {"_process_err", "_select_next_server", "_close", "_process_op_err"}
READ = {"_error_cb", "_transport", "_pending", "_pending_data_size"}


def test_the_client_is_of_a_tested_version() -> None:
    """A newer one may be allowed, here and in pyproject.toml, once the NATS contract and chaos tests pass."""
    assert version("nats-py").startswith(TESTED)


@pytest.mark.parametrize("name", sorted(OVERRIDDEN))
def test_the_client_has_the_methods_that_are_overridden(name: str) -> None:
    assert callable(getattr(Client, name, None))


def test_a_new_client_has_the_attributes_that_are_read() -> None:
    assert set(vars(Client())) >= READ
