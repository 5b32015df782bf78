"""The chaos run: all parts of the system at once, killed at random, then checked to the last bit.

`python -m tests.chaos` starts it.

| file | content |
|---|---|
| worlds | the database behind the service's URL, and the failures that it can cause |
"""
