"""How a model's weights are stored and multiplied, from flags, from the model's configuration or its name."""

import re
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

SCALES = 1.0625
"""Bytes of weights of 4 bits with scales, one for 16 to 128 weights, over those of the weights alone."""

Bits = Annotated[int, Meta(ge=1, le=32)]


class WeightFormat(NamedTuple):
    """``bits`` of one weight; ``type`` is the type of its products: 16bit, int8, fp8 or fp4.

    ``experts_only``: all other weights are stored in 16 bits. ``is_guess``: the number of bits is not stated.
    """

    name: str
    bits: float
    type: str = "16bit"
    experts_only: bool = False
    is_guess: bool = False

    @property
    def bytes(self) -> float:
        """Bytes of one weight."""
        return self.bits / 8.0


class QuantizedValues(msgspec.Struct, frozen=True):
    """``weights`` or ``input_activations`` of a group."""

    num_bits: Bits = 16
    type: str = "int"


class QuantizedGroup(msgspec.Struct, frozen=True):
    """One of ``config_groups`` of compressed-tensors."""

    weights: QuantizedValues | None = None
    input_activations: QuantizedValues | None = None


class QuantizationConfig(msgspec.Struct, frozen=True):
    """``quantization_config`` of a model's ``config.json``, as far as it determines the size of weights."""

    quant_method: str = ""
    quant_algo: str = ""
    bits: Bits | None = None
    load_in_8bit: bool = False
    config_groups: dict[str, QuantizedGroup] = {}


def format_of_method(method: str, bits: int | None = None) -> WeightFormat:
    """Return the format that vLLM's ``--quantization`` or ``quant_method`` names."""
    how = method.lower()
    if "mxfp4" in how:
        return WeightFormat(method, 4 * SCALES, experts_only=True)
    if "fp4" in how:
        return WeightFormat(method, 4 * SCALES, "fp4")
    if "w4a16" in how or "awq" in how or "gptq" in how or "int4" in how or "4bit" in how:
        size = 8 if "int8" in how or "8bit" in how else 4
        return WeightFormat(method, SCALES * (bits or size))
    if "w8a16" in how:
        return WeightFormat(method, 8)
    if "fp8" in how or how in ("modelopt", "mxfp8"):
        return WeightFormat(method, 8, "fp8")
    if "int8" in how or "w8a8" in how:
        return WeightFormat(method, 8, "int8")
    if "bitsandbytes" in how or "bnb" in how:
        return WeightFormat(method, SCALES * (bits or 4))
    return WeightFormat(method, float(bits or 16), is_guess=bits is None)


def format_of_config(config: QuantizationConfig) -> WeightFormat:
    """Return the format in a model's own configuration."""
    method = config.quant_algo or config.quant_method
    groups = [group for group in config.config_groups.values() if group.weights is not None]
    if groups and groups[0].weights is not None:
        weights, inputs = groups[0].weights, groups[0].input_activations
        bits = weights.num_bits * (SCALES if weights.num_bits < 8 else 1.0)
        computed = "16bit"
        if inputs is not None and inputs.num_bits <= 8:
            computed = f"{'fp' if inputs.type == 'float' else 'int'}{inputs.num_bits}"
        return WeightFormat(method or "compressed-tensors", bits, computed)
    if config.load_in_8bit:
        return WeightFormat(method, 8)
    return format_of_method(method, config.bits)


_IN_NAME = re.compile(
    r"(?<![a-z0-9])(nvfp4|mxfp4|fp4|fp8|gptq-int8|gptq|awq|w4a16|w8a16|w8a8|int4|int8|bnb-4bit|4bit)(?![a-z0-9])"
)


def format_in_name(model: str) -> WeightFormat | None:
    """Return the format in a model's name, such as ``Qwen3-32B-AWQ``; None without one."""
    found = _IN_NAME.search(model.lower().replace("_", "-"))
    return format_of_method(found[1]) if found else None
