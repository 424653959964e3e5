"""A server under load while faults come at random: no answer lost, no text different.

stage -> references -> run: clients ask, faults come, a report says what was seen
"""
