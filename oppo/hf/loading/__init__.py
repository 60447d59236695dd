"""Loading models and tokenizers from directories and hubs, with checks before first use."""
