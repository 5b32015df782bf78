"""Benchmarks: one file a question, each can run alone (`python -m bench.scale`), or all together by `make bench`.

Figures are ratios between two things measured in the same run on the same machine, in interleaved rounds, as medians,
with absolute numbers next to them. Each benchmark checks the final bits, not only the time. `results/` has what came
out.
"""
