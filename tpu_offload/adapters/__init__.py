"""Adapters for other inference engines, one folder for each: translation of calls and nothing else."""
