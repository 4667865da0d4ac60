"""GPUs by the names that engines print."""

import re
from pathlib import Path

import pytest

from kvrouter.sim.calibrate.gpus import KNOWN_GPUS, known_gpu

DOCS = Path(__file__).parents[3] / "docs" / "mock-engine.md"


@pytest.mark.parametrize(
    ("printed", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA A100-SXM4-40GB", "A100 SXM 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 PCIe 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A40", "A40"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Server"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX PRO 6000 Max-Q"),
        ("RTXPRO6000", "RTX PRO 6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA B200", "B200"),
        ("AMD Instinct MI300X OAM", "MI300X"),
        ("TPU-v6e-1", "TPU v6e"),
        ("Tesla V100-SXM2-32GB", "V100 32GB"),
    ],
)
def test_gpu_names_printed_by_engines_are_recognized(printed: str, name: str) -> None:
    gpu = known_gpu(printed)
    assert gpu is not None
    assert gpu.name == name


def test_memory_size_selects_between_gpu_variants_and_other_names_are_unknown() -> None:
    small, large = known_gpu("A100", 40), known_gpu("A100", 80)
    assert small is not None
    assert large is not None
    assert (small.name, large.name) == ("A100 SXM 40GB", "A100 SXM 80GB")
    assert known_gpu("NVIDIA GB10") is None
    assert known_gpu("NVIDIA Graphics Device") is None


def test_documented_gpu_table_equals_the_known_gpus() -> None:
    rows = re.findall(
        r"^\| (\S.*?) \| ([\d.,]+) \| ([\d.,]+) \| ([\d.,]+) \| (.*?) \|$", DOCS.read_text(), re.M
    )
    listed = {
        name: (*(float(value.replace(",", "")) for value in values), source) for name, *values, source in rows
    }
    assert listed == {
        gpu.name: (gpu.memory_gib, gpu.bandwidth_gb_s, gpu.tflops, gpu.source) for gpu in KNOWN_GPUS
    }
