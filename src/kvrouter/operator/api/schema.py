"""A model as the structural schema that Kubernetes asks for: no references, no unions, no titles."""

from typing import cast

from pydantic import BaseModel, JsonValue

Schema = dict[str, JsonValue]

_ORDER = ("description", "type", "format", "enum", "default", "minimum", "maximum", "minLength", "maxLength")
_ORDER_LAST = ("required", "properties", "additionalProperties", "items")
_DROPPED = frozenset({"title", "$defs"})


def structural(model: type[BaseModel]) -> Schema:
    """Return the schema of ``model``. Raises TypeError for a field that no structural schema can state."""
    document = cast(Schema, model.model_json_schema(by_alias=True))
    definitions = cast(dict[str, Schema], document.get("$defs", {}))
    return _plain(document, definitions)


def _plain(node: Schema, definitions: dict[str, Schema]) -> Schema:
    node = _inlined(node, definitions)
    plain: Schema = {}
    for key, value in node.items():
        if key in _DROPPED or (key == "default" and value in (None, {}, [])):
            continue
        if key == "additionalProperties" and (isinstance(value, bool) or not _type_known(value, definitions)):
            continue
        if key == "description":
            plain[key] = " ".join(str(value).split()).replace("``", "`")
        elif key == "properties":
            fields = cast(dict[str, Schema], value)
            plain[key] = {name: _plain(field, definitions) for name, field in fields.items()}
        elif key in ("items", "additionalProperties"):
            plain[key] = _plain(cast(Schema, value), definitions)
        else:
            plain[key] = value
    if "type" not in plain:
        raise TypeError(f"no structural schema says this: {node}")
    return _ordered(plain)


def _type_known(node: JsonValue, definitions: dict[str, Schema]) -> bool:
    """Whether ``node`` says of what type a value is; a free JSON value is of any."""
    return "type" in _inlined(cast(Schema, node), definitions)


def _inlined(node: Schema, definitions: dict[str, Schema]) -> Schema:
    """Return ``node`` with what it refers to; its own words win over those of what it refers to."""
    own = {key: value for key, value in node.items() if key not in ("$ref", "anyOf")}
    if "$ref" in node:
        name = str(node["$ref"]).removeprefix("#/$defs/")
        return {**_inlined(definitions[name], definitions), **own}
    if "anyOf" in node:
        choices = [choice for choice in cast(list[Schema], node["anyOf"]) if choice.get("type") != "null"]
        if len(choices) != 1:
            raise TypeError(f"no structural schema has a union: {node}")
        return {**_inlined(choices[0], definitions), **own}
    return node


def _ordered(plain: Schema) -> Schema:
    """The same keys in the order in which a definition is read: what it is, then what is in it."""
    middle = sorted(key for key in plain if key not in _ORDER and key not in _ORDER_LAST)
    return {key: plain[key] for key in (*_ORDER, *middle, *_ORDER_LAST) if key in plain}
