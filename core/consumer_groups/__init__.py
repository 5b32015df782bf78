"""Consumer groups: the owner of each partition, and its position in the source.

`groups` has the records of the groups, `positions` the progress of each partition and the fence that guards a write.
`leases` has the one call by which workers join, keep and release partitions. `shares` computes the number of partitions
for each worker. `details` shows one group to operators.

A new rule of ownership goes into `leases`. A write that only an owner may make calls `positions.fence`.
"""
