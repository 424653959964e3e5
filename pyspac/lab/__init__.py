"""The policy lab: routing traces replayed through caching, prefetching and routing policies on a model of a
machine.

    trace -> workload (steps) -> simulator [routing, cache, miss policy, link, prefetch] -> books -> report

What is replayed:

- trace.py        recorded routing; trace_file.py, trace_csv.py read and write it
- probe.py, recorder.py, trace_builder.py    record it while a model runs
- workload.py     tokens of a trace, grouped into the steps of decoding with drafts of length K
- demand.py       what a layer asks for; future.py: when it will, only for bounds

What decides:

- policy.py       the four kinds of policy; registry.py finds them by name
- events.py       what a policy is told; view.py: what it may ask
- eviction/, prefetch/, miss/, routing/    the policies, one file each; combos.py names combinations
- predict/        guesses of what a layer will want, between activations and decisions
- shipping.py     the shipping scheduler (`pyspac.scheduler`) itself, on a board that the lab fills

What runs it:

- setup.py        what a run was asked for; assembly.py makes its policies
- state.py        where a run stands: cache.py, the device's slots; link.py, the copies' queue
- machine.py      speeds of a machine, so that every time in the lab is predicted and none measured
- simulator.py    runs the steps, layer.py the layers; books.py counts, and checks that the counts balance
- sweep.py, report.py, figures.py    many runs, tables and pictures
"""
