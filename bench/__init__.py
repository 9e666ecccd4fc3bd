"""The benchmark: speed and memory beside the kernel's floor and the peers, interleaved in one run.

`python -m bench` (or `make bench`) writes RESULTS.md and results.json beside this file. Guards against figures
that compare a quiet minute with a busy one: what is compared is measured in turns, and the ratio is what counts.
"""
