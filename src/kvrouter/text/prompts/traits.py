"""Detects the traits of a chat template that engines detect: how it reads contents, and its roles."""

from collections.abc import Callable, Iterator

from jinja2 import nodes

from kvrouter.text.prompts.fields import Message, Prompt, TemplateTraits

Render = Callable[[Prompt], str | None]
"""Renders a prompt; returns None if the template refuses it."""

_INLINE = "a system message that is not the first"
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_MEDIA_WORDS = ("image", "audio", "video", "vision")


def traits_of(source: str, tree: nodes.Template, render: Render) -> TemplateTraits:
    """Return the traits of a template, from its source, its syntax tree and renderings of short chats."""
    inline = render(Prompt([_says("system"), _says("user"), _says("system", _INLINE), _says("user")]))
    loops_over_content, takes_parts = _reads_parts(source, tree)
    return TemplateTraits(
        loops_over_content=loops_over_content,
        takes_parts=takes_parts,
        names_developer='"developer"' in source or "'developer'" in source,
        keeps_inline_system=inline is not None and _INLINE in inline,
        raises_on_inline_system=inline is None,
        thinks_without_effort=_thinks_without_effort(render),
    )


def _says(role: str, content: str = "t") -> Message:
    return {"role": role, "content": content}


def _thinks_without_effort(render: Render) -> bool:
    def rendered(effort: str) -> str | None:
        names = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        return render(Prompt([_says("user", "Hi")], names=names))

    unthinking = rendered("none")
    return unthinking is None or any(rendered(effort) == unthinking for effort in _EFFORTS)


def _reads_parts(source: str, tree: nodes.Template) -> tuple[bool, bool]:
    """Return whether a template loops over contents, by vLLM's rule and by SGLang's."""
    loops = [*tree.find_all(nodes.For)]
    reads_content = any(
        _reads(loop.iter, name, "content") for loop in loops for name in ("message", "msg", "m")
    )
    names_media = any(word in source for word in _MEDIA_WORDS)
    try:
        messages = {*_message_names(tree)}
    except _Unreadable:
        return False, names_media or reads_content
    of_macros = _loops_in_macros(tree, messages)
    for loop in loops:
        of_message = any(_reads(loop.iter, name, "content") for name in messages)
        parameters = of_macros.get(id(loop))
        iterated = loop.iter.name if isinstance(loop.iter, nodes.Name) else None
        of_parameter = parameters is not None and iterated in parameters
        of_variable = parameters is None and iterated == "content"
        if of_message or of_parameter or of_variable:
            return isinstance(loop.target, nodes.Name), names_media or reads_content
    return False, names_media or reads_content


class _Unreadable(Exception):
    """A loop over messages has several targets: vLLM then treats contents as text."""


def _message_names(tree: nodes.Template) -> Iterator[str]:
    """Yield the names of single messages in loops over messages."""
    lists = ["messages"]
    for name in lists:  # grows during the loop: aliases of the list
        for assigned in tree.find_all(nodes.Assign):
            if not _reads(assigned.node, name):
                continue
            if not isinstance(assigned.target, nodes.Name):
                raise _Unreadable
            if assigned.target.name not in lists:
                lists.append(assigned.target.name)
    for loop in tree.find_all(nodes.For):
        if any(_reads(loop.iter, name) for name in lists):
            if not isinstance(loop.target, nodes.Name):
                raise _Unreadable
            yield loop.target.name


def _loops_in_macros(tree: nodes.Template, messages: set[str]) -> dict[int, set[str]]:
    """Return, by loop id, the macro parameters that are called with a message's content."""
    calls = [call for call in tree.find_all(nodes.Call) if isinstance(call.node, nodes.Name)]
    found: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        names = [argument.name for argument in macro.args]
        content_parameters: set[str] = set()
        for call in calls:
            if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
                content_parameters |= {
                    name
                    for name, value in zip(names, call.args, strict=False)
                    if _is_content(value, messages)
                }
                content_parameters |= {
                    keyword.key
                    for keyword in call.kwargs
                    if keyword.key in names and _is_content(keyword.value, messages)
                }
        for loop in macro.find_all(nodes.For):
            found[id(loop)] = found.get(id(loop), set()) | content_parameters
    return found


def _is_content(node: nodes.Node, messages: set[str]) -> bool:
    return any(_reads(node, name, "content") for name in messages)


def _reads(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether an expression is a variable or a field of it, under any filters, tests and slices."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key is not None:
        is_item = (
            isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == key
        )
        is_attribute = isinstance(node, nodes.Getattr) and node.attr == key
        if not isinstance(node, nodes.Getitem | nodes.Getattr) or not (is_item or is_attribute):
            return False
        node = node.node
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
