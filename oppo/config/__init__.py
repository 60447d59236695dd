"""The settings of a run: sections, rules between them, user extensions, and reading a file."""
