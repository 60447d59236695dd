"""The application: settings to models and graph, a run from its first step to its last, checkpoints and resumption."""
