"""Writes a LoRA adapter with random weights for the tiny model to a folder."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, LAYERS, RANK = 64, 2, 8


def write(folder: Path) -> None:
    """Write the adapter: it changes what attention asks for, enough that answers differ."""
    torch.manual_seed(7)
    weights = {}
    for layer in range(LAYERS):
        at = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{at}.lora_A.weight"] = torch.randn(RANK, HIDDEN, dtype=torch.bfloat16)
        weights[f"{at}.lora_B.weight"] = torch.randn(HIDDEN, RANK, dtype=torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["q_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps({**config, "task_type": "CAUSAL_LM"}))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
