"""Benchmarks: one file a question, each runnable alone (`python -m bench.scale`), all together by `make bench`.

Figures are ratios between two things measured in the same run on the same machine, in interleaved rounds, as medians;
absolute numbers beside them say what the ratio is of. Each checks the final bits, not only the time.
"""
