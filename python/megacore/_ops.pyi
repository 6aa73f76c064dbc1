"""Operations on CPU tensors: importing the module registers them in torch, imported before.

Their names are those of :mod:`megacore.ops` with an underscore before them, in
``torch.ops.megacore``.
"""
