"""A laboratory for policies that write sequences of tokens, as language models do.

A small policy is trained in float32 by policy gradient, while a copy of it in few bits writes the
sequences. What does that cost, and which correction repairs it? Many policies are trained as one
batch. What was measured is in benchmarks/pages/acting_policies.md.

    task.py         the task: each right token follows from the prompt and an earlier token
    policies.py     a recurrent network and a network with attention
    rounding.py     how the copy that acts is rounded
    corrections.py  importance weights, masks and clips
    laboratory.py   pretraining, training, evaluation, and the horizon
"""
