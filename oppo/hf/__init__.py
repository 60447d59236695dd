"""The transformers backend: a slab cache, the policy that decodes with it and the scorers that prefill it."""
