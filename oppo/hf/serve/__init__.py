"""Serving models: the policy that decodes, and the scorers that read while it does."""
