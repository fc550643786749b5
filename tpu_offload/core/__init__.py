"""Everything that decides and nothing that moves a byte. Never imports jax."""
