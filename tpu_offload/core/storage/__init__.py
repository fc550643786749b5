"""Storage tiers as the scheduler sees them: what is written, read, looked up and deleted."""
