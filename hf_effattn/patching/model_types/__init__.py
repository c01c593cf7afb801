"""Which models are served, and how their self-attention is found."""
