"""Kernels: the only package that imports fbgemm or calls its operators.

``backend`` chooses between fbgemm and plain torch; ``tbe`` builds table-batched embedding
operators; ``jagged`` moves jagged data; ``reference`` holds the same arithmetic in the fewest lines
of torch.
"""
