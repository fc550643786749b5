"""The copies between the host tier of one process and its storage tiers."""
