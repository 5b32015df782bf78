"""The chaos run: all parts of the system at once, killed at random, then checked to the last bit.

`python -m tests.chaos` starts it.

| file | is |
|---|---|
| worlds | what stands behind the service's database URL, and the troubles that it can make |
| plans | the batches that the run will open: sizes, pieces, failures, ends; drawn by the seed |
| broker | the queue between producers and consumers, which repeats, reorders, and loses for a while |
| record | what actors write down before each request and after each answer |
| producers, consumers, readers | the actors' work, by the SDK, the command line and Spark; `actors` runs one |
| keeper | restarts processes that have died: the service, dispatchers, actors |
| trouble | decides what is killed, and when |
| holding | holds a group's row locked while its batch grows |
| evidence | the record, the database, the feed and the received webhooks, read after the run |
| checks | compares them with each other |
| report | what was done and what was checked, for people |
"""
