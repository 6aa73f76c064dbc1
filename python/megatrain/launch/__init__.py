"""Process launch, health monitoring and exit reporting of ranks."""
