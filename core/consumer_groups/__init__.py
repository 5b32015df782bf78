"""Consumer groups: who owns which partition, and how far each partition was read.

`groups` has the records, the positions and the fence that guards a write, `leases` the one call by which workers join,
keep and give back partitions, `shares` how many partitions each worker gets.

A new rule of ownership goes into `leases`. A write that only an owner may make calls `groups.fence`.
"""
