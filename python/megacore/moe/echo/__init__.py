"""ECHO: clones of hot experts in spare slots, planned from each microbatch's counts.

Planning (``plan``) does without torch; what computes on tensors is imported from its module.
"""
