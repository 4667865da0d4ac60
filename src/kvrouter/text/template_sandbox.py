"""A sandbox for chat templates, bounded in time and memory.

Jinja2's sandbox blocks access to Python's internals, but not ``"a" * 10**9``. This one charges a budget
before each operation of a template: operators, comparisons, literals, slices, calls, filters, tests, loop
steps and output. Operations not known to be bounded are refused by name. Compilation computes nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from types import BuiltinMethodType, MethodType
from typing import ClassVar, TypeAlias, cast

from jinja2 import Undefined, nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner

from kvrouter.text.template_budget import (
    ITEM_BYTES,
    NUMBER_BITS_MAX,
    STEP_BYTES,
    Budget,
    TemplateOverBounds,
    check_braces,
    check_percent,
    counted,
    current,
)
from kvrouter.text.template_filters import (
    FILTERS,
    PLAIN_FILTERS,
    PLAIN_TESTS,
    bounded_filter,
    charge_replace,
    charge_result,
    joints,
)

SHORT_CHARS = 4096
"""The longest text that is compared without a charge."""

STR_METHODS = frozenset(
    {
        "capitalize",
        "casefold",
        "center",
        "count",
        "endswith",
        "find",
        "format",
        "index",
        "isalnum",
        "isalpha",
        "isascii",
        "isdecimal",
        "isdigit",
        "islower",
        "isnumeric",
        "isspace",
        "istitle",
        "isupper",
        "join",
        "ljust",
        "lower",
        "lstrip",
        "partition",
        "removeprefix",
        "removesuffix",
        "replace",
        "rfind",
        "rindex",
        "rjust",
        "rpartition",
        "rsplit",
        "rstrip",
        "split",
        "splitlines",
        "startswith",
        "strip",
        "swapcase",
        "title",
        "upper",
        "zfill",
    }
)
METHODS: dict[type, frozenset[str]] = {
    str: STR_METHODS,
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
}
PLAIN_STR_METHODS = STR_METHODS - {
    "center",
    "format",
    "join",
    "ljust",
    "replace",
    "rjust",
    "rsplit",
    "split",
    "splitlines",
    "zfill",
}
"""Methods whose time and result are bounded by the length of the text."""

HELPER_METHODS = frozenset({"changed", "cycle", "next", "reset"})
HELPERS = (Macro, LoopContext, BlockReference, Joiner, Undefined)
Filter: TypeAlias = Callable[..., object]

_COMPARES: dict[str, Callable[[object, object], object]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "gt": lambda a, b: a > b,  # type: ignore[operator]
    "gteq": lambda a, b: a >= b,  # type: ignore[operator]
    "lt": lambda a, b: a < b,  # type: ignore[operator]
    "lteq": lambda a, b: a <= b,  # type: ignore[operator]
    "in": lambda a, b: a in b,  # type: ignore[operator]
    "notin": lambda a, b: a not in b,  # type: ignore[operator]
}


class BoundedGenerator(CodeGenerator):
    """Compiles operations that jinja2 would compile to plain Python to calls of the environment."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - jinja2's name
        """``a ~ b``."""
        self.write("environment.concatenated((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:  # noqa: N802
        """``a + b``, and chains of it."""
        parts: list[nodes.Expr] = [node.right]
        left = node.left
        while isinstance(left, nodes.Add):
            parts.append(left.right)
            left = left.left
        self.write("environment.added(context, (")
        for part in (left, *reversed(parts)):
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802
        """``a == b``, ``a in b`` and chains of them."""
        self.write("environment.compared(")
        self.visit(node.expr, frame)
        for operand in node.ops:
            self.write(f", {operand.op!r}, ")
            self.visit(operand.expr, frame)
        self.write(")")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802
        """``[a, b]``."""
        self.write("environment.made(")
        super().visit_List(node, frame)
        self.write(")")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        """``(a, b)``, unless it is the target of an assignment."""
        if node.ctx != "load":
            super().visit_Tuple(node, frame)
            return
        self.write("environment.made(")
        super().visit_Tuple(node, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        """``{a: b}``, whose keys are hashed."""
        self.write("environment.mapped((")
        for pair in node.items:
            self.write("(")
            self.visit(pair.key, frame)
            self.write(", ")
            self.visit(pair.value, frame)
            self.write("), ")
        self.write("))")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        """``a[b]``, and slices, which jinja2 would compile to Python."""
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.sliced(")
        self.visit(node.node, frame)
        for bound in (node.arg.start, node.arg.stop, node.arg.step):
            self.write(", ")
            if bound is None:
                self.write("None")
            else:
                self.visit(bound, frame)
        self.write(")")

    def _output_const_repr(self, group: "Sequence[object]") -> str:  # type: ignore[override]
        return f"environment.data({super()._output_const_repr(group)})"


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Compiles templates whose operations charge the budget of :data:`current`."""

    code_generator_class = BoundedGenerator
    intercepted_binops: ClassVar[frozenset[str]] = frozenset({"+", "-", "*", "/", "//", "%", "**"})  # type: ignore[misc]

    def __init__(self, *, extensions: Sequence[type[Extension]]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=extensions,
            optimized=False,
            finalize=_written,
        )
        self.allowed: set[int] = set()
        del self.globals["lipsum"]
        self.allow(*(self.globals[name] for name in ("dict", "namespace", "cycler", "joiner")))

    def allow(self, *functions: object) -> None:
        """Allow templates to call ``functions``, which must live as long as this environment."""
        self.allowed.update(map(id, functions))

    def bound_filters(self) -> None:
        """Wrap the registered filters and tests, and remove the unbounded ones."""
        self.filters = {
            name: function if name in PLAIN_FILTERS else bounded_filter(name, function)
            for name, function in self.filters.items()
            if name in FILTERS
        }
        self.tests = {
            name: test if name in PLAIN_TESTS else bounded_filter(name, cast("Filter", test))
            for name, test in self.tests.items()
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for node in template.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            at = {"lineno": node.lineno, "environment": self}
            step = nodes.ExprStmt(nodes.EnvironmentAttribute("step", **at), **at)
            node.body.insert(0, step)  # type: ignore[attr-defined]
            if isinstance(node, nodes.For) and node.test is not None:
                node.test = nodes.And(nodes.EnvironmentAttribute("step", **at), node.test, **at)
        return template

    # Called by compiled templates.

    @property
    def step(self) -> bool:
        """Charge for one step of a loop, or one call of a macro."""
        current.budget.charge(STEP_BYTES)
        return True

    def data(self, text: str) -> str:
        """Charge for literal text of the template, and return it."""
        current.budget.charge(str.__sizeof__(text))
        return text

    def made(self, value: Sequence[object]) -> Sequence[object]:
        """Charge for a new list or tuple, and return it."""
        current.budget.charge(ITEM_BYTES * (2 + len(value)))
        return value

    def mapped(self, pairs: Sequence[tuple[object, object]]) -> dict[object, object]:
        """Charge for a new dict, and return it."""
        budget = current.budget
        for key, _ in pairs:
            budget.charge_for(key)
            budget.charge(4 * ITEM_BYTES)
        return dict(pairs)

    def concatenated(self, parts: Sequence[object]) -> str:
        """Return the result of ``~``."""
        budget = current.budget
        for part in parts:
            budget.charge_for(part)
        text = "".join(map(str, parts))
        budget.charge(str.__sizeof__(text))
        return text

    def added(self, context: Context, parts: Sequence[object]) -> object:
        """Return the result of ``+`` and of chains of it, in which texts are usual."""
        n_bytes = 0
        for part in parts:
            if type(part) is not str:
                break
            n_bytes += part.__sizeof__()
        else:
            current.budget.charge(n_bytes)
            return "".join(cast("Sequence[str]", parts))
        total, *rest = parts
        for part in rest:
            total = self.call_binop(context, "+", total, part)
        return total

    def compared(self, left: object, *rest: object) -> object:
        """Return the result of comparisons, chained as in Python."""
        if len(rest) == 2 and type(left) is str:
            operator, right = rest
            if operator == "eq":
                return left == right if _is_short(right) else self._compared(left, "eq", right)
            if operator == "ne":
                return left != right if _is_short(right) else self._compared(left, "ne", right)
        return self._compared(left, *rest)

    def _compared(self, left: object, *rest: object) -> object:
        result: object = True
        for operator, right in zip(rest[::2], rest[1::2], strict=True):
            budget = current.budget
            budget.charge_for(left)
            budget.charge_for(right)
            if isinstance(right, Iterator):
                right = counted(right)  # noqa: PLW2901 - ``in`` iterates over it
            result = _COMPARES[cast("str", operator)](left, right)
            if not result:
                return result
            left = right
        return result

    def sliced(self, value: object, start: object, stop: object, step: object) -> object:
        """Return ``value[start:stop:step]``."""
        if isinstance(value, str):
            current.budget.charge(str.__sizeof__(value))
        elif isinstance(value, list | tuple | range):
            current.budget.charge(ITEM_BYTES * len(value))
        return value[start:stop:step]  # type: ignore[index]

    def getitem(self, obj: object, argument: object) -> object:
        """Return ``obj[argument]``."""
        if type(argument) is not str and type(argument) is not int:
            current.budget.charge_for(argument)
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        """Return the result of an arithmetic operator on numbers, texts or lists."""
        budget = current.budget
        if isinstance(left, int) and isinstance(right, int):
            _check_number(operator, left, right)
        elif operator == "*" and (isinstance(left, int) or isinstance(right, int)):
            times, value = (left, right) if isinstance(left, int) else (right, left)
            budget.charge(max(0, cast("int", times)) * _flat_bytes(value))
        elif operator == "%" and isinstance(left, str):
            check_percent(left)
            budget.charge(str.__sizeof__(left))
            budget.charge_for(right)
        elif operator == "+":
            budget.charge(_flat_bytes(left) + _flat_bytes(right))
        return super().call_binop(context, operator, left, right)

    def call(
        __self,  # noqa: N805 - as in jinja2, all keyword names stay free
        __context: Context,
        __obj: object,
        *args: object,
        **kwargs: object,
    ) -> object:
        """Call a macro, a method or an allowed function, charging for arguments and result."""
        budget = current.budget
        if type(__obj) is BuiltinMethodType and not kwargs and type(__obj.__self__) is str:
            is_plain = __obj.__name__ in PLAIN_STR_METHODS and all(type(arg) is str for arg in args)
            if is_plain:
                budget.charge(STEP_BYTES + __obj.__self__.__sizeof__())
                return __obj(*args)
        budget.charge(STEP_BYTES)
        for argument in (*args, *kwargs.values()):
            budget.charge_for(argument)
        args = tuple(_walkable(argument) for argument in args)
        if not (isinstance(__obj, HELPERS) or id(__obj) in __self.allowed or isinstance(__obj, Limited)):
            _charge_method(budget, __obj, args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        if not isinstance(__obj, HELPERS):
            charge_result(budget, result)
        elif isinstance(result, str):
            budget.charge(str.__sizeof__(result))
        return result


class Limited:
    """Base of the router's callables that enforce a limit themselves."""


@pass_context
def _written(_: Context, value: object) -> object:
    """Charge for the output of ``{{ }}``."""
    if type(value) is str:
        current.budget.charge(str.__sizeof__(value))
    else:
        current.budget.charge_for(value)
    return value


def _is_short(value: object) -> bool:
    return type(value) is str and len(value) <= SHORT_CHARS


def _walkable(value: object) -> object:
    return counted(value) if isinstance(value, Iterator) else value


def _flat_bytes(value: object) -> int:
    """Return the bytes of a shallow copy of ``value``."""
    if isinstance(value, str):
        return str.__sizeof__(value)
    if isinstance(value, list | tuple):
        return ITEM_BYTES * (1 + len(value))
    return ITEM_BYTES


def _check_number(operator: str, left: int, right: int) -> None:
    bits = max(left.bit_length(), right.bit_length())
    if operator == "*":
        bits = left.bit_length() + right.bit_length()
    elif operator == "**":
        bits = left.bit_length() * min(abs(right), NUMBER_BITS_MAX + 1)
    if bits > NUMBER_BITS_MAX:
        raise TemplateOverBounds(f"it computes with numbers of more than {NUMBER_BITS_MAX} bits")


def _charge_method(
    budget: Budget, function: object, args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    """Charge for a method before it runs. Raises TemplateOverBounds for an unbounded one."""
    method = getattr(function, "__wrapped__", function)  # jinja2 wraps str.format
    owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    if isinstance(method, MethodType):
        if isinstance(owner, LoopContext | Cycler | Joiner) and name in HELPER_METHODS:
            return
    elif isinstance(method, BuiltinMethodType) and name in METHODS.get(type(owner), ()):
        if isinstance(owner, str):
            _charge_str_method(budget, owner, name, args, kwargs)
        elif name in {"copy", "count", "index"}:
            budget.charge_for(owner)
        return
    called = name if owner is None else f"{type(owner).__name__}.{name}"
    raise TemplateOverBounds(f"it calls {called or type(function).__name__}, which is not bounded")


def _charge_str_method(
    budget: Budget, text: str, name: str, args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    budget.charge(str.__sizeof__(text))
    if name in {"center", "ljust", "rjust", "zfill"}:
        budget.charge(4 * max((arg for arg in args if isinstance(arg, int)), default=0))
    elif name in {"split", "rsplit", "splitlines"}:
        separator = args[0] if args and isinstance(args[0], str) else kwargs.get("sep")
        pieces = text.count(separator) if isinstance(separator, str) and separator else len(text) // 2
        budget.charge(2 * ITEM_BYTES * (1 + pieces))
    elif name == "replace":
        charge_replace(budget, text, args)
    elif name == "join":
        budget.charge(joints(args[0] if args else ()) * str.__sizeof__(text))
    elif name == "format":
        check_braces(text)
