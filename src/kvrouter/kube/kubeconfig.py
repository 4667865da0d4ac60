"""Authentication from a kubeconfig file, with the loader of the official client."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import aiohttp
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import ConfigException, load_kube_config

from kvrouter.core.errors import ConfigError
from kvrouter.kube.client import ASKED_AT_ONCE, ClusterLost, Query

CONNECTIONS_MAX = 2 * ASKED_AT_ONCE
"""Questions, and watches."""


class LoaderConnection:
    """A :class:`~kvrouter.kube.client.Connection` over the official client's connections."""

    def __init__(self, api: ApiClient) -> None:
        self._api = api

    async def send(
        self,
        method: str,
        path: str,
        *,
        query: Query,
        headers: Mapping[str, str],
        body: bytes | None,
        limits: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        """Send a request, whose body is JSON.

        Raises ClusterLost where the user's token or certificate cannot be had.
        """
        try:
            method, url, signed, _, _ = await self._api.param_serialize(
                method,
                path,
                query_params=list(query),
                header_params=dict(headers),
                auth_settings=["BearerToken"],
            )
            answered = await self._api.call_api(
                method,
                url,
                header_params=signed,
                body=None if body is None else json.loads(body),  # the official client encodes it itself
                _request_timeout=limits,
            )
        except ConfigException as error:  # what a plugin of the file raises
            raise ClusterLost(f"{method} {path}: {error}") from error
        return cast(aiohttp.ClientResponse, answered.response)

    def refused(self) -> None:
        """The loader renews what it has by itself."""

    async def close(self) -> None:
        """The official client is closed by :func:`signed_in`."""


@asynccontextmanager
async def signed_in(kubeconfig: Path) -> AsyncIterator[LoaderConnection]:
    """A connection as the user of the file's current context. Raises ConfigError."""
    configuration = Configuration()
    try:
        await load_kube_config(
            config_file=str(kubeconfig), client_configuration=configuration, persist_config=False
        )
    except (ConfigException, OSError) as error:
        raise ConfigError(f"--kubeconfig: {error}", param="kubeconfig") from error
    configuration.connection_pool_maxsize = CONNECTIONS_MAX
    async with ApiClient(configuration) as api:
        yield LoaderConnection(api)
