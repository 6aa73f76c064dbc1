"""Links between the ranks of a group."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.plan.device import Device


@dataclass(frozen=True)
class Link:
    """Ring of a group: bandwidth and latency of each step of one exchange.

    Attributes:
        size: Ranks of the group.
        inside: Ranks of the group in one domain of fast links.
    """

    size: int
    inside: int
    bandwidth: float
    latency: float

    def ring(self, num_bytes: float, count: float = 1) -> float:
        """Return the time of ``count`` all-gathers or reduce-scatters of so many bytes in all."""
        if self.size == 1 or num_bytes == 0:
            return 0.0
        return num_bytes * (self.size - 1) / self.size / self.bandwidth + count * self.latency

    @property
    def nodes(self) -> int:
        """Number of domains that the group spans."""
        return self.size // self.inside


def link(device: Device, size: int, stride: int) -> Link:
    """Describe the links of a group of ``size`` ranks at a distance of ``stride``."""
    inside = min(size, max(1, device.link_domain // stride))
    while size % inside:
        inside -= 1
    nvlink = device.link_nvlink * device.link_nvlink_efficiency
    latency = device.link_nvlink_us * 1e-6
    if inside == size:
        return Link(size, inside, nvlink, latency)
    nic = inside * device.link_nic * device.link_nic_efficiency
    hops = (size - 1) * device.link_nic_us * 1e-6
    return Link(size, inside, min(nvlink, nic), latency + hops)
