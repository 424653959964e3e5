"""What another llama.cpp tree would break: patches, names that are not public, sources.

    scratch copy of TREE -> patches, one after another -> names of the table -> compiler -> report

The table of names is in patches/README.md.
"""
