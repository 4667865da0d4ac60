"""Text of models: tokenizer, chat template, prompts, incremental detokenizer, stop strings."""
