"""Runs in SGLang's own environment: renders calls with its request models and its template code.

Reads ``{"template": …, "shapes": [[name, route, body], …]}``; writes the prompt of each by its name, or an
``{"error": …}`` where SGLang refuses it. No weights are loaded.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import sglang_launch  # type: ignore[import-not-found]  # noqa: F401 - stands in for what CPUs lack
from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, ResponsesRequest
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses
from sglang.srt.parser.jinja_template_utils import detect_jinja_template_content_format
from sglang.srt.parser.template_detection import detect_inline_system_support
from transformers import AutoTokenizer


class Renderer(OpenAIServingChat):  # type: ignore[misc]  # SGLang is not installed here
    """What SGLang's own server of chats does with a call, up to the text."""

    def __init__(self, tokenizer: Any, template: str) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self.template_manager = SimpleNamespace(
            jinja_template_content_format=detect_jinja_template_content_format(template),
            jinja_template_may_reorder_tool_results=False,
            reasoning_config=None,
            python_chat_template=None,
        )
        self.tokenizer_manager = SimpleNamespace(tokenizer=tokenizer, served_model_name="m")
        self._encoding_adapter = None
        self.chat_encoding_spec = None
        self.is_minimax_m3 = False
        self.reasoning_parser = None
        self.tool_call_parser = None
        self._prompt_text_round_trip_is_lossy = False
        self._tokenizer_auto_adds_specials = False
        self.supports_inline_system = detect_inline_system_support(template)
        self._text = ""

    def _thinking_requested(self, request: ChatCompletionRequest) -> bool:
        return False

    def _encode_messages(self, *_: Any, **__: Any) -> None:
        return None

    def _append_assistant_prefix_to_prompt_ids(self, prompt_ids: list[int], prefix: str) -> list[int]:
        self._text += prefix
        return prompt_ids

    def _render_and_encode_chat_template(
        self, messages: Any, *, tools: Any, template_kwargs: Any, add_generation_prompt: bool, **_: Any
    ) -> Any:
        self._text = self._tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            chat_template=self._template,
            **template_kwargs,
        )
        return [], None

    def text(self, route: str, body: dict[str, Any]) -> str:
        """The prompt of a call."""
        if route == "/v1/responses":
            request = self._of_responses(ResponsesRequest.model_validate({"model": "m", **body}))
        elif route == "/v1/messages":
            asked = AnthropicMessagesRequest.model_validate({"max_tokens": 1, "model": "m", **body})
            request = AnthropicServing(self)._convert_to_chat_completion_request(asked)
        else:
            request = ChatCompletionRequest.model_validate(body)
        tools = None
        if request.tools and request.tool_choice != "none":
            tools = [tool.model_dump() for tool in request.tools]
        self._apply_jinja_template(request, tools, False)
        return self._text

    def _of_responses(self, asked: ResponsesRequest) -> ChatCompletionRequest:
        serving = OpenAIServingResponses.__new__(OpenAIServingResponses)
        serving.tool_call_parser = None
        serving.supports_inline_system = self.supports_inline_system
        tools = serving._response_tools_to_chat_tools(asked)
        return ChatCompletionRequest(
            model="m",
            messages=serving._construct_input_messages(asked),
            tools=tools or None,
            tool_choice=asked.tool_choice if tools else "none",
            reasoning_effort=asked.reasoning.effort if asked.reasoning else None,
        )


def main() -> None:
    """Render what standard input asks for, with the tokenizer of the folder in the first argument."""
    asked = json.load(sys.stdin)
    renderer = Renderer(AutoTokenizer.from_pretrained(sys.argv[1]), asked["template"])
    found: dict[str, Any] = {}
    for name, route, body in asked["shapes"]:
        try:
            found[name] = renderer.text(route, body)
        except Exception as error:  # noqa: BLE001 - the caller is told which one
            found[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
    json.dump(found, sys.stdout, ensure_ascii=False)


if __name__ == "__main__":
    main()
