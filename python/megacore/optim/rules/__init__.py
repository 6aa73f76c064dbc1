"""Optimizers, one file each; see :class:`megacore.optim.UpdateRule`."""
