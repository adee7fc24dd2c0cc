"""Which page of device memory belongs to whom: page pool, prefix tree, ledger.

Pure host bookkeeping over page *ids*; no tensor is ever seen here.
"""
