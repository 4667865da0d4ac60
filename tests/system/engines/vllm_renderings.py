"""Runs in vLLM's own environment: renders calls with its request models and its template code.

Reads ``{"template": …, "shapes": [[name, route, body], …]}``; writes the prompt of each by its name, or an
``{"error": …}`` where vLLM refuses it. No weights are loaded.
"""

import asyncio
import json
import sys
from types import SimpleNamespace
from typing import Any

from transformers import AutoTokenizer
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import construct_input_messages, construct_tool_dicts
from vllm.renderers.chat_utils import parse_chat_messages
from vllm.renderers.hf import _detect_content_format, safe_apply_chat_template
from vllm.renderers.params import merge_kwargs


class Renderer:
    """What vLLM's own renderer does with a call, up to the text."""

    def __init__(self, tokenizer: Any, template: str) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._config = SimpleNamespace(
            multimodal_config=None, enable_prompt_embeds=False, allowed_local_media_path=""
        )
        self._merges = AnthropicServingMessages._detect_merge_inline_system(template)

    def text(self, route: str, body: dict[str, Any]) -> str:
        """The prompt of a call."""
        if route == "/v1/responses":
            request: Any = ResponsesRequest.model_validate(body)
            tools = construct_tool_dicts(request.tools, request.tool_choice)
            messages = construct_input_messages(
                request_instructions=request.instructions, request_input=request.input
            )
            return self._rendered(messages, tools, request)
        if route == "/v1/messages":
            asked = AnthropicMessagesRequest.model_validate({"max_tokens": 1, "model": "m", **body})
            effort = "none"
            if asked.thinking is not None and asked.thinking.type == "disabled":
                effort = self._effort()
            request = AnthropicServingMessages.to_chat_completion_request(
                asked, merge_inline_system=self._merges, disabled_thinking_effort=effort
            )
        else:
            request = ChatCompletionRequest.model_validate(body)
        dumped = None if request.tools is None else [tool.model_dump() for tool in request.tools]
        return self._rendered(request.messages, dumped, request)

    def _effort(self) -> str:
        def said(effort: str) -> str | None:
            try:
                asked = {"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": effort}
                return self.text("/v1/chat/completions", asked)
            except Exception:  # noqa: BLE001 - a template may refuse by any error
                return None

        none = said("none")
        return (
            "low"
            if none is None or any(said(e) == none for e in ("low", "medium", "high", "xhigh", "max"))
            else "none"
        )

    def _rendered(self, messages: Any, tools: Any, request: Any) -> str:
        params = request.build_chat_params(self._template, "auto").with_defaults(
            merge_kwargs({}, {"tools": tools, "tokenize": False})
        )
        content_format = _detect_content_format(self._template, default="string")
        conversation, _, _ = parse_chat_messages(messages, self._config, content_format)
        kwargs = params.get_apply_chat_template_kwargs()
        return str(safe_apply_chat_template(self._config, self._tokenizer, conversation, **kwargs))


async def main() -> None:
    """Render what standard input asks for, with the tokenizer of the folder in the first argument."""
    asked = json.load(sys.stdin)
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    renderer = Renderer(tokenizer, asked["template"])
    found: dict[str, Any] = {}
    for name, route, body in asked["shapes"]:
        try:
            found[name] = renderer.text(route, body)
        except Exception as error:  # noqa: BLE001 - the caller is told which one
            found[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
    json.dump(found, sys.stdout, ensure_ascii=False)


if __name__ == "__main__":
    asyncio.run(main())
