"""Discovery by the files of one directory, without any server."""

from kvrouter.transports.discovery.file.cordons import FileCordons
from kvrouter.transports.discovery.file.discovery import FileDiscovery

__all__ = ["FileCordons", "FileDiscovery"]
