"""SGLang: its wire turned into core's words."""
