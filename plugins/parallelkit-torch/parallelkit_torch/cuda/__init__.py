"""Weights from one GPU's memory into another's, or the same one's, between processes of a host.

`probe` says whether it can be done, `ipc` shares the memory, `table` says what goes where, and
`copier` does it, in one kernel where Triton is there.
"""
