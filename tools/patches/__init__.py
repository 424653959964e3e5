"""The patch queue on llama.cpp: `python -m tools.patches --help`. Standard library and git only."""
