"""Miss policies: what happens to experts that are asked for and not there."""
