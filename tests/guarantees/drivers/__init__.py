"""What scenarios drive the service with: load, rounds of a race, sessions that hold rows locked, releases beside each
other, journaled batches.
"""
