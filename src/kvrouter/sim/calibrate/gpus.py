"""Known GPUs by the names that engines print: memory, bandwidth and peak, from their vendors' documents."""

import re
from typing import NamedTuple

LINK_GB_S = 16.0
"""GB/s between GPUs without a known link: half the rate of sixteen lanes of PCIe 4.0."""


class Gpu(NamedTuple):
    """One GPU: the GiB of memory that programs see, GB/s of its bandwidth, dense 16-bit TFLOP/s with 32-bit
    sums.

    ``link_gb_s`` is the rate to its neighbours, one way. ``fp8`` and ``fp4``: whether it multiplies in these
    types faster than in 16 bits. ``source`` names the vendor's document.
    """

    name: str
    memory_gib: float
    bandwidth_gb_s: float
    tflops: float
    source: str
    link_gb_s: float = LINK_GB_S
    fp8: bool = False
    fp4: bool = False


_HOPPER = "NVIDIA H100 datasheet"
_AMPERE = "NVIDIA A100 datasheet"
_ADA = "NVIDIA Ada GPU architecture whitepaper"
_BLACKWELL = "NVIDIA RTX Blackwell GPU architecture whitepaper"
_MI300 = "AMD Instinct MI300X data sheet"

_KNOWN = (
    ("b300|gb300", Gpu("B300", 268, 8_000, 2_250, "NVIDIA DGX B300 datasheet", 900, fp8=True, fp4=True)),
    ("gb200", Gpu("GB200", 184, 8_000, 2_500, "NVIDIA GB200 NVL72 page", 900, fp8=True, fp4=True)),
    ("b200", Gpu("B200", 178, 8_000, 2_250, "NVIDIA DGX B200 datasheet", 900, fp8=True, fp4=True)),
    ("gh200.*144", Gpu("GH200 144GB", 140, 4_900, 989, "NVIDIA GH200 datasheet", 450, fp8=True)),
    ("gh200", Gpu("GH200", 94.5, 4_000, 989, "NVIDIA GH200 datasheet", 450, fp8=True)),
    ("h200nvl", Gpu("H200 NVL", 139.8, 4_800, 835, "NVIDIA H200 datasheet", 450, fp8=True)),
    ("h200", Gpu("H200", 139.8, 4_800, 989, "NVIDIA H200 datasheet", 450, fp8=True)),
    ("h100nvl", Gpu("H100 NVL", 93, 3_900, 835, _HOPPER, 300, fp8=True)),
    ("h100.*pcie", Gpu("H100 PCIe", 79.1, 2_000, 756, _HOPPER, 32, fp8=True)),
    ("h100", Gpu("H100 SXM", 79.1, 3_350, 989, _HOPPER, 450, fp8=True)),
    ("h800", Gpu("H800", 79.1, 3_350, 989, "NVIDIA H800 datasheet", 200, fp8=True)),
    ("h20(?!0)", Gpu("H20", 95, 4_000, 148, "NVIDIA H20 datasheet", 450, fp8=True)),
    ("a100.*pcie.*40|a100.*40.*pcie", Gpu("A100 PCIe 40GB", 39.4, 1_555, 312, _AMPERE, 32)),
    ("a100.*pcie", Gpu("A100 PCIe 80GB", 79.1, 1_935, 312, _AMPERE, 32)),
    ("a100.*40", Gpu("A100 SXM 40GB", 39.4, 1_555, 312, _AMPERE, 300)),
    ("a100", Gpu("A100 SXM 80GB", 79.1, 2_039, 312, _AMPERE, 300)),
    ("a800", Gpu("A800", 79.1, 2_039, 312, "NVIDIA A800 datasheet", 200)),
    ("a40(?!0)", Gpu("A40", 44.4, 696, 150, "NVIDIA A40 datasheet")),
    ("a30(?!0)", Gpu("A30", 23.5, 933, 165, "NVIDIA A30 datasheet")),
    ("a10g", Gpu("A10G", 22, 600, 70, "NVIDIA A10G datasheet")),
    ("a10(?!0)", Gpu("A10", 22, 600, 125, "NVIDIA A10 datasheet")),
    ("l40s", Gpu("L40S", 44.4, 864, 362, "NVIDIA L40S datasheet", fp8=True)),
    ("l40", Gpu("L40", 44.4, 864, 181, "NVIDIA L40 datasheet", fp8=True)),
    ("l20", Gpu("L20", 44.4, 864, 119, "NVIDIA L20 datasheet", fp8=True)),
    ("l4", Gpu("L4", 22, 300, 121, "NVIDIA L4 datasheet", fp8=True)),
    ("v100.*32", Gpu("V100 32GB", 31.7, 900, 125, "NVIDIA V100 datasheet", 150)),
    ("v100", Gpu("V100 16GB", 15.8, 900, 125, "NVIDIA V100 datasheet", 150)),
    ("t4", Gpu("T4", 14.6, 320, 65, "NVIDIA T4 datasheet")),
    (
        "rtxpro6000.*server",
        Gpu(
            "RTX PRO 6000 Server", 95, 1_597, 504, "NVIDIA RTX PRO 6000 Server datasheet", fp8=True, fp4=True
        ),
    ),
    (
        "rtxpro6000.*maxq",
        Gpu("RTX PRO 6000 Max-Q", 95, 1_792, 439, _BLACKWELL, fp8=True, fp4=True),
    ),
    ("rtxpro6000", Gpu("RTX PRO 6000", 95, 1_792, 504, _BLACKWELL, fp8=True, fp4=True)),
    ("(rtx)?5090", Gpu("RTX 5090", 31.4, 1_792, 210, _BLACKWELL, fp8=True, fp4=True)),
    ("(rtx)?4090", Gpu("RTX 4090", 23.5, 1_008, 165, _ADA, fp8=True)),
    ("(rtx)?3090", Gpu("RTX 3090", 23.6, 936, 71, "NVIDIA Ampere GA102 GPU architecture whitepaper")),
    ("rtx6000ada", Gpu("RTX 6000 Ada", 47.4, 960, 364, "NVIDIA RTX 6000 Ada datasheet", fp8=True)),
    ("(rtx)?a6000", Gpu("RTX A6000", 47.4, 768, 155, "NVIDIA RTX A6000 datasheet")),
    ("mi355", Gpu("MI355X", 288, 8_000, 2_516, "AMD Instinct MI355X data sheet", 538, fp8=True, fp4=True)),
    ("mi350", Gpu("MI350X", 288, 8_000, 2_307, "AMD Instinct MI350X data sheet", 538, fp8=True, fp4=True)),
    ("mi325", Gpu("MI325X", 256, 6_000, 1_307, "AMD Instinct MI325X data sheet", 448, fp8=True)),
    ("mi300", Gpu("MI300X", 192, 5_300, 1_307, _MI300, 448, fp8=True)),
    ("mi250", Gpu("MI250", 128, 3_277, 362, "AMD Instinct MI250 data sheet", 50)),
    ("mi210", Gpu("MI210", 64, 1_638, 181, "AMD Instinct MI210 data sheet", 50)),
    ("tpuv5p", Gpu("TPU v5p", 95, 2_765, 459, "Google Cloud TPU v5p page", 100)),
    ("tpuv5e|tpuv5lite", Gpu("TPU v5e", 16, 819, 197, "Google Cloud TPU v5e page", 50)),
    ("tpuv6e", Gpu("TPU v6e", 32, 1_640, 918, "Google Cloud TPU v6e page", 112)),
)
"""By the beginning of the name in small letters and digits alone; the first match counts."""

KNOWN_GPUS = tuple(gpu for _, gpu in _KNOWN)

_MAKERS = re.compile(r"nvidia|amd|google|geforce|instinct|tesla|quadro")


def known_gpu(name: str, memory_gib: float | None = None) -> Gpu | None:
    """Return the GPU that an engine or ``nvidia-smi`` calls ``name``; None for an unknown one.

    ``memory_gib``, if given, distinguishes GPUs of one name that were built in several sizes.
    """
    letters = re.sub(r"[^a-z0-9]", "", _MAKERS.sub("", name.lower()))
    found = [gpu for pattern, gpu in _KNOWN if re.match(pattern, letters)]
    if not found:
        return None
    first = found[0]
    if first.name == "A100 SXM 80GB" and memory_gib is not None and memory_gib < 60.0:
        return next(gpu for gpu in KNOWN_GPUS if gpu.name == "A100 SXM 40GB")
    return first
