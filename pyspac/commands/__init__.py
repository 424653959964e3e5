"""The commands of `pyspac`, one file each; `pyspac.cli` puts them together."""
