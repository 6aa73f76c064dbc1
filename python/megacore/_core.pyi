# Hand-written; tests/unit/test_stubs.py compares it with the built module.

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

__version__: str

# ---- parallel ------------------------------------------------------------------------------------

class RankGenerator:
    def __init__(
        self, *, sizes: Sequence[tuple[str, int]], order: str, rank_offset: int
    ) -> None: ...
    @property
    def world_size(self) -> int: ...
    @property
    def rank_offset(self) -> int: ...
    @property
    def layout(self) -> list[tuple[str, int]]: ...
    def stride(self, axis: str) -> int: ...
    def group_size(self, token: str) -> int: ...
    def groups(self, token: str) -> npt.NDArray[np.int32]: ...
    def group_of(self, rank: int, token: str) -> list[int]: ...
    def coordinates(self, rank: int) -> list[int]: ...
    def rank(self, coordinates: Sequence[int]) -> int: ...

class Topology:
    def __init__(
        self,
        *,
        world_size: int,
        tp: int,
        cp: int,
        pp: int,
        ep: int,
        etp: int | None,
        order: str,
    ) -> None: ...
    @property
    def dp(self) -> int: ...
    @property
    def etp(self) -> int: ...
    @property
    def expert_dp(self) -> int: ...
    @property
    def dense(self) -> RankGenerator: ...
    @property
    def expert(self) -> RankGenerator: ...

class HostDtype(IntEnum):
    FLOAT32 = 0
    FLOAT64 = 1
    BFLOAT16 = 2
    FLOAT16 = 3
    INT64 = 4
    INT32 = 5
    INT16 = 6
    INT8 = 7
    UINT8 = 8
    BOOL = 9

class HostReduction(IntEnum):
    SUM = 0
    MAX = 1
    AVG = 2

def reduce_parts(
    *,
    parts: Sequence[int],
    numel: int,
    dtype: HostDtype,
    op: HostReduction,
    output: int,
    output_dtype: HostDtype,
) -> None: ...

class HostComm:
    def __init__(
        self,
        *,
        segment: tuple[int, int] | None,
        position: int,
        ranks: Sequence[int],
        slot_bytes: int,
        timeout_s: float,
    ) -> None: ...
    @staticmethod
    def segment_bytes(num_members: int, slot_bytes: int) -> int: ...
    @staticmethod
    def can_reduce(dtype: HostDtype, output_dtype: HostDtype) -> bool: ...
    @property
    def position(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def slot_bytes(self) -> int: ...
    @property
    def timeout_s(self) -> float: ...
    @property
    def file(self) -> int: ...
    def close_file(self) -> None: ...
    def barrier(self) -> None: ...
    def all_reduce(self, *, data: int, numel: int, dtype: HostDtype, op: HostReduction) -> None: ...
    def reduce_scatter(
        self,
        *,
        output: int,
        output_dtype: HostDtype,
        input: int,
        dtype: HostDtype,
        numel: int,
        op: HostReduction,
    ) -> None: ...
    def all_gather(self, *, output: int, input: int, numel: int, dtype: HostDtype) -> None: ...
    def broadcast(self, *, data: int, numel: int, dtype: HostDtype, source: int) -> None: ...
    def make_window(self, *, bytes: int, num_parts: int) -> HostWindow | None: ...

class HostWindow:
    @property
    def data(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    def offer(self, part: int) -> None: ...
    def is_offered(self, part: int) -> bool: ...
    def wait_until_offered(self, part: int) -> None: ...
    def take(self, part: int) -> None: ...
    def wait_until_taken(self, part: int) -> None: ...
    def data_of(self, position: int) -> int: ...
    def wait_for_offer_of(
        self, position: int, *, part: int, round: int, limit_s: float
    ) -> bool: ...
    def take_from(self, position: int, *, part: int, round: int) -> None: ...
    def wait_for_take_by(self, position: int, *, part: int, limit_s: float) -> bool: ...
    def reduce_scatter(
        self, *, part: int, offset: int, numel: int, dtype: HostDtype, op: HostReduction
    ) -> None: ...
    def all_gather(self, *, part: int, offset: int, numel: int, dtype: HostDtype) -> None: ...

PEER_SLOTS: int
PEER_WINDOW_PARTS: int

class PeerFault(IntEnum):
    NONE = 0
    STILL_READS = 1
    NO_COUNTS = 2
    NO_ROWS = 3
    OTHER_CAPACITY = 4

def peer_failure(word: int) -> tuple[PeerFault, int, int]: ...
def peer_flags_bytes(num_members: int) -> int: ...

class PeerLayout:
    def __init__(
        self, *, num_members: int, max_experts: int, max_capacity: int, max_row_bytes: int
    ) -> None: ...
    @property
    def num_members(self) -> int: ...
    @property
    def max_experts(self) -> int: ...
    @property
    def max_capacity(self) -> int: ...
    @property
    def max_row_bytes(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    def rows_offset(self, slot: int) -> int: ...

class PeerShape:
    def __init__(
        self,
        *,
        num_members: int,
        position: int,
        num_experts: int,
        num_parts: int,
        part: int,
        capacity: int,
    ) -> None: ...

class PeerExchange:
    def __init__(self, window: HostWindow, layout: PeerLayout) -> None: ...
    def plan_copies(
        self,
        *,
        shape: PeerShape,
        experts: int,
        members: int,
        num_tokens: int,
        num_choices: int,
        repeats: int,
        row_map: int,
        kept: int,
        m_splits: int,
        totals: int,
    ) -> None: ...
    def start_push(
        self,
        *,
        slot: int,
        tokens: int,
        probs: int,
        width: int,
        dtype: HostDtype,
        row_map: int,
        num_tokens: int,
        num_choices: int,
        repeats: int,
        capacity: int,
    ) -> None: ...
    def finish_push(
        self,
        *,
        slot: int,
        rows: int,
        probs: int,
        width: int,
        dtype: HostDtype,
        num_arrived: int,
        capacity: int,
    ) -> None: ...
    def reserve_pull(self, *, slot: int) -> int: ...
    def start_pull(
        self, *, slot: int, rows: int, probs: int, width: int, dtype: HostDtype, num_rows: int
    ) -> None: ...
    def finish_pull(
        self,
        *,
        slot: int,
        tokens: int,
        probs: int,
        width: int,
        dtype: HostDtype,
        row_map: int,
        num_tokens: int,
        num_choices: int,
        repeats: int,
        capacity: int,
    ) -> None: ...

# ---- pipeline ------------------------------------------------------------------------------------
class ActionKind(IntEnum):
    FORWARD = 0
    BACKWARD = 1
    BACKWARD_INPUT = 2
    BACKWARD_WEIGHT = 3
    SEND_FORWARD = 4
    RECV_FORWARD = 5
    SEND_BACKWARD = 6
    RECV_BACKWARD = 7
    RECOMPUTE = 8

class Action:
    def __init__(self, stage: int, kind: ActionKind, microbatch: int) -> None: ...
    @staticmethod
    def parse(text: str) -> Action: ...
    @property
    def stage(self) -> int: ...
    @property
    def kind(self) -> ActionKind: ...
    @property
    def microbatch(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

class Timeline:
    @property
    def makespan(self) -> float: ...
    @property
    def bubble_fraction(self) -> float: ...
    @property
    def busy(self) -> list[float]: ...
    @property
    def peak_in_flight(self) -> list[int]: ...
    @property
    def exposed(self) -> list[float]: ...
    @property
    def spans(self) -> list[tuple[float, float]]: ...

class Schedule:
    @staticmethod
    def from_text(text: str) -> Schedule: ...
    @staticmethod
    def from_csv(text: str, *, name: str) -> Schedule: ...
    @property
    def name(self) -> str: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def num_stages(self) -> int: ...
    @property
    def num_chunks(self) -> int: ...
    @property
    def num_chains(self) -> int: ...
    @property
    def num_microbatches(self) -> int: ...
    @property
    def is_forward_only(self) -> bool: ...
    def stages(self, rank: int) -> list[int]: ...
    def actions(self, rank: int) -> list[Action]: ...
    def overlaps(self, rank: int) -> list[int]: ...
    def order(self, rank: int) -> list[int]: ...
    def forward_only(self) -> Schedule: ...
    def digest(self) -> int: ...
    def validate(self) -> None: ...
    def validate_memory(self, limits: Sequence[int]) -> None: ...
    def simulate(
        self,
        *,
        forward: Sequence[float],
        backward_input: Sequence[float],
        backward_weight: Sequence[float],
        send: float,
        overlap: float,
        backward: Sequence[float] = (),
    ) -> Timeline: ...
    def critical_path(self, timeline: Timeline) -> list[int]: ...
    def to_text(self) -> str: ...
    def to_csv(self) -> str: ...
    def __eq__(self, other: object, /) -> bool: ...
    __hash__: None  # type: ignore[assignment]

class Program:
    @property
    def rank(self) -> int: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def num_stages(self) -> int: ...
    @property
    def num_microbatches(self) -> int: ...
    @property
    def is_forward_only(self) -> bool: ...
    @property
    def is_in_order(self) -> bool: ...
    @property
    def num_chains(self) -> int: ...
    @property
    def stages(self) -> list[int]: ...
    @property
    def actions(self) -> list[Action]: ...
    @property
    def peers(self) -> list[int]: ...
    @property
    def acknowledged(self) -> list[int]: ...
    @property
    def overlaps(self) -> list[int]: ...
    @property
    def dropped(self) -> list[int]: ...
    def forward_only(self) -> Program: ...
    def to_text(self) -> str: ...
    def __len__(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    __hash__: None  # type: ignore[assignment]

class StateMachine:
    def __init__(self, program: Program) -> None: ...
    @property
    def position(self) -> int: ...
    @property
    def is_running(self) -> bool: ...
    def next(self) -> Action | None: ...
    def start(self, action: Action) -> None: ...
    def complete(self, action: Action) -> None: ...
    def reset(self) -> None: ...

class ScheduleInfo:
    @property
    def name(self) -> str: ...
    @property
    def summary(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def constraints(self) -> str: ...
    @property
    def placement(self) -> str: ...
    @property
    def num_chunks(self) -> int: ...
    @property
    def splits_backward(self) -> bool: ...
    @property
    def takes_group_size(self) -> bool: ...
    @property
    def takes_warmup_multiplier(self) -> bool: ...
    @property
    def takes_pairs(self) -> bool: ...

class LowerBound:
    @property
    def value(self) -> float: ...
    @property
    def reason(self) -> str: ...
    @property
    def explanation(self) -> str: ...
    @property
    def by_reason(self) -> dict[str, float]: ...

def schedule_catalog() -> list[ScheduleInfo]: ...
def build_schedule(
    name: str,
    *,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int | None,
    group_size: int | None,
    warmup_multiplier: int | None,
    pairs: str | None,
) -> Schedule: ...
def lower_bound(
    schedule: Schedule,
    *,
    forward: Sequence[float],
    backward_input: Sequence[float],
    backward_weight: Sequence[float],
    send: float,
    memory_limit: Sequence[int] | None,
) -> LowerBound: ...

class Effort(IntEnum):
    FAST = ...
    THOROUGH = ...

class Certificate:
    @property
    def makespan(self) -> float: ...
    @property
    def bound(self) -> LowerBound: ...
    @property
    def gap(self) -> float: ...
    @property
    def is_optimal(self) -> bool: ...
    @property
    def winner(self) -> str: ...
    @property
    def named(self) -> dict[str, float]: ...
    @property
    def peak_memory(self) -> list[int]: ...
    @property
    def num_scheduled(self) -> int: ...

def auto_schedule(
    *,
    placement: str,
    num_ranks: int,
    num_chunks: int,
    num_microbatches: int,
    split_backward: bool,
    memory_limit: Sequence[int],
    activation_size: Sequence[int],
    forward: Sequence[float],
    backward_input: Sequence[float],
    backward_weight: Sequence[float],
    send: float,
    overlap: float,
    effort: Effort,
) -> tuple[Schedule, Certificate]: ...
def best_group_size(*, num_ranks: int, num_chunks: int, num_microbatches: int) -> int: ...
def schedule_table(
    num_microbatches: int, num_chunks: int, group_size: int
) -> list[tuple[int, int]]: ...
def partition_layers(
    num_layers: int,
    *,
    num_ranks: int,
    num_chunks: int,
    first: int | None,
    last: int | None,
    account_for_embedding: bool,
    account_for_loss: bool,
    is_v: bool,
    layout: str | None,
) -> list[tuple[int, int]]: ...
def predictions_of_layout(layout: str) -> list[int]: ...
def programs_from_actions(
    schedule: Schedule, rows: Sequence[Sequence[Action]]
) -> list[Program]: ...
def lower(
    schedule: Schedule,
    *,
    in_order: bool,
    ahead: int,
    recompute: tuple[int, int] | None,
) -> list[Program]: ...
def lower_rank(
    schedule: Schedule,
    rank: int,
    *,
    in_order: bool,
    ahead: int,
    recompute: tuple[int, int] | None,
    prove: bool,
) -> Program: ...
def validate_programs(programs: Sequence[Program]) -> None: ...

# ---- buffer --------------------------------------------------------------------------------------
class Bucket:
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def numel(self) -> int: ...
    @property
    def numel_unpadded(self) -> int: ...
    @property
    def param_indices(self) -> list[int]: ...
    def __eq__(self, other: object, /) -> bool: ...
    __hash__: None  # type: ignore[assignment]

class ShardPiece:
    @property
    def param_index(self) -> int: ...
    @property
    def bucket(self) -> int: ...
    @property
    def world_start(self) -> int: ...
    @property
    def world_end(self) -> int: ...
    @property
    def bucket_start(self) -> int: ...
    @property
    def bucket_end(self) -> int: ...
    @property
    def local_start(self) -> int: ...
    @property
    def local_end(self) -> int: ...
    @property
    def param_start(self) -> int: ...
    @property
    def param_end(self) -> int: ...
    @property
    def numel(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    __hash__: None  # type: ignore[assignment]

class BufferPlan:
    @property
    def numel(self) -> int: ...
    @property
    def num_params(self) -> int: ...
    @property
    def dp_size(self) -> int: ...
    @property
    def bucket_numel(self) -> int: ...
    @property
    def param_alignment(self) -> int: ...
    @property
    def bucket_alignment(self) -> int: ...
    @property
    def shard_numel(self) -> int: ...
    @property
    def buckets(self) -> list[Bucket]: ...
    def param_range(self, index: int) -> tuple[int, int]: ...
    def shard(self, dp_rank: int) -> list[ShardPiece]: ...
    def shard_range(self, bucket: int, *, dp_rank: int) -> tuple[int, int]: ...
    def to_text(self, dp_rank: int | None = None) -> str: ...
    def __eq__(self, other: object, /) -> bool: ...
    __hash__: None  # type: ignore[assignment]

def plan_buckets(
    numels: Sequence[int],
    *,
    dp_size: int,
    bucket_numel: int | None,
    shared: Sequence[bool],
    param_alignment: int,
    bucket_alignment: int | None,
    pad_for_ring: bool,
) -> BufferPlan: ...

class BucketTracker:
    def __init__(self, buckets: Sequence[Sequence[int]], waits: Sequence[bool]) -> None: ...
    def start(self) -> None: ...
    def mark(self, param: int) -> list[int]: ...
    def finish(self) -> list[int]: ...
    def is_launched(self, param: int) -> bool: ...
    def count(self, param: int) -> int: ...
    def expected(self, param: int) -> int: ...

def adamw_step(
    *,
    param: int,
    grad: int,
    exp_avg: int,
    exp_avg_sq: int,
    copy_out: int,
    copy_is_float16: bool,
    numel: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    bias_correction1: float,
    bias_correction2: float,
    grad_scale: float,
    control: int,
    num_threads: int,
) -> None: ...
def decide_step(
    *,
    state: int,
    sums: int,
    control: int,
    beta1: float,
    beta2: float,
    clip_grad: float,
    loss_scale_interval: float,
    num_averaged: float,
) -> None: ...
def sum_of_squares(*, values: int, numel: int) -> float: ...

# ---- checksums -----------------------------------------------------------------------------------

def crc32(data: Buffer, crc: int = 0) -> int: ...
def crc32_combine(first: int, second: int, num_bytes_second: int) -> int: ...
def has_fast_crc32() -> bool: ...

# ---- moe -----------------------------------------------------------------------------------------
DEFAULT_TOLERANCE: float

class OffloadPlan:
    @property
    def num_experts(self) -> int: ...
    @property
    def slot_expert(self) -> npt.NDArray[np.int64]: ...
    @property
    def rerouted(self) -> npt.NDArray[np.int64]: ...
    @property
    def load_before(self) -> npt.NDArray[np.int64]: ...
    @property
    def load_after(self) -> npt.NDArray[np.int64]: ...
    @property
    def max_load(self) -> int: ...
    @property
    def num_clones(self) -> int: ...
    @property
    def bound(self) -> int: ...
    @property
    def bound_holds(self) -> bool: ...

def plan_offload(
    counts: npt.NDArray[np.int64],
    *,
    planner: str,
    num_spare_slots: int,
    tolerance_per_million: int,
    min_imbalance_per_million: int,
    domain_size: int,
) -> OffloadPlan: ...

# ---- graph ---------------------------------------------------------------------------------------
class StepKind(IntEnum):
    FORWARD = 0
    BACKWARD = 1
    BACKWARD_WEIGHT = 2

class BufferRole(IntEnum):
    INPUT = 0
    OUTPUT = 1
    OUTPUT_GRAD = 2
    INPUT_GRAD = 3
    KEPT = 4

class Capture:
    @property
    def kind(self) -> StepKind: ...
    @property
    def layer(self) -> int: ...
    @property
    def chunk(self) -> int: ...
    @property
    def slot(self) -> int: ...
    def buffer(self, role: BufferRole) -> int: ...

class BufferUse:
    @property
    def role(self) -> BufferRole: ...
    @property
    def buffer(self) -> int: ...
    @property
    def layer(self) -> int: ...
    @property
    def microbatch(self) -> int: ...
    @property
    def written(self) -> int: ...
    @property
    def last_read(self) -> int: ...

class CapturePlan:
    @property
    def num_chunks(self) -> int: ...
    @property
    def num_microbatches(self) -> int: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def order(self) -> str: ...
    @property
    def captures(self) -> list[Capture]: ...
    @property
    def uses(self) -> list[BufferUse]: ...
    @property
    def slots_per_chunk(self) -> list[int]: ...
    @property
    def peak_per_chunk(self) -> list[int]: ...
    def replays(self, position: int) -> list[int]: ...
    def buffer_signatures(self, role: BufferRole) -> list[int]: ...

def plan_capture(
    order: Sequence[float],
    *,
    layers_per_chunk: Sequence[int],
    input_signature: Sequence[int],
    output_signature: Sequence[int],
    reuse: str,
) -> CapturePlan: ...
def weak_tensor_capsule(
    data: int,
    *,
    shape: Sequence[int],
    strides: Sequence[int],
    dtype_code: int,
    dtype_bits: int,
    device_type: int,
    device_id: int,
) -> object: ...

# ---- moe kernels ---------------------------------------------------------------------------------
# The arguments of a grouped product on a GPU, see cpp/include/megacore/moe/grouped_arguments.h.
def grouped_arguments_bytes(*, num_experts: int) -> int: ...
def fill_grouped_arguments(
    *,
    product: int,
    m_splits: int,
    accumulate_mask: int,
    accumulate: bool,
    num_rows: int,
    num_experts: int,
    out_features: int,
    in_features: int,
    operand_bytes: int,
    result_bytes: int,
    a: int,
    b: int,
    d: int,
    arguments: int,
    first_row: int = 0,
    a_scale: int = 0,
    b_scale: int = 0,
) -> None: ...
def is_faster_than_mkl() -> bool: ...

CLONE_WINDOW_PARTS: int

class CloneLayout:
    def __init__(
        self,
        *,
        num_slots: int,
        fc1_bytes: int,
        fc2_bytes: int,
        fc1_grad_bytes: int,
        fc2_grad_bytes: int,
    ) -> None: ...
    def bytes(self, num_ranks: int) -> int: ...
    def weights_offset(self, num_ranks: int, projection: int) -> int: ...
    def grads_offset(self, num_ranks: int, projection: int) -> int: ...

class CloneTable:
    def __init__(
        self,
        *,
        slot_expert: int,
        num_ranks: int,
        num_slots: int,
        num_experts: int,
        position: int,
    ) -> None: ...

class CloneExchange:
    def __init__(self, window: HostWindow, layout: CloneLayout) -> None: ...
    def open(self) -> None: ...
    def push(self, *, projection: int, weights: int, table: CloneTable) -> None: ...
    def wait_for_weights(self, projection: int) -> None: ...
    def reserve_grads(self, projection: int) -> None: ...
    def offer_grads(self, projection: int) -> None: ...
    def collect(
        self, *, projection: int, dtype: HostDtype, total: int, table: CloneTable
    ) -> None: ...

def count_plan(
    *,
    sums: int,
    slot_expert: int,
    rerouted: int,
    load_before: int,
    summary: int,
    elapsed_ns: int,
    copies_of_place: int,
    copies: int,
    num_ranks: int,
    num_experts: int,
    num_slots: int,
) -> None: ...
def count_held(
    *,
    sums: int,
    slot_expert: int,
    numel: int,
    first: int,
    end: int,
    num_bytes: int,
) -> None: ...
def reroute(
    *,
    expert_of: int,
    numel: int,
    num_ranks: int,
    num_experts: int,
    num_spare_slots: int,
    total: int,
    first: int,
    slot_expert: int,
    tokens: int,
    place_of: int,
) -> None: ...
def quantize_rows(
    *,
    x: int,
    values: int,
    scales: int,
    num_rows: int,
    rows: int,
    width: int,
    dtype: str,
    num_threads: int,
) -> None: ...
def quantize_columns(
    *,
    x: int,
    values: int,
    scales: int,
    m_splits: int,
    rows: int,
    num_experts: int,
    width: int,
    transposed: bool,
    dtype: str,
    num_threads: int,
) -> None: ...
def quantize_blocks(
    *,
    x: int,
    values: int,
    scales: int,
    num_experts: int,
    height: int,
    width: int,
    transposed: bool,
    dtype: str,
    num_threads: int,
) -> None: ...
