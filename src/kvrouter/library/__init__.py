"""kvrouter inside your own program."""

from kvrouter.library.answers import Answer, Answers
from kvrouter.library.indexer import KvIndexer
from kvrouter.library.mock_fleet import mock_fleet
from kvrouter.library.router import BestWorker, BestWorkers, KvRouter, PotentialLoad
from kvrouter.library.runtime import Client, Component, Endpoint, Namespace, Runtime

KvPushRouter = KvRouter
"""The name under which Dynamo's users know it."""

__all__ = [
    "Answer",
    "Answers",
    "BestWorker",
    "BestWorkers",
    "Client",
    "Component",
    "Endpoint",
    "KvIndexer",
    "KvPushRouter",
    "KvRouter",
    "Namespace",
    "PotentialLoad",
    "Runtime",
    "mock_fleet",
]
