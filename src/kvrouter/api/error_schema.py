"""Errors in OpenAI's form."""

from collections.abc import Mapping, Sequence

from msgspec import UNSET, Struct, UnsetType

from kvrouter.api.fleet_schema import ExpectedEngine


class ApiError(Struct, frozen=True, kw_only=True):
    """An error; ``param`` is the field at fault. A refusal adds its role, its domain and its counts;
    ``GET /ready`` the engines that have no worker or a wrong URL.
    """

    message: str
    type: str = ""
    param: str | None = None
    code: str = ""
    refusals: Mapping[str, int] | UnsetType = UNSET
    role: str | UnsetType | None = UNSET
    domain: str | UnsetType | None = UNSET
    engine_problems: Sequence[ExpectedEngine] | UnsetType = UNSET


class ErrorBody(Struct, frozen=True):
    """The body of an error answer."""

    error: ApiError
