"""Names as Kubernetes allows them, each with the pattern that the API server checks too."""

import re
from collections.abc import Callable
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, PlainValidator, WithJsonSchema
from pydantic.alias_generators import to_camel
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError


class ObjectPart(BaseModel):
    """A part of an object: frozen, camelCase in JSON, each field described by its docstring.

    Unknown fields stay in ``model_extra``: an API server with a newer definition may send one, which is a
    warning and no reason to refuse.
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
    """A rule in CEL that the API server checks, and its message when the rule is broken."""

    rule: str
    message: str


def rules(*found: Rule) -> JsonDict:
    """Return the part of a schema with these rules."""
    return {"x-kubernetes-validations": [{"rule": rule.rule, "message": rule.message} for rule in found]}


def list_map(key: str) -> JsonDict:
    """Return the part of a schema for a list with entries that are merged by ``key``, which is unique."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
SUBDOMAIN = rf"{LABEL}(\.{LABEL})*"

DOMAIN_PATTERN = "^[a-z]([-a-z0-9]*[a-z0-9])?$"
DOMAIN_CHARS_MAX = 63
LABEL_KEY_PATTERN = rf"^({SUBDOMAIN}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?$"
LABEL_PREFIX_CHARS_MAX = 253
LABEL_KEY_CHARS_MAX = LABEL_PREFIX_CHARS_MAX + 1 + 63
OBJECT_PATTERN = f"^{SUBDOMAIN}$"
OBJECT_CHARS_MAX = 253
LABEL_VALUE_PATTERN = "^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
LABEL_VALUE_CHARS_MAX = 63
COMPONENT_PATTERN = "^[A-Za-z]([-A-Za-z0-9]*[A-Za-z0-9])?$"
SERVICE_PATTERN = "^[a-z]([-a-z0-9]*[a-z0-9])?$"
SERVICE_CHARS_MAX = 63

TOPOLOGY_LABEL_PREFIX = "grove.io/topology."
"""The start of a pod's label for one level of a topology; the level's domain follows."""

PACKED_LABEL = "kvrouter.dev/packed-by"
"""Label of pods that are packed into one domain: the level, and a digest of its node label."""

LABELS_OF_PODS = (
    "kvrouter.dev/component",
    "kvrouter.dev/component-type",
    "kvrouter.dev/deployment",
    PACKED_LABEL,
    "pod-template-hash",
)
"""Pods are selected by these: with a node's value there a pod would count as gone, and be replaced for ever.
"""

NO_LABEL_OF_PODS = "must be the key of a node label, and pods are found by this one"

LEVEL_CHARS_MAX = 63 - len("topology.")
"""A label's name has 63 characters, and ``topology.`` takes some of them."""


def topology_label(domain: str) -> str:
    """Return the key of the pod label that holds the value of ``domain``, a level of a topology."""
    return f"{TOPOLOGY_LABEL_PREFIX}{domain}"


def level_problem(domain: str) -> str | None:
    """Return why ``domain``, a topology's level, cannot be in a pod's label and be a file's name, or None."""
    if re.fullmatch(DOMAIN_PATTERN, domain) is None:
        return "is not of lower-case letters, digits and '-', from a letter to a letter or digit"
    if len(domain) > LEVEL_CHARS_MAX:
        return f"has more than the {LEVEL_CHARS_MAX} characters that fit into {topology_label('<domain>')}"
    return None


def label_key_problem(key: str) -> str | None:
    """Return why ``key`` cannot be the key of a label, or None."""
    prefix = key.rpartition("/")[0]
    if len(key) > LABEL_KEY_CHARS_MAX or re.fullmatch(LABEL_KEY_PATTERN, key) is None:
        return "is no key of a label, such as topology.kubernetes.io/zone"
    return None if len(prefix) <= LABEL_PREFIX_CHARS_MAX else "has too many characters before its '/'"


def _checked(pattern: str, chars_max: int, must: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if len(text) > chars_max or re.fullmatch(pattern, text) is None:
            raise PydanticCustomError("kubernetes_name", "{must}", {"must": must})
        return text

    return check


def _label_key(text: str) -> str:
    check = _checked(
        LABEL_KEY_PATTERN,
        LABEL_KEY_CHARS_MAX,
        "must be the key of a label, such as topology.kubernetes.io/zone",
    )
    if len(text.rpartition("/")[0]) > LABEL_PREFIX_CHARS_MAX:
        raise PydanticCustomError(
            "kubernetes_name",
            "must have ≤ {chars} characters before its '/'",
            {"chars": LABEL_PREFIX_CHARS_MAX},
        )
    if text in LABELS_OF_PODS:
        raise PydanticCustomError("kubernetes_name", NO_LABEL_OF_PODS)
    return check(text)


DomainName = Annotated[
    str,
    AfterValidator(
        _checked(
            DOMAIN_PATTERN,
            DOMAIN_CHARS_MAX,
            "must be a domain such as zone: ≤ 63 lower-case letters, digits and '-', first a letter",
        )
    ),
    WithJsonSchema({"type": "string", "maxLength": DOMAIN_CHARS_MAX, "pattern": DOMAIN_PATTERN}),
]

LabelKey = Annotated[
    str,
    AfterValidator(_label_key),
    WithJsonSchema(
        {
            "type": "string",
            "maxLength": LABEL_KEY_CHARS_MAX,
            "pattern": LABEL_KEY_PATTERN,
            **rules(Rule(f"!(self in {[*LABELS_OF_PODS]})", NO_LABEL_OF_PODS)),
        }
    ),
]

LabelValue = Annotated[
    str,
    AfterValidator(
        _checked(
            LABEL_VALUE_PATTERN,
            LABEL_VALUE_CHARS_MAX,
            "must be a label's value such as us-east-1a: ≤ 63 letters, digits, '-', '_' and '.'",
        )
    ),
    WithJsonSchema(
        {
            "description": "The value of a node label.",
            "type": "string",
            "maxLength": LABEL_VALUE_CHARS_MAX,
            "pattern": LABEL_VALUE_PATTERN,
        }
    ),
]

ObjectName = Annotated[
    str,
    AfterValidator(
        _checked(
            OBJECT_PATTERN,
            OBJECT_CHARS_MAX,
            "must be an object's name: ≤ 253 lower-case letters, digits, '-' and '.'",
        )
    ),
    WithJsonSchema({"type": "string", "maxLength": OBJECT_CHARS_MAX, "pattern": OBJECT_PATTERN}),
]

VARIABLE_PATTERN = "^[-._a-zA-Z][-._a-zA-Z0-9]*$"
VARIABLE_CHARS_MAX = 256

VariableName = Annotated[
    str,
    AfterValidator(
        _checked(
            VARIABLE_PATTERN,
            VARIABLE_CHARS_MAX,
            "must be a variable's name: ≤ 256 letters, digits, '_', '-' and '.', first no digit",
        )
    ),
    WithJsonSchema({"type": "string", "maxLength": VARIABLE_CHARS_MAX, "pattern": VARIABLE_PATTERN}),
]

ComponentName = Annotated[
    str,
    AfterValidator(
        _checked(
            COMPONENT_PATTERN,
            SERVICE_CHARS_MAX,
            "must be a component's name: ≤ 63 letters, digits and '-', first a letter",
        )
    ),
    WithJsonSchema({"type": "string", "maxLength": SERVICE_CHARS_MAX, "pattern": COMPONENT_PATTERN}),
]

PODS_MAX = 2**31 - 1
SHARE_PATTERN = "^[0-9]{1,3}%$"
QUANTITY_CHARS_MAX = 32
QUANTITY_PATTERN = r"^([0-9]+(\.[0-9]+)?)([KMGTPE]i?|k|e[0-9]{1,2})?$"


def _number_or_text(pattern: str, chars_max: int, must: str) -> Callable[[object], int | str]:
    """Return what checks a value that Kubernetes takes as a number or as a text."""

    def check(value: object) -> int | str:
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= PODS_MAX:
            return value
        if isinstance(value, str) and len(value) <= chars_max and re.fullmatch(pattern, value):
            return value
        raise PydanticCustomError("kubernetes_name", "{must}", {"must": must})

    return check


def _number_or_text_schema(pattern: str, chars_max: int) -> JsonDict:
    return {"x-kubernetes-int-or-string": True, "minimum": 0, "maxLength": chars_max, "pattern": pattern}


PodsOrShare = Annotated[
    int | str,
    PlainValidator(
        _number_or_text(SHARE_PATTERN, 4, "must be a number of pods, such as 1, or a share, such as 25%")
    ),
    WithJsonSchema(_number_or_text_schema(SHARE_PATTERN, 4)),
]

Quantity = Annotated[
    int | str,
    PlainValidator(
        _number_or_text(
            QUANTITY_PATTERN, QUANTITY_CHARS_MAX, "must be an amount of bytes, such as 8Gi, or 0 for none"
        )
    ),
    WithJsonSchema(_number_or_text_schema(QUANTITY_PATTERN, QUANTITY_CHARS_MAX)),
]


def is_nothing(amount: int | str) -> bool:
    """Return whether a :data:`PodsOrShare` or :data:`Quantity` is 0, whatever its unit."""
    digits = re.match(r"[0-9.]+", str(amount))
    return digits is None or float(digits[0]) == 0
