"""A namespace for each test: none is used twice, since those that end take a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

from tests.cluster.control_plane import ControlPlane

_numbers = count(1)


@contextmanager
def new_namespace(plane: ControlPlane) -> Iterator[str]:
    """A namespace of this plane, where pods may be made; it is deleted at the end."""
    name = f"test-{next(_numbers)}"
    plane.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    with plane.deleting("namespace", name, "--wait=false"):
        plane.kubectl("wait", "--for=create", "serviceaccount/default", "--namespace", name, "--timeout=60s")
        yield name
