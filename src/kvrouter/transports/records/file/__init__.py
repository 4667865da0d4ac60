"""Cards and cordons as files of one directory, without a server."""

from kvrouter.transports.records.file.cards import FileDiscovery
from kvrouter.transports.records.file.cordons import FileCordons

__all__ = ["FileCordons", "FileDiscovery"]
