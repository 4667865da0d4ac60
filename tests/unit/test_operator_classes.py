"""Whose a deployment is: by an annotation, which most do not have."""

import pytest

from kvrouter.operator.classes import class_of


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"metadata": {"annotations": {"kvrouter.dev/class": "blue"}}}, "blue"),
        ({"metadata": {"annotations": {"kvrouter.dev/class": 3}}}, "kvrouter"),
        ({"metadata": {"annotations": {}}}, "kvrouter"),
        ({"metadata": {"annotations": None}}, "kvrouter"),
        ({"metadata": None}, "kvrouter"),
        ({}, "kvrouter"),
        (None, "kvrouter"),
        ([], "kvrouter"),
    ],
)
def test_the_class_is_the_annotation_or_the_default(document: object, expected: str) -> None:
    assert class_of(document) == expected
