"""Authentication from a kubeconfig file, with the loader of the official client."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import aiohttp
import yaml
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import ConfigException, load_kube_config
from kubernetes.aio.config.kube_config import KubeConfigLoader, KubeConfigMerger

from kvrouter.core.errors import ConfigError
from kvrouter.kube.client import ASKED_AT_ONCE, ApiRequest, ClusterLost

CONNECTIONS_MAX = 2 * ASKED_AT_ONCE
"""Requests, and watches."""

_SHAPELESS = (ValueError, TypeError, LookupError, AttributeError)
_MISTAKES = (ConfigException, OSError, yaml.YAMLError, *_SHAPELESS)
"""Errors of the loader for an unreadable or invalid file."""


class LoaderConnection:
    """A :class:`~kvrouter.kube.client.Connection` over the official client's connections."""

    def __init__(self, api: ApiClient) -> None:
        self._api = api

    async def send(self, request: ApiRequest) -> aiohttp.ClientResponse:
        """Send a request with a JSON body.

        Raises ClusterLost where the user's token or certificate cannot be had.
        """
        body = request.body
        try:
            method, url, signed, _, _ = await self._api.param_serialize(
                request.method,
                request.path,
                query_params=list(request.query),
                header_params=dict(request.headers),
                auth_settings=["BearerToken"],
            )
            answered = await self._api.call_api(
                method,
                url,
                header_params=signed,
                body=None if body is None else json.loads(body),  # the official client encodes it itself
                _request_timeout=request.limits,
            )
        except ConfigException as error:  # what a plugin of the file raises
            raise ClusterLost(f"{request.method} {request.path}: {error}") from error
        return cast(aiohttp.ClientResponse, answered.response)

    def refused(self) -> None:
        """Does nothing: the loader renews credentials itself."""

    async def close(self) -> None:
        """Does nothing: :func:`signed_in` closes the official client."""


@asynccontextmanager
async def signed_in(kubeconfig: Path) -> AsyncIterator[LoaderConnection]:
    """Yield a connection as the user of the file's current context. Raises ConfigError."""
    try:
        configuration = await _loaded(kubeconfig, context=None)
    except (ConfigException, OSError) as error:
        raise ConfigError(f"--kubeconfig: {error}", param="kubeconfig") from error
    async with ApiClient(configuration) as api:
        yield LoaderConnection(api)


@dataclass(frozen=True, slots=True)
class KubeconfigUser:
    """The user of one context of a kubeconfig, and the Kubernetes namespace."""

    kubeconfig: Path
    context: str | None
    namespace: str

    def connection(self) -> "KubeconfigConnection":
        """Return a connection as this user."""
        return KubeconfigConnection(self)


def user_of(kubeconfig: Path, context: str | None, *, namespace: str) -> KubeconfigUser:
    """Return the user of ``context`` (None: the current one), in the context's namespace, else ``namespace``.
    No plugin is run yet, and no certificate is read.

    Raises ConfigError, without the name of a setting, for an unreadable or invalid file.
    """
    try:
        with kubeconfig.open("rb"):  # the loader does not report why it fails
            pass
        loader = KubeConfigLoader(KubeConfigMerger(str(kubeconfig)).config, active_context=context)
        named = loader.current_context["context"].get("namespace")
    except _MISTAKES as error:
        raise ConfigError(f"{kubeconfig}: {_reason_of(error)}") from error
    return KubeconfigUser(kubeconfig, context, str(named or namespace))


class KubeconfigConnection:
    """A :class:`~kvrouter.kube.client.Connection` for processes that outlive a token.

    It signs in at the first request, and again once the API server rejects the user: it then reads the file
    again and runs its plugin. A failure there fails the request, and the next request retries.
    """

    def __init__(self, user: KubeconfigUser) -> None:
        self._user = user
        self._api: ApiClient | None = None
        self._is_refused = False
        self._signing_in = asyncio.Lock()

    async def send(self, request: ApiRequest) -> aiohttp.ClientResponse:
        """Send a request with a JSON body. Raises ClusterLost where signing in fails."""
        return await LoaderConnection(await self._signed_in()).send(request)

    def refused(self) -> None:
        """Sign in again at the next request: the API server rejected the user."""
        self._is_refused = True

    async def close(self) -> None:
        """Close every connection; idempotent."""
        if self._api is not None:
            await self._api.close()

    async def _signed_in(self) -> ApiClient:
        async with self._signing_in:
            if self._api is None or self._is_refused:
                try:
                    made = ApiClient(await _loaded(self._user.kubeconfig, context=self._user.context))
                except _MISTAKES as error:
                    raise ClusterLost(f"{self._user.kubeconfig}: {_reason_of(error)}") from error
                before, self._api, self._is_refused = self._api, made, False
                if before is not None:
                    await before.close()
            return self._api


async def _loaded(kubeconfig: Path, *, context: str | None) -> Configuration:
    configuration = Configuration()
    await load_kube_config(
        config_file=str(kubeconfig),
        context=context,
        client_configuration=configuration,
        persist_config=False,
    )
    configuration.connection_pool_maxsize = CONNECTIONS_MAX
    return configuration


def _reason_of(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, _SHAPELESS):
        return "is no kubeconfig"
    return " ".join(str(error).split()) or type(error).__name__
