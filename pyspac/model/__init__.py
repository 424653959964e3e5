"""What a model's file says before it is loaded: the GGUF header, and the shape of its experts."""
