"""The chaos run: everything at once, killed at random, and judged to the last bit. `python -m tests.chaos`.

| file | is |
|---|---|
| worlds | what stands behind the service's database URL, and the troubles that it can make |
| plans | which batches there are to be: sizes, pieces, failures, ends; drawn by the seed |
| broker | the queue between producers and consumers, which repeats, reorders, and loses for a while |
| record | what actors write down before each request and after each answer |
| producers, consumers, readers | the actors' work, by the SDK, the command line and Spark; `actors` runs one |
| keeper | processes that are run again when they have died: the service, dispatchers, actors |
| trouble | who is killed, and when |
| holding | whose rows are held locked while their batch grows |
| evidence | the record, the database, the feed and the receiver's book, read once all is over |
| checks | holds them against each other |
| report | what was done and what was checked, for people |
"""
