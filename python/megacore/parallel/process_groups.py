"""Process groups of one rank: created once, frozen, and passed explicitly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _get_default_group, _get_default_store, _world

from megacore.calls.ring import CallRing, GroupCalls
from megacore.errors import ConfigError
from megacore.parallel.host.gloo_messages import GlooMessages
from megacore.parallel.host.shared_memory import (
    DEFAULT_SLOT_BYTES,
    HostCommunicator,
    HostConnector,
    HostPath,
)
from megacore.parallel.replicas import embedding_groups, holder_groups
from megacore.parallel.topology import Topology

# Field of ProcessGroups -> (view of the topology, token). The order is the canonical order of
# creation.
_AXIS_GROUPS = MappingProxyType(
    {
        "tp": ("dense", "tp"),
        "cp": ("dense", "cp"),
        "dp": ("dense", "dp"),
        "dp_cp": ("dense", "dp-cp"),
        "pp": ("dense", "pp"),
        "ep": ("expert", "ep"),
        "etp": ("expert", "etp"),
        "etp_ep": ("expert", "etp-ep"),
        "expert_dp": ("expert", "edp"),
    }
)
# Created last; equal to dp_cp and expert_dp if there is one copy of the model.
_HOLDERS = ("holders", "expert_holders")


@dataclass(frozen=True)
class Group:
    """One process group from the perspective of one member.

    Attributes:
        name: Purpose of the group, such as ``"tp"``; used in messages.
        ranks: Global ranks of the members, increasing.
        position: Index of this rank in ``ranks``.
        handle: The torch process group, or ``None`` for a group of one, which never communicates.
        host: Shared-memory communicator for CPU tensors, or ``None``: then ``handle`` is used.
        host_note: Reason why a gloo group has no ``host``.
        calls: Records the calls of the group.
        messages: Collectives of a gloo group by messages.
        size: Number of members.
    """

    name: str
    ranks: tuple[int, ...]
    position: int
    handle: ProcessGroup | None
    host: HostCommunicator | None = None
    host_note: str = ""
    calls: GroupCalls | None = field(default=None, compare=False, repr=False)
    messages: GlooMessages | None = field(default=None, compare=False, repr=False)
    size: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", len(self.ranks))
        if not 0 <= self.position < len(self.ranks):
            raise ValueError(f"group {self.name}: no position {self.position} in {self.ranks}")
        if self.handle is None and len(self.ranks) > 1:
            raise ValueError(f"group {self.name} has {len(self.ranks)} ranks but no handle")

    @property
    def rank(self) -> int:
        """Global rank of this member."""
        return self.ranks[self.position]

    @property
    def is_fake(self) -> bool:
        """True if the members are this process alone, which stands in for all of them.

        Example:
            >>> Group.solo().is_fake
            False
        """
        return self.handle is not None and dist.get_backend(self.handle) == "fake"

    def describe(self) -> str:
        """Describe the members of the group and the transport of its collectives.

        Example:
            >>> Group.solo(rank=3, name="tp").describe()
            'tp: rank 3 alone'
        """
        if self.handle is None:
            return f"{self.name}: rank {self.rank} alone"
        shown = ", ".join(map(str, self.ranks[:8])) + (", ..." if self.size > 8 else "")
        if self.host is not None:
            mib = self.host.bytes_per_member / (1 << 20)
            way = f"shared memory of this host ({mib:g} MiB per rank)"
        else:
            way = dist.get_backend(self.handle) + (f": {self.host_note}" if self.host_note else "")
        return f"{self.name}: ranks {shown} over {way}"

    @classmethod
    def solo(cls, rank: int = 0, name: str = "solo") -> Group:
        """Return the group of one rank, which needs no torch.distributed.

        Example:
            >>> Group.solo().size
            1
        """
        return cls(name, (rank,), 0, None)


@dataclass(frozen=True, kw_only=True)
class ProcessGroups:
    """All groups that one rank is a member of.

    Attributes:
        topology: The layout of the groups.
        rank: Global rank of this process.
        world: All ranks.
        tp: Tensor parallel group of dense layers.
        cp: Context parallel group.
        dp: Data parallel group: same model slice, same context slice.
        dp_cp: Data and context parallel ranks together.
        pp: Pipeline group, position = stage of the first model chunk.
        ep: Expert parallel group.
        etp: Tensor parallel group of expert layers.
        etp_ep: Ranks that together hold one copy of all experts and exchange tokens.
        expert_dp: Data parallel group of experts.
        holders: All ranks that hold the same dense parameters: ``dp_cp``; with two copies of the
            model in a pipeline, those of both pipeline positions.
        expert_holders: The same for expert parameters: ``expert_dp``, or those of both positions.
        embedding: Ranks of this pipeline that hold the word embedding or a copy of it, mostly the
            first and the last; a group of one on other ranks, and without a pipeline.
        pp_channels: Groups of two neighbours in the pipeline, one per direction, by the positions
            of sender and receiver; none by default.
    """

    topology: Topology
    rank: int
    world: Group
    tp: Group
    cp: Group
    dp: Group
    dp_cp: Group
    pp: Group
    ep: Group
    etp: Group
    etp_ep: Group
    expert_dp: Group
    holders: Group
    expert_holders: Group
    embedding: Group
    pp_channels: Mapping[tuple[int, int], Group] | None = None

    @classmethod
    def create(
        cls,
        topology: Topology,
        *,
        timeout_s: float = 120.0,
        backend: str | None = None,
        host_memory: bool = True,
        host_slot_bytes: int = DEFAULT_SLOT_BYTES,
        pp_channels: bool = False,
        pp_ends: tuple[int, ...] = (0, -1),
        pp_copies: int = 1,
        calls: CallRing | None = None,
    ) -> ProcessGroups:
        """Create the groups of this rank; every rank must call it with the same topology.

        Only groups of this rank are created, in the same canonical order on all ranks. Groups with
        equal rank lists share one torch group; a group of all ranks is the default group; a group
        of one needs no torch group.

        Args:
            topology: The layout. Its ``world_size`` must be the number of running processes.
            timeout_s: Timeout of collectives on the new groups, in seconds.
            backend: ``"gloo"``, ``"nccl"`` or ``None`` for the default group's backend.
            host_memory: Let collectives on CPU tensors use shared memory in every gloo group whose
                ranks all run on one host. Other groups stay on gloo, with the reason in
                ``host_note``.
            host_slot_bytes: Chunk size of transfers. Each rank adds two such slots to the shared
                memory of a group.
            pp_channels: Create ``pp_channels``: on NCCL, the messages of a group share one queue.
            pp_ends: Positions in the pipeline that hold the embedding or a copy of it: those of the
                first and of the last stage, ``(0, 0)`` for a V placement, which starts and ends on
                the same rank; and that of layers for multi-token prediction.
            pp_copies: Copies of the model in each pipeline. With two copies, positions r and p-1-r
                of a pipeline of p ranks hold the same parameters.
            calls: Records the collectives and messages of this rank.

        Raises:
            ConfigError: If torch.distributed is not initialised, the number of processes is not the
                topology's, another rank has another topology, or there are two copies but an odd
                number of pipeline ranks. Checked before any collective.

        Sync:
            Does not wait for the device. NCCL connects a group at its first collective, unless the
            default group was bound to a device (``init_process_group(device_id=...)``): then NCCL
            connects here and all ranks wait for each other.
        """
        if topology.world_size == 1 and not dist.is_initialized():
            return cls(topology=topology, rank=0, pp_channels=None, **_solo_groups())
        _require_matching_world(topology)
        settings = (
            f"{topology}, backend {backend}, host_memory {host_memory} {host_slot_bytes}, "
            f"pp_channels {pp_channels}, pp_ends {pp_ends}, pp_copies {pp_copies}"
        )
        call = _require_same_call_on_all_ranks(settings)
        connector = None
        if host_memory:
            connector = host_connector(
                timeout_s=timeout_s,
                slot_bytes=host_slot_bytes,
                while_waiting=lambda: _raise_disagreement(call),
            )
        maker = _GroupMaker(
            timeout=timedelta(seconds=timeout_s),
            backend=backend,
            connector=connector,
            calls=calls,
        )
        groups = _make_all(maker, topology, pp_ends=pp_ends, pp_copies=pp_copies)
        channels = None
        if pp_channels and topology.pp > 1:
            channels = _make_channels(maker, topology)
        return cls(topology=topology, rank=maker.rank, pp_channels=channels, **groups)

    @classmethod
    def single(cls) -> ProcessGroups:
        """Return the groups of a single process; torch.distributed need not be initialised.

        Example:
            >>> groups = ProcessGroups.single()
            >>> groups.tp.size, groups.world.handle
            (1, None)
        """
        return cls(topology=Topology(world_size=1), rank=0, pp_channels=None, **_solo_groups())

    @property
    def copies(self) -> int:
        """Copies of the model in each pipeline.

        Example:
            >>> ProcessGroups.single().copies
            1
        """
        return self.holders.size // self.dp_cp.size

    def describe(self) -> str:
        """Describe the transport of each group of this rank, one line per group."""
        holders = _HOLDERS if self.copies > 1 else ()
        names = ("world", *_AXIS_GROUPS, *holders, "embedding")
        groups: list[Group] = [getattr(self, name) for name in names]
        return "\n".join(group.describe() for group in groups if group.size > 1)


class _GroupMaker:
    """Creates torch groups for one rank, one per distinct rank list.

    Without a bound device only the members of a group create it (``use_local_synchronization``) and
    rendezvous through the store, so the cost does not grow with the world. Torch names such a group
    after its ranks *and* the number of groups created by the process before. This number must
    therefore be equal on all ranks, or members wait for each other under different names.

    If the default group is bound to a device, torch splits its communicator for every new group,
    and a split is a collective of the whole world: then one split makes all groups of a partition.
    """

    def __init__(
        self,
        *,
        timeout: timedelta,
        backend: str | None,
        connector: HostConnector | None = None,
        calls: CallRing | None = None,
    ) -> None:
        default = _get_default_group()
        self.rank = dist.get_rank()
        self._timeout = timeout
        self._backend = backend
        is_default = backend is None or backend == dist.get_backend()
        self._members_only = default.bound_device_id is None
        self._splits = is_default and not self._members_only and _can_split(default)
        self._connector = connector
        self._ring = calls
        self._calls: dict[tuple[int, ...], GroupCalls] = {}
        self._paths: dict[tuple[int, ...], HostPath] = {}
        self._messages: dict[tuple[int, ...], GlooMessages] = {}
        # Groups of this rank, and rank lists of all groups.
        self._made: dict[tuple[int, ...], ProcessGroup] = {}
        self._known: set[tuple[int, ...]] = set()
        if is_default:
            everyone = tuple(range(dist.get_world_size()))
            self._made[everyone] = default
            self._known.add(everyone)

    def make(self, name: str, partition: Sequence[Sequence[int]]) -> Group:
        """Return this rank's group among disjoint rank lists; a group of one if it is in none."""
        lists = [tuple(ranks) for ranks in partition if len(ranks) > 1]
        new = [ranks for ranks in lists if ranks not in self._known]
        self._known.update(new)
        mine = _list_of(self.rank, lists)
        handle = self._new_groups(name, new)
        if mine in new and handle is not None:
            self._made[mine] = handle
        position = mine.index(self.rank)
        if len(mine) == 1:
            return Group(name, mine, position, None)
        path = self._path(name, mine, position)
        return Group(
            name,
            mine,
            position,
            self._made[mine],
            path.communicator,
            path.note,
            self._calls_of(name, mine),
            self._messages_of(mine, position),
        )

    def make_another(self, name: str, partition: Sequence[Sequence[int]]) -> Group | None:
        """Return a new group for messages only, even if one with the same ranks exists."""
        lists = [tuple(ranks) for ranks in partition]
        mine, handle = _list_of(self.rank, lists), self._new_groups(name, lists)
        if len(mine) == 1:
            return None
        calls = None if self._ring is None else self._ring.group(name, mine)
        return Group(name, mine, mine.index(self.rank), handle, calls=calls)

    def _new_groups(self, name: str, lists: Sequence[tuple[int, ...]]) -> ProcessGroup | None:
        """Create a group for each of disjoint rank lists, and return that of this rank."""
        if not lists:
            return None
        mine = _list_of(self.rank, lists)
        if self._splits:
            handle: ProcessGroup | None = dist.split_group(
                split_ranks=[list(ranks) for ranks in lists],
                timeout=self._timeout,
                group_desc=f"megacore {name}",
            )
            return handle
        if self._members_only:
            # A rank in no list creates a group too: the number of groups is equal on all ranks.
            return self._new_group(name, mine)
        handles = {ranks: self._new_group(name, ranks) for ranks in lists}
        return handles.get(mine)

    def _calls_of(self, name: str, ranks: tuple[int, ...]) -> GroupCalls | None:
        """Return the calls of a group; groups with equal rank lists share their order."""
        if self._ring is None:
            return None
        if ranks not in self._calls:
            self._calls[ranks] = self._ring.group(name, ranks)
        return self._calls[ranks].renamed(name)

    def _messages_of(self, ranks: tuple[int, ...], position: int) -> GlooMessages | None:
        """Return the collectives by messages; groups with equal rank lists share their tags."""
        if backend_for(self._made[ranks], "cpu") != "gloo":
            return None
        if ranks not in self._messages:
            self._messages[ranks] = GlooMessages(self._made[ranks], position, len(ranks))
        return self._messages[ranks]

    def _path(self, name: str, ranks: tuple[int, ...], position: int) -> HostPath:
        """Return the shared-memory path; groups with equal rank lists share one."""
        if backend_for(self._made[ranks], "cpu") != "gloo":
            return HostPath()
        if self._connector is None:
            return HostPath(note="host_memory is off")
        if ranks not in self._paths:
            self._paths[ranks] = self._connector.connect(name, ranks, position)
        return self._paths[ranks]

    def _new_group(self, name: str, ranks: tuple[int, ...]) -> ProcessGroup:
        handle: ProcessGroup = dist.new_group(
            list(ranks),
            timeout=self._timeout,
            backend=self._backend,
            use_local_synchronization=self._members_only,
            group_desc=f"megacore {name}",
        )
        return handle


def _list_of(rank: int, lists: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the rank list that has a rank, or the list of that rank alone."""
    return next((ranks for ranks in lists if rank in ranks), (rank,))


def _can_split(group: ProcessGroup) -> bool:
    """Return whether torch splits the communicator of a group into several at once."""
    if not torch.accelerator.is_available():
        return False
    backend = group._get_backend(torch.accelerator.current_accelerator())  # type: ignore[arg-type]
    return bool(backend.supports_splitting)


def _make_channels(maker: _GroupMaker, topology: Topology) -> dict[tuple[int, int], Group]:
    """Create a group per pair of neighbours in a pipeline and direction, this rank's returned.

    The pairs of a round are disjoint; an odd number of ranks needs three rounds.
    """
    size, pipelines = topology.pp, topology.dense.get_ranks("pp")
    pairs = [(i, (i + 1) % size) for i in range(size if size > 2 else 1)]
    rounds = [pairs[0 : size // 2 * 2 : 2], pairs[1 : size // 2 * 2 : 2], pairs[size // 2 * 2 :]]
    mine = next(ranks for ranks in pipelines if maker.rank in ranks).index(maker.rank)
    channels = {}
    for disjoint in filter(None, rounds):
        partition = [sorted((line[a], line[b])) for line in pipelines for a, b in disjoint]
        pair = next((pair for pair in disjoint if mine in pair), None)
        for low_to_high in (True, False):
            group = maker.make_another(f"pp {'up' if low_to_high else 'down'}", partition)
            if group is not None and pair is not None:
                channels[pair if low_to_high else (pair[1], pair[0])] = group
    return channels


def _make_all(
    maker: _GroupMaker, topology: Topology, *, pp_ends: tuple[int, ...], pp_copies: int
) -> dict[str, Group]:
    """Return the groups of a layout by field of `ProcessGroups`, created in canonical order."""
    groups = {"world": maker.make("world", [list(range(topology.world_size))])}
    for name, (view, token) in _AXIS_GROUPS.items():
        generator = topology.expert if view == "expert" else topology.dense
        groups[name] = maker.make(name, generator.get_ranks(token))
    for name in _HOLDERS:
        expert = name == "expert_holders"
        groups[name] = maker.make(name, holder_groups(topology, expert=expert, copies=pp_copies))
    ends = embedding_groups(topology, pp_ends, copies=pp_copies)
    groups["embedding"] = maker.make("embedding", ends)
    return groups


def host_connector(
    *,
    timeout_s: float,
    slot_bytes: int = DEFAULT_SLOT_BYTES,
    while_waiting: Callable[[], None] = lambda: None,
) -> HostConnector | None:
    """Return a connector of new groups through shared memory, or ``None`` without a store.

    All ranks must call this function equally often.
    """
    if dist.get_backend() == "fake":  # has no store
        return None
    store = _get_default_store()
    use = store.add(f"megacore/host_memory/uses/{dist.get_rank()}", 1)
    return HostConnector(
        store,
        prefix=f"megacore/host_memory/{use}",
        timeout_s=timeout_s,
        slot_bytes=slot_bytes,
        while_waiting=while_waiting,
    )


def backend_for(handle: ProcessGroup, device_type: str) -> str:
    """Return the backend of a torch group for ``"cpu"`` or ``"cuda"`` tensors; empty if none."""
    for entry in dist.get_backend_config(handle).split(","):
        device, _, name = entry.rpartition(":")
        if not device or device == device_type:
            return name
    return ""


def _solo_groups() -> dict[str, Group]:
    names = ("world", *_AXIS_GROUPS, *_HOLDERS, "embedding")
    return {name: Group.solo(name=name) for name in names}


def _require_matching_world(topology: Topology) -> None:
    wanted = topology.world_size
    if not dist.is_initialized():
        raise ConfigError(
            f"a layout of {wanted} processes needs torch.distributed, which is not initialised; "
            f"start the ranks with `megacore train --nproc {wanted}` or torchrun, or call "
            "torch.distributed.init_process_group first"
        )
    running = dist.get_world_size()
    if running == wanted:
        return
    product = " x ".join(f"{axis} {size}" for axis, size in topology.dense.sizes.items())
    try:
        fitting = Topology(
            world_size=running,
            tp=topology.tp,
            cp=topology.cp,
            pp=topology.pp,
            ep=topology.ep,
            etp=topology.etp,
            order=topology.order,
        )
        alternative = f"or make the topology with world_size={running}, which gives dp {fitting.dp}"
    except ConfigError as error:
        alternative = f"or change the layout ({error})"
    raise ConfigError(
        f"the layout {product} = {wanted} is for {wanted} processes, but {running} are running; "
        f"start {wanted} processes (--nproc {wanted}), {alternative}"
    )


def _require_same_call_on_all_ranks(settings: str) -> int:
    """Compare this call with that of the first rank, through the store only.

    Returns the index of the call, from 1, equal on all ranks.
    """
    if dist.get_backend() == "fake":  # a fake world has one process and no store
        return 1
    store = _get_default_store()
    call = store.add(f"megacore/process_groups/calls/{dist.get_rank()}", 1)
    mine = f"{settings}, after {len(_world.pg_names)} other groups"
    first = store.compare_set(f"megacore/process_groups/call_{call}", "", mine).decode()
    if first != mine:
        message = (
            f"rank {dist.get_rank()} makes its process groups from {mine}, but another rank from "
            f"{first}; give every rank the same settings and make the groups in the same order"
        )
        store.set(_disagreement_key(call), message)
        raise ConfigError(message)
    return call


def _raise_disagreement(call: int) -> None:
    """Raise the error of a disagreement that another rank has published."""
    store, key = _get_default_store(), _disagreement_key(call)
    if store.check([key]):
        raise ConfigError(store.get(key).decode())


def _disagreement_key(call: int) -> str:
    return f"megacore/process_groups/disagreement_{call}"
