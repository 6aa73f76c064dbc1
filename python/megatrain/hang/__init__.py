"""Search for the cause of a run that does not respond."""
