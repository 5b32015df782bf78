"""Models to compare the service's answers and rows with. A new noun gets its model here, and its scenarios in a `test_`
file of the folder above.
"""
