"""Mixture of experts: which hot experts to clone, and which tokens go to the clones."""

from megacore.moe.offload_plan import OffloadPlan, plan_offload

__all__ = ["OffloadPlan", "plan_offload"]
