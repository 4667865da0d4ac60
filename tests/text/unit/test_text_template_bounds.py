"""A chat template ends within its bounds whatever it says, and one that says nothing odd does not notice."""

import time
from pathlib import Path

import pytest
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvrouter.core.errors import ConfigError, InvalidRequest
from kvrouter.text.chat import ChatTemplate, GenerationBlock, to_json
from kvrouter.text.template_budget import CPU_S_MAX_ON_LOOP, TemplateOverBounds
from tests.testing.hostile_templates import TEMPLATES

GO = [{"role": "user", "content": "go"}]
ENDS_BY_ITSELF = {"doubling by escape", "doubling by urlencode", "lipsum"}
"""What grows by a few characters a step, or is not there at all."""

IS_NOT_THERE = {"html stripped", "links", "lipsum", "pprint"}
"""Filters and functions of jinja2 that templates here do not get."""

LIMIT_CPU_S = 10.0
"""Only what does not end takes so long."""


def behind_a_word(source: str) -> str:
    """A template that does it only when it is asked to, so that nothing shows when it is loaded."""
    return '{% if messages[0].content == "go" %}' + source + "{% endif %}"


@pytest.mark.parametrize("name", TEMPLATES)
def test_endless_templates_are_refused_at_load(name: str) -> None:
    before_s = time.thread_time()
    if name in ENDS_BY_ITSELF:
        ChatTemplate(TEMPLATES[name])
    else:
        with pytest.raises(ConfigError) as refused:
            ChatTemplate(TEMPLATES[name], name="/models/a")
        assert "chat template" in refused.value.message
        assert refused.value.param == "chat_template"
    assert time.thread_time() - before_s < LIMIT_CPU_S


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_endless_only_for_some_messages_is_stopped(name: str) -> None:
    try:
        template = ChatTemplate(behind_a_word(TEMPLATES[name]), name="/models/a")
    except ConfigError as refused:
        assert "does not compile" in refused.message  # noqa: PT017 - some never compile
        return
    before_s = time.thread_time()
    if name in IS_NOT_THERE:
        with pytest.raises(InvalidRequest, match=r"No filter named|is undefined"):
            template.render(GO, cpu_s_max=CPU_S_MAX_ON_LOOP)
    elif name in ENDS_BY_ITSELF:
        template.render(GO, cpu_s_max=CPU_S_MAX_ON_LOOP)
    else:
        with pytest.raises(TemplateOverBounds, match="the chat template of /models/a goes over its bounds: "):
            template.render(GO, cpu_s_max=CPU_S_MAX_ON_LOOP)
    assert time.thread_time() - before_s < LIMIT_CPU_S
    assert template.render([{"role": "user", "content": "no"}]) == ""


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ('{{ "{:[<5}".format(1) }}', "1[[[["),
        ('{{ "[{0[a]}] {{2024}} {1:03d}".format({"a": 1}, 7) }}', "[1] {2024} 007"),
        ('{{ "%(a)s (2024) %(b)03d" % {"a": 1, "b": 7} }}', "1 (2024) 007"),
        ('{{ "%s (a)2024 %5.2f" % (1, 2.5) }}', "1 (a)2024  2.50"),
    ],
)
def test_formats_of_bounded_width_are_rendered(source: str, text: str) -> None:
    assert ChatTemplate(source).render(GO) == text


ORDINARY = (Path(__file__).parents[2] / "data" / "ordinary-templates.txt").read_text().split("\n=====\n")


@pytest.mark.parametrize("source", ORDINARY)
def test_ordinary_templates_render_as_in_jinja2(source: str) -> None:
    messages = [
        {"role": "system", "content": "Alpha beta."},
        {"role": "user", "content": "What about 2023?"},
        {"role": "assistant", "content": "Gamma"},
    ]
    elsewhere = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    elsewhere.filters["tojson"] = to_json
    expected = elsewhere.from_string(source).render(messages=messages)
    assert expected
    assert ChatTemplate(source).render(messages) == expected


def test_a_long_chat_may_render_long_text() -> None:
    source = (
        "{% set ns = namespace(x='') %}{% for m in messages %}{% set ns.x = ns.x + m.content %}{% endfor %}"
        "{{ ns.x }}"
    )
    long = [{"role": "user", "content": "word " * 2_000}] * 100
    assert len(ChatTemplate(source).render(long)) == 100 * 10_000


@pytest.mark.parametrize("source", ["{{ 1 }}" * 100_000, "a" * 300_000])
def test_a_template_over_its_longest_length_is_refused(source: str) -> None:
    with pytest.raises(ConfigError, match="at most 262144"):
        ChatTemplate(source)
