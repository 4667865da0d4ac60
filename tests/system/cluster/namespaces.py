"""A namespace for each test: none is used twice, since those that end take a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

from tests.system.cluster.control_plane import ControlPlane

_numbers = count(1)


@contextmanager
def new_namespace(plane: ControlPlane) -> Iterator[str]:
    """A namespace of this plane, where pods may be made; it is deleted at the end."""
    name = f"test-{next(_numbers)}"
    account = {"namespace": name, "name": "default"}  # that a controller makes some time; pods need it
    plane.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account},
    )
    with plane.deleting("namespace", name, "--wait=false"):
        yield name
