"""The settings of a run: sections, rules between them, parts of your own, and reading a file."""
