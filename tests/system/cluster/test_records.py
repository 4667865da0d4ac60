"""Records as objects of a real API server keep the laws of the port."""

import secrets
from collections.abc import AsyncIterator, Iterator

import pytest

from kvrouter.core.cordon_rules import Cordon
from kvrouter.kube.account import Account
from kvrouter.transports.records.encoding import CardRecord
from kvrouter.transports.records.kubernetes.cards import WorkerObjects
from kvrouter.transports.records.kubernetes.cordons import CordonObjects
from kvrouter.transports.records.kubernetes.store import ObjectRecords
from tests.system.cluster.control_plane import ControlPlane
from tests.system.cluster.namespaces import new_namespace
from tests.system.cluster.operators import install_crds
from tests.system.cluster.workers_store import FRONTEND_VERBS, WORKER_VERBS, account
from tests.testing.discovery_stores import ignore_reports
from tests.testing.record_laws import RecordLaws, RecordStores

pytestmark = pytest.mark.api_server


@pytest.fixture(scope="module")
def anyone(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Account]:
    """May do what workers and frontends do, with cards and cordons."""
    install_crds(plane)
    with new_namespace(plane) as space:
        plane.kubectl("get", "kvrc", "--namespace", space)  # it asks until the storage of a new kind is there
        verbs = (*WORKER_VERBS, *FRONTEND_VERBS, "patch")
        folder = tmp_path_factory.mktemp("anyone") / "account"
        yield account(plane, space, "anyone", verbs, folder, resources=("kvrouterworkers", "kvroutercordons"))


class TestObjects(RecordLaws):
    """As every store."""

    @pytest.fixture
    async def ends(self, anyone: Account) -> AsyncIterator[RecordStores]:
        fleet = f"test-{secrets.token_hex(4)}"
        made: list[ObjectRecords[CardRecord] | ObjectRecords[Cordon]] = []

        def card_end() -> WorkerObjects:
            made.append(
                end := WorkerObjects(anyone, fleet=fleet, lease_s=60.0, on_refused=ignore_reports, pod=None)
            )
            return end

        def cordon_end() -> CordonObjects:
            made.append(end := CordonObjects(anyone, fleet=fleet, on_refused=ignore_reports))
            return end

        yield RecordStores(card_end, cordon_end)
        for each in made:
            await each.close()
