"""From JSON to a deployment: what is wrong with it in words, and which fields nobody knows."""

from typing import NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kvrouter.config.problems import Path, Problem, did_you_mean, innermost, problem_of
from kvrouter.operator.api.deployment import DynamoGraphDeployment

PROBLEMS_MAX = 20
"""More mistakes than these are not told at once."""


class Reading(NamedTuple):
    """A deployment, or the problems for which it is none; ``unknown`` are fields that have no effect."""

    deployment: DynamoGraphDeployment | None
    problems: tuple[Problem, ...] = ()
    unknown: tuple[Problem, ...] = ()


def read_deployment(document: object) -> Reading:
    """Return what ``document``, any JSON value, says. Never raises."""
    if not isinstance(document, dict):
        return Reading(None, (Problem((), "must be an object"),))
    content = {key: value for key, value in document.items() if key != "status"}
    try:
        deployment = DynamoGraphDeployment.model_validate(content, by_alias=True, by_name=False)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        problems = innermost([_problem(found) for found in errors])
        return Reading(None, tuple(problems[:PROBLEMS_MAX]))
    return Reading(deployment, unknown=tuple(_unknown(deployment, ())))


def _problem(error: ErrorDetails) -> Problem:
    path = error["loc"]
    if "podTemplate" in path[:-1]:  # any JSON is right inside, so only its depth can be wrong
        return Problem(path[: path.index("podTemplate") + 1], "has too many parts inside each other")
    return problem_of(error, DynamoGraphDeployment)


def _unknown(part: BaseModel, path: Path) -> list[Problem]:
    """Return the fields inside ``part`` that no model knows, each with its nearest known name."""
    fields = type(part).model_fields
    known = [field.alias or name for name, field in fields.items()]
    found = [
        Problem((*path, name), f"is no field of this form, and has no effect{did_you_mean(name, known)}")
        for name in (part.model_extra or {})
    ]
    for name, field in fields.items():
        value: object = getattr(part, name)
        here = (*path, field.alias or name)
        if isinstance(value, BaseModel):
            found += _unknown(value, here)
        elif isinstance(value, tuple):
            for index, entry in enumerate(value):
                found += _unknown(entry, (*here, index)) if isinstance(entry, BaseModel) else []
    return found
