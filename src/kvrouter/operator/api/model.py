"""What every part of a Kubernetes object has in common as a model."""

from typing import NamedTuple

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel
from pydantic.config import JsonDict


class Part(BaseModel):
    """A part of an object: frozen, camelCase on the wire, each field described by its docstring.

    A field that the model doesn't know stays in ``model_extra``: an API server with a newer definition may
    send one, which is a warning and no reason to refuse.
    """

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        frozen=True,
        extra="allow",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )


class Rule(NamedTuple):
    """One rule in CEL that the API server checks itself, and what it says when the rule is broken."""

    rule: str
    message: str


def rules(*found: Rule) -> JsonDict:
    """Return the part of a schema that holds these rules."""
    return {"x-kubernetes-validations": [{"rule": rule.rule, "message": rule.message} for rule in found]}


def list_map(key: str) -> JsonDict:
    """Return the part of a schema that says: a list whose entries are merged by ``key``, which is unique."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
