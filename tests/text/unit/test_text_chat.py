"""Chat templates: what they see, what they may cost, and whose fault an error is."""

import json
from pathlib import Path

import pytest

from kvrouter.core.errors import ConfigError, InvalidRequest
from kvrouter.text.chat import RANGE_STEPS_MAX, ChatTemplate
from kvrouter.text.prompts.fields import ARGUMENT_VALUES_MAX, MESSAGES_MAX, Prompt
from kvrouter.text.source import MOCK_FOLDER

HELLO: list[dict[str, object]] = [{"role": "user", "content": "hello"}]


def mock_template() -> ChatTemplate:
    template = ChatTemplate.from_folder(MOCK_FOLDER)
    assert template is not None
    return template


def test_the_mock_template_is_chatml() -> None:
    messages: list[dict[str, object]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "é<"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    assert mock_template().render(messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\none\ntwo<|im_end|>\n"
        '<|im_start|>assistant\n\n<tool_call>{"name": "f", "arguments": {"x": "é<"}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\n42<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert mock_template().render_prompt(Prompt(HELLO, add_generation_prompt=False)) == (
        "<|im_start|>user\nhello<|im_end|>\n"
    )
    assert (
        mock_template()
        .render_prompt(Prompt(HELLO, [{"type": "function"}]))
        .startswith('<|im_start|>system\n[{"type": "function"}]<|im_end|>\n')
    )


def test_rendering_does_not_change_the_messages() -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    message: dict[str, object] = {"role": "assistant", "tool_calls": [call]}
    mock_template().render([message])
    assert message == {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}


def test_templates_have_the_names_of_hugging_faces_renderer() -> None:
    source = (
        "{{ bos_token }}{{ strftime_now('%Y') }}\n"
        "{% for message in messages %}\n"
        "    {% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{% generation %}{{ message.content }}{% endgeneration %}\n"
        "{% endfor %}\n"
        "{{ ({'b': '<é>', 'a': 1} | tojson(sort_keys=true)) }} {{ enable_thinking }} {{ nothing }}|"
    )
    template = ChatTemplate(source, special_tokens={"bos_token": "<s>"}, strftime_now=lambda pattern: pattern)
    text = template.render_prompt(Prompt(HELLO * 2, names={"enable_thinking": False}))
    assert text == '<s>%Y\nhello{"a": 1, "b": "<é>"} False |'


def test_a_templates_own_exception_refuses_the_messages() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="refuses them: roles must alternate") as refused:
        template.render(HELLO)
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[7].content.x }}",
        "{{ messages + 1 }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ nothing | tojson }}",
    ],
)
def test_template_errors_name_the_messages_field(source: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        ChatTemplate(source).render(HELLO)
    assert refused.value.param == "messages"


def test_nested_loops_share_one_budget_of_steps() -> None:
    side = 400
    assert side**2 > RANGE_STEPS_MAX
    with pytest.raises(ConfigError, match="steps of range"):
        ChatTemplate(
            f"{{% for a in range({side}) %}}{{% for b in range({side}) %}}{{% endfor %}}{{% endfor %}}"
        )
    within = ChatTemplate(f"{{% for a in range({side}) %}}{{{{ a }}}}{{% endfor %}}")
    assert within.render(HELLO) == within.render(HELLO), "a budget is of one rendering"


def test_rendered_text_over_its_longest_length_is_refused() -> None:
    source = "{% for a in messages %}{% for b in messages %}{{ a.content }}{% endfor %}{% endfor %}"
    template = ChatTemplate(source, rendered_chars_max=5_000)
    assert len(template.render(HELLO * 30)) == 4_500
    with pytest.raises(InvalidRequest, match="longer than 5000 characters"):
        template.render(HELLO * 32)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hello", "messages[1]"),
        ({"content": "x"}, "messages[1].role"),
        ({"role": ["user"], "content": "x"}, "messages[1].role"),
        ({"role": "narrator", "content": "x"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": 7}, "messages[1].content"),
        ({"role": "user", "content": ["x"]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        (
            {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]},
            "messages[1].content[1].type",
        ),
        ({"role": "assistant", "tool_calls": "x"}, "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[1].tool_calls[0].function"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]},
            "messages[1].tool_calls[0].function.name",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
            "messages[1].tool_calls[0].function.arguments",
        ),
        (
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "f", "arguments": '{"x": "\\ud800"}'}}],
            },
            "messages[1].tool_calls[0].function.arguments",
        ),
    ],
)
def test_a_malformed_message_is_refused_by_the_path_of_its_field(message: object, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        mock_template().render([*HELLO, message])  # type: ignore[list-item]
    assert refused.value.param == param
    assert refused.value.message.startswith(f"{param}: ")


@pytest.mark.parametrize("count", [0, MESSAGES_MAX + 1])
def test_an_empty_list_or_too_many_messages_are_refused(count: int) -> None:
    with pytest.raises(InvalidRequest) as refused:
        mock_template().render(HELLO * count)
    assert refused.value.param == "messages"


def test_template_kwargs_with_reserved_names_are_refused() -> None:
    with pytest.raises(InvalidRequest) as refused:
        mock_template().render_prompt(Prompt(HELLO, names={"range": 1}))
    assert refused.value.param == "chat_template_kwargs"


def test_a_template_that_does_not_compile_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="does not compile, line 2"):
        ChatTemplate("fine\n{% for %}")


def test_named_templates_and_a_template_file_are_loaded(tmp_path: Path) -> None:
    assert ChatTemplate.from_folder(tmp_path) is None
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.from_folder(tmp_path)
    assert template is not None
    assert template.render(HELLO) == "plain"
    assert template.render_prompt(Prompt(HELLO, [{}])) == "tools"
    (tmp_path / "chat_template.jinja").write_text("file")
    template = ChatTemplate.from_folder(tmp_path)
    assert template is not None
    assert template.render(HELLO) == "file"


def _calling(*arguments: str) -> list[dict[str, object]]:
    calls = [{"function": {"name": "f", "arguments": each}} for each in arguments]
    return [{"role": "user", "content": "hello"}, {"role": "assistant", "tool_calls": calls}]


@pytest.mark.parametrize(
    "arguments",
    [
        ['{"x":[' + ",".join(["[]"] * ARGUMENT_VALUES_MAX) + "]}"],
        ['{"x":[' + ",".join(["0"] * 10_000) + "]}"] * 7,
        ['{"x":' + "[" * 100 + "]" * 100 + "}"],
    ],
    ids=["one call", "all calls together", "deep"],
)
def test_oversized_tool_call_arguments_are_refused_by_path(arguments: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="all together at most 65536 values") as caught:
        mock_template().render(_calling(*arguments))
    at = len(arguments) - 1
    assert caught.value.param == f"messages[1].tool_calls[{at}].function.arguments"
    assert "tool_call" in mock_template().render(_calling('{"x":[1,2]}'))


def test_long_template_errors_are_cut() -> None:
    template = ChatTemplate("{{ raise_exception('not this: ' + messages[0].content) }}")
    with pytest.raises(InvalidRequest, match="not this: xxx") as caught:
        template.render([{"role": "user", "content": "x" * 100_000}])
    assert len(caught.value.message) < 600
