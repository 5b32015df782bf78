"""Programs that tests start as separate processes: parts of the service that die at a chosen point, or that run with a
mutant.
"""
