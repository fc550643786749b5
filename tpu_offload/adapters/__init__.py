"""The library in other people's engines, one folder an engine: translation of calls, and nothing else."""
