"""Writes a tiny model with random weights to a folder: engines load it like any other, and ask no hub."""

import inspect
import json
import sys
import textwrap
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 2048
CONTEXT_TOKENS = 4096
BEGIN, END, PAD, TURN, TURN_END = "<|begin|>", "<|end|>", "<|pad|>", "<|turn|>", "<|turn_end|>"

TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}<|turn|>tools\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|turn_end|>\n{% endif %}"
    "{% for message in messages %}<|turn|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|turn_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def corpus() -> list[str]:
    """Text that every Python brings along."""
    return [inspect.getsource(module) for module in (inspect, json, textwrap)]


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer, trained in a second."""
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    bare.train_from_iterator(
        corpus(),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[BEGIN, END, PAD, TURN, TURN_END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    whole = PreTrainedTokenizerFast(
        tokenizer_object=bare,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[TURN, TURN_END],
        model_max_length=CONTEXT_TOKENS,
    )
    whole.chat_template = TEMPLATE
    return whole


def model(tokens: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Weights large enough that its answers are no single token over and over."""
    torch.manual_seed(20)
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        bos_token_id=tokens.bos_token_id,
        eos_token_id=tokens.eos_token_id,
        pad_token_id=tokens.pad_token_id,
        tie_word_embeddings=False,
        initializer_range=0.4,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def write(folder: Path) -> None:
    """Write model and tokenizer."""
    tokens = tokenizer()
    model(tokens).save_pretrained(folder)
    tokens.save_pretrained(folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
