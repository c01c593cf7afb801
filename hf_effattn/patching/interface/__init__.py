"""What transformers calls: an attention function and a mask function under the name of every method."""
