"""Draft lengths: simulated streams, and controllers to compare with those that a user may choose.

- simulator    streams with known costs and acceptances
- per_k_ema    an average for each draft length
- controllers  these, and the paper's controller without a part, by name
"""
