"""Loading models and tokenizers from directories and hubs, checked before anybody relies on them."""
