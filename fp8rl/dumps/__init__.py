"""Is the gap between two programs' log-probabilities of the same tokens rounding or a bug?

    mismatch.py   the report: a verdict, its symptoms and the numbers that stacks log
    dump.py       a file, or arrays of a trainer, become a `Gap`: learner minus actor, by token
    symptoms.py   the table of signs of bugs
    rules.py      the table of what RL stacks do about the gap

Nothing here needs more of the package. `python -m fp8rl.doctor mismatch` is the command, and
README.md beside this file shows how to use it.
"""
