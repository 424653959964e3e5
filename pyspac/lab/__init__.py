"""The policy lab: routing traces replayed through caching, prefetching and routing policies on a model of a
machine.

    trace -> workload (steps) -> simulator [routing, cache, miss policy, link, prefetch] -> books -> report

- trace.py        recorded routing as a file; recorder.py writes one while a model runs
- workload.py     tokens of a trace, grouped into the steps of decoding with drafts of length K
- policy.py       the four kinds of policy, and the registry of their names; demand.py: what a layer asks for
- state.py        what policies may see of a run; setup.py: what the run was asked for
- eviction/, prefetch/, miss/, routing/    the policies, one file each; combos.py names combinations
- cache.py        device slots with the engine's residency, pins and eviction; link.py the copies' queue
- machine.py      speeds of a machine, so that every time in the lab is predicted and none measured
- simulator.py    runs one workload through one set of policies
- books.py        counts, and a check that they balance
- sweep.py, report.py, figures.py    many runs, tables and pictures

The utility policies run the shipping scheduler (`pyspac.scheduler`) itself, on a board that the lab fills.
"""
