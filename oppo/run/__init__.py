"""The application: from settings to models and graph, whole runs, checkpoints and resumption."""
