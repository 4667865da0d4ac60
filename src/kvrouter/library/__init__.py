"""The library: kvrouter as objects inside another program."""

from kvrouter.library.inputs import AnswerPiece, AnswerPieces
from kvrouter.library.kv_router import BestWorker, BestWorkers, KvIndexer, KvRouter, PotentialLoad
from kvrouter.library.runtime import Client, Component, Endpoint, Namespace, Runtime, mock_fleet

KvPushRouter = KvRouter
"""The name under which Dynamo's users know it."""

__all__ = [
    "AnswerPiece",
    "AnswerPieces",
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
