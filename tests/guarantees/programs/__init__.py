"""Programs that tests start as processes of their own: parts of the service that die at a chosen point, or run with a
mutant in place.
"""
