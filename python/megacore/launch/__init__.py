"""Starting ranks, watching them, and saying why a run ended."""
