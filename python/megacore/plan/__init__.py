"""A run before it starts: layout, schedule, memory, all as functions of the configuration."""
