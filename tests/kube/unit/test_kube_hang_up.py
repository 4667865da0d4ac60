"""A watch that is left takes its connection with it, whatever the API server still has to say."""

import asyncio
import gc
import socket
import ssl
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from kubernetes.aio.client import ApiClient, Configuration

from kvrouter.kube.account import Account
from kvrouter.kube.client import KubeClient
from kvrouter.kube.kubeconfig import LoaderConnection
from kvrouter.operator.admission.certificates import AUTHORITY_CERT, SERVING_CERT, SERVING_KEY, renewed
from kvrouter.operator.cluster_info import NODES
from kvrouter.transports.records.kubernetes.cards import WorkerObjects
from tests.testing.discovery_stores import ignore_reports

LINE = b'{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"2"}}}\n'
ANSWER = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(LINE), LINE)


async def by_discovery(url: str, folder: Path) -> None:
    user = Account(url, folder, "default")
    api = WorkerObjects(user, fleet="space", lease_s=60.0, on_refused=ignore_reports, pod=None)
    async with api.watch("1") as stream:
        await anext(stream)
    await api.close()


async def by_the_operator(url: str, folder: Path) -> None:
    configuration = Configuration(host=url)
    configuration.ssl_ca_cert = str(folder / AUTHORITY_CERT)
    async with (
        ApiClient(configuration) as api,
        KubeClient(LoaderConnection(api)).watch(NODES.path(), "1") as stream,
    ):
        await anext(stream)


@pytest.mark.parametrize("watch", [by_discovery, by_the_operator])
def test_ended_watch_leaves_no_open_connection(
    tmp_path: Path, watch: Callable[[str, Path], Coroutine[None, None, None]]
) -> None:
    with server_that_never_says_goodbye(tmp_path) as url, warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        asyncio.run(watch(url, tmp_path))
        gc.collect()
    assert [str(each.message) for each in reported if each.category is ResourceWarning] == []


@contextmanager
def server_that_never_says_goodbye(folder: Path) -> Iterator[str]:
    """Answers one question with a line of a watch; then nobody reads what the other end says."""
    for name, content in (renewed(datetime.now(UTC), {}, ["127.0.0.1"]) or {}).items():
        (folder / name).write_bytes(content)
    (folder / "token").write_text("t0p")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / SERVING_CERT, folder / SERVING_KEY)
    is_over = threading.Event()

    def answer() -> None:
        plain, _ = listener.accept()
        with context.wrap_socket(plain, server_side=True) as connection:
            connection.recv(65_536)
            connection.sendall(ANSWER)
            is_over.wait()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        answering = threading.Thread(target=answer)
        answering.start()
        try:
            yield f"https://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            is_over.set()
            answering.join()
