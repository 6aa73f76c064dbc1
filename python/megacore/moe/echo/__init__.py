"""ECHO: clones of hot experts in spare slots, planned from each microbatch's counts.

Planning (``plan``) does not need torch; tensor code is imported from its own modules.
"""
