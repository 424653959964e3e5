"""Speculation that never hurts: how many tokens to draft in the next step, none included.

    step record  -> cost table T(n)      \\
                 -> acceptance / utility -> controller -> draft length of the next step
                 -> loss ledger          /

- controller       what a controller sees and says
- manager          `Speculation`: one controller per sequence, and what they share
- cost_table       what steps take by width, learned online, kept across requests
- utility          Cascade's utility, and equation 1 of gamma-tolerance
- acceptance       expected tokens per step for any draft length
- matches          the same of drafts copied from the text
- `pyspac.ledger`  what speculation may still lose against plain decoding
- forecast         the default: both curves, and the best of their quotient with its doubt
- choice           which of judged lengths is taken, as the ledger allows
- match_forecast   `forecast` for the n-gram drafter: a length for each length of match
- cascade          the paper's test-and-set
- static           a fixed length, and none
- tolerance        what `pyspac profile` found, and what follows from it; sweep: at several places
- explain          decisions as text

What comes of it reaches a server through `pyspac.server.board_speculation`.
"""
