"""Facts of choosing and running: the question, the machine, verdicts, errors.

They import nothing else of core, and no torch.
"""
