"""The admission server's certificate in a Secret, shared by all replicas and renewed in time."""

import asyncio
import base64
import binascii
import os
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from pydantic import JsonValue

from kvrouter.kube.client import CONFLICT, ClusterError, KubeClient, RequestRefused
from kvrouter.kube.objects import Key, Manifest, ResourceKind, fields_of
from kvrouter.operator.admission.certificates import AUTHORITY_CERT, SERVING_CERT, SERVING_KEY, renewed

SECRETS = ResourceKind("v1", "Secret", "secrets")
VALIDATING = ResourceKind(
    "admissionregistration.k8s.io/v1",
    "ValidatingWebhookConfiguration",
    "validatingwebhookconfigurations",
    is_namespaced=False,
)
MUTATING = VALIDATING._replace(name="MutatingWebhookConfiguration", plural="mutatingwebhookconfigurations")
CHECK_EACH_S = 60.0
TRIES = 5


class OwnCertificate:
    """Keeps the Secret's certificate valid and in ``folder``, and its authority in the ``caBundle`` of the
    ValidatingWebhookConfiguration ``webhook`` and, if the cluster has it, of the MutatingWebhookConfiguration
    of that name with ``-binding`` after it.

    Every replica does so: of two writes at a time, the API server refuses one by the Secret's version.
    """

    def __init__(
        self, client: KubeClient, secret: Key, *, webhook: str, dns_names: Sequence[str], folder: Path
    ) -> None:
        self._client, self._secret, self._webhook = client, secret, webhook
        self._dns_names, self._folder = tuple(dns_names), folder
        self.cert, self.key = folder / SERVING_CERT, folder / SERVING_KEY

    async def ensure(self) -> None:
        """Make the certificate valid now. Raises ClusterError if that fails."""
        data = await self._good_data()
        await self._trust(data[AUTHORITY_CERT])
        for path, content in ((self.key, data[SERVING_KEY]), (self.cert, data[SERVING_CERT])):
            _write(path, content)

    async def run(self, on_refused: Callable[[str], None], *, check_each_s: float = CHECK_EACH_S) -> None:
        """Renew it until cancelled; ``on_refused`` is called with the reason if that fails."""
        while True:
            await asyncio.sleep(check_each_s)
            try:
                await self.ensure()
            except ClusterError as error:
                on_refused(error.message)

    async def _good_data(self) -> dict[str, bytes]:
        tries = 0
        while True:
            current = await self._client.read(SECRETS, self._secret)
            data = {} if current is None else _decoded(current.get("data"))
            better = renewed(datetime.now(UTC), data, self._dns_names)
            if better is None:
                return data
            try:
                await self._store(current, better)
            except RequestRefused as refused:
                tries += 1
                if refused.status != CONFLICT or tries == TRIES:
                    raise
            else:
                return better

    async def _store(self, current: Manifest | None, data: dict[str, bytes]) -> None:
        encoded: Manifest = {key: base64.b64encode(value).decode() for key, value in data.items()}
        if current is not None:
            await self._client.replace(SECRETS, {**current, "data": encoded})
            return
        metadata: Manifest = {"namespace": self._secret.namespace, "name": self._secret.name}
        manifest: Manifest = {"metadata": metadata, "type": "kubernetes.io/tls", "data": encoded}
        await self._client.create(SECRETS, {"apiVersion": "v1", "kind": "Secret", **manifest})

    async def _trust(self, authorities: bytes) -> None:
        bundle = base64.b64encode(authorities).decode()
        if not await self._is_trusting(VALIDATING, self._webhook, bundle):
            message = (
                f"{VALIDATING.name} {self._webhook} is not there: install the manifests, or name another"
            )
            raise ClusterError(message)
        await self._is_trusting(MUTATING, f"{self._webhook}-binding", bundle)

    async def _is_trusting(self, kind: ResourceKind, name: str, bundle: str) -> bool:
        """Make the webhooks of a configuration trust ``bundle``; return False if it does not exist."""
        found = await self._client.read(kind, Key("", name))
        if found is None:
            return False
        webhooks = found.get("webhooks")
        trusting: list[JsonValue] = [
            _trusting(webhook, bundle) for webhook in (webhooks if isinstance(webhooks, list) else [])
        ]
        if trusting != webhooks:
            await self._client.replace(kind, {**found, "webhooks": trusting})
        return True


def _trusting(webhook: JsonValue, bundle: str) -> JsonValue:
    if not isinstance(webhook, dict):
        return webhook
    return {**webhook, "clientConfig": {**fields_of(webhook.get("clientConfig")), "caBundle": bundle}}


def _decoded(data: JsonValue) -> dict[str, bytes]:
    found = {}
    for key, value in fields_of(data).items():
        try:
            found[key] = base64.b64decode(str(value), validate=True)
        except (binascii.Error, ValueError):
            continue
    return found


def _write(path: Path, content: bytes) -> None:
    """Replace a file atomically, unless its content is the same."""
    if path.exists() and path.read_bytes() == content:
        return
    fresh = path.with_name(f".{path.name}.new")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
    fresh.replace(path)
