"""`llama-server` with the scheduler beside it, and the means to watch both.

    options -> arguments -> supervisor -> llama-server (with the engine) <- board -> attach (the scheduler)
                                                                               |
                                                              snapshot -> exporter, live view

The supervisor owns two children and no decision: if one dies it says so, and starts the scheduler again.
"""
