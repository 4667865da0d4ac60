"""A pod's volumes as folders. What shows fields of the pod follows the pod as it is stored."""

import shutil
from base64 import b64decode
from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from tests.system.cluster.kubelet.api import Api, Object
from tests.system.cluster.kubelet.fields import NotPlayedError, field

Files = dict[str, bytes]


def exchange(folder: Path, files: Mapping[str, bytes]) -> None:
    """Make ``files`` what ``folder`` shows, all at one moment.

    As kubelets do it: the files lie in a hidden folder, the link ``..data`` leads there and is replaced by
    another one, and what is seen are links through it.
    """
    old = folder / "..data"
    old_name = old.readlink() if old.is_symlink() else None
    new = next(path for i in count() if not (path := folder / f"..{i}").exists())
    for name, content in files.items():
        (new / name).parent.mkdir(parents=True, exist_ok=True)
        (new / name).write_bytes(content)
    new.mkdir(exist_ok=True)
    next_link = folder / "..data_tmp"
    next_link.symlink_to(new.name)
    next_link.replace(old)
    shown = {name.partition("/")[0] for name in files}
    for name in shown:
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(Path("..data", name))
    for path in folder.iterdir():
        if path.name not in shown and not path.name.startswith(".."):
            path.unlink()
    if old_name is not None:
        shutil.rmtree(folder / old_name)


class Volumes:
    """The volumes of one pod, each a folder below ``root``."""

    def __init__(self, root: Path, api: Api, address: str) -> None:
        self._root = root
        self._api = api
        self._address = address
        self._shown: dict[str, Files] = {}

    def folder(self, name: str) -> Path:
        """Return where the volume of this name is."""
        return self._root / name

    async def mount(self, pod: Object, *, holds_fields: bool) -> None:
        """Make every volume; those of the Downward API stay empty while their files are held.

        Raises ApiError when something that they show is not there yet.
        """
        for volume in pod["spec"].get("volumes", []):
            name = volume["name"]
            self.folder(name).mkdir(parents=True, exist_ok=True)
            is_held = "downwardAPI" in volume and holds_fields
            if "emptyDir" not in volume and not is_held and name not in self._shown:
                self._show(name, await self._files(volume, pod))

    def refresh(self, pod: Object, *, holds_fields: bool) -> None:
        """Show the fields of the pod as they are now."""
        for volume in pod["spec"].get("volumes", []):
            if "downwardAPI" in volume and not holds_fields:
                self._show(volume["name"], self._fields(volume["downwardAPI"].get("items", []), pod))

    def _show(self, name: str, files: Files) -> None:
        if self._shown.get(name) != files:
            exchange(self.folder(name), files)
            self._shown[name] = files

    async def _files(self, volume: Mapping[str, Any], pod: Object) -> Files:
        (kind,) = set(volume) - {"name"}
        source = volume[kind]
        if kind == "projected":
            found: Files = {}
            for each in source["sources"]:
                ((part, of),) = each.items()
                found |= await self._source(part, of, pod)
            return found
        return await self._source(kind, source, pod)

    async def _source(self, kind: str, source: Mapping[str, Any], pod: Object) -> Files:
        space = f"/api/v1/namespaces/{pod['metadata']['namespace']}"
        match kind:
            case "downwardAPI":
                return self._fields(source.get("items", []), pod)
            case "serviceAccountToken":
                return {source["path"]: await self._token(space, source, pod)}
            case "configMap":
                found = await self._api.read(f"{space}/configmaps/{source['name']}")
                return _picked({key: text.encode() for key, text in found.get("data", {}).items()}, source)
            case "secret":
                name = source.get("secretName") or source["name"]
                found = await self._api.read(f"{space}/secrets/{name}")
                return _picked({key: b64decode(text) for key, text in found.get("data", {}).items()}, source)
        raise NotPlayedError(f"volume {kind}")

    def _fields(self, items: Iterable[Mapping[str, Any]], pod: Object) -> Files:
        return {
            item["path"]: field(pod, item["fieldRef"]["fieldPath"], self._address).encode() for item in items
        }

    async def _token(self, space: str, source: Mapping[str, Any], pod: Object) -> bytes:
        """A token of the pod's service account, which ends with the pod."""
        of = {"apiVersion": "v1", "kind": "Pod", "name": pod["metadata"]["name"]}
        spec: Object = {"boundObjectRef": {**of, "uid": pod["metadata"]["uid"]}}
        spec["expirationSeconds"] = source.get("expirationSeconds", 3600)
        spec["audiences"] = [source["audience"]] if source.get("audience") else None
        account = pod["spec"]["serviceAccountName"]
        asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        answer = await self._api.create(f"{space}/serviceaccounts/{account}/token", asked)
        return str(answer["status"]["token"]).encode()


def _picked(files: Files, source: Mapping[str, Any]) -> Files:
    """All files, or those that ``items`` names, under the paths that it gives them."""
    if "items" not in source:
        return files
    return {item["path"]: files[item["key"]] for item in source["items"]}
