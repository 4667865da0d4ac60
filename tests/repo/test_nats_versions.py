"""The NATS client whose private methods are overridden is of a version that the tests know."""

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from nats.aio.client import Client
from packaging.requirements import Requirement

TESTED = "2.16."
PROJECT = Path(__file__).parents[2] / "pyproject.toml"
OVERRIDDEN = {"_process_err", "_select_next_server", "_close", "_process_op_err"}
READ = {"_error_cb", "_transport", "_pending", "_pending_data_size"}


def test_the_client_is_of_a_tested_version() -> None:
    """A newer one may be allowed, here and in pyproject.toml, once the NATS contract and chaos tests pass."""
    assert version("nats-py").startswith(TESTED)


@pytest.mark.parametrize(
    ("candidate", "is_allowed"), [("2.15.99", False), ("2.16.0", True), ("2.16.9", True), ("2.17.0", False)]
)
def test_the_project_allows_no_other_version(candidate: str, is_allowed: bool) -> None:
    declared = tomllib.loads(PROJECT.read_text("utf-8"))["project"]["dependencies"]
    (requirement,) = (Requirement(each) for each in declared if re.match(r"nats-py\b", each))
    assert (candidate in requirement.specifier) == is_allowed


@pytest.mark.parametrize("name", sorted(OVERRIDDEN))
def test_the_client_has_the_overridden_methods(name: str) -> None:
    assert callable(getattr(Client, name, None))


def test_a_new_client_has_the_private_attributes_that_are_read() -> None:
    assert set(vars(Client())) >= READ
