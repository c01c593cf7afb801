"""The same numbers with less work: exact attention cheaper than transformers' own."""
