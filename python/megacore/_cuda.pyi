# Hand-written; tests/unit/test_stubs.py compares it with the built module (where it is built).

def device_count() -> int: ...
def runtime_version() -> int: ...
def driver_version() -> int: ...
def compiled_archs() -> list[str]: ...

# Tensors are addresses; enumerators are numbers; see cuda/include/megacore/cuda/grouped_gemm.h.
def grouped_gemm_archs() -> list[str]: ...

MAX_SORTED_EXPERTS: int
MAX_TOP_K_COLUMNS: int

# Tensors are addresses; see cuda/include/megacore/cuda/clone_exchange.h.
def clones_open(
    *,
    memory: int,
    failure: int,
    sizes: list[int],
    slot_expert: int,
    timeout_s: float,
    projection: int,
    tensor: int,
    stream: int,
) -> None: ...
def clones_push(
    *,
    memory: int,
    failure: int,
    sizes: list[int],
    slot_expert: int,
    timeout_s: float,
    projection: int,
    tensor: int,
    stream: int,
) -> None: ...
def clones_wait(
    *,
    memory: int,
    failure: int,
    sizes: list[int],
    slot_expert: int,
    timeout_s: float,
    projection: int,
    tensor: int,
    stream: int,
) -> None: ...
def clones_reserve_grads(
    *,
    memory: int,
    failure: int,
    sizes: list[int],
    slot_expert: int,
    timeout_s: float,
    projection: int,
    tensor: int,
    stream: int,
) -> None: ...
def clones_offer_grads(
    *,
    memory: int,
    failure: int,
    sizes: list[int],
    slot_expert: int,
    timeout_s: float,
    projection: int,
    tensor: int,
    stream: int,
) -> None: ...
def clones_collect(
    *,
    memory: int,
    failure: int,
    sizes: list[int],
    slot_expert: int,
    timeout_s: float,
    projection: int,
    tensor: int,
    stream: int,
) -> None: ...

# Tensors are addresses; see cuda/include/megacore/cuda/peer_exchange.h.
PEER_STATE_NUMEL: int

def peer_send_counts(
    *,
    memory: int,
    state: int,
    num_members: int,
    position: int,
    layout: list[int],
    timeout_s: float,
    shape: list[int],
    experts: int,
    num_tokens: int,
    num_choices: int,
    workspace: int,
    stream: int,
) -> None: ...
def peer_send_sums(
    *,
    memory: int,
    state: int,
    num_members: int,
    position: int,
    layout: list[int],
    timeout_s: float,
    shape: list[int],
    counts: int,
    stream: int,
) -> None: ...
def peer_plan(
    *,
    memory: int,
    state: int,
    num_members: int,
    position: int,
    layout: list[int],
    timeout_s: float,
    shape: list[int],
    num_copies: int,
    shift: int,
    kept: int,
    m_splits: int,
    totals: int,
    stream: int,
) -> None: ...
def peer_sort_numel(*, num_tokens: int, num_choices: int, num_experts: int) -> int: ...
def peer_map_copies(
    *,
    experts: int,
    num_tokens: int,
    num_choices: int,
    sorted: int,
    workspace: int,
    shift: int,
    members: int,
    num_experts: int,
    num_parts: int,
    repeats: int,
    capacity: int,
    row_map: int,
    stream: int,
) -> None: ...
def peer_start_push(
    *,
    memory: int,
    state: int,
    num_members: int,
    position: int,
    layout: list[int],
    timeout_s: float,
    slot: int,
    rows: int,
    probs: int,
    width: int,
    dtype: str,
    row_map: int,
    sizes: list[int],
    stream: int,
) -> None: ...
def peer_finish_push(
    *,
    memory: int,
    state: int,
    num_members: int,
    position: int,
    layout: list[int],
    timeout_s: float,
    slot: int,
    rows: int,
    probs: int,
    width: int,
    dtype: str,
    num_arrived: int,
    capacity: int,
    stream: int,
) -> None: ...
def peer_reserve_pull(
    *,
    memory: int,
    state: int,
    num_members: int,
    position: int,
    layout: list[int],
    timeout_s: float,
    slot: int,
    stream: int,
) -> None: ...
def peer_start_pull(
    *,
    memory: int,
    state: int,
    num_members: int,
    position: int,
    layout: list[int],
    timeout_s: float,
    slot: int,
    rows: int,
    probs: int,
    width: int,
    dtype: str,
    num_arrived: int,
    capacity: int,
    stream: int,
) -> None: ...
def peer_finish_pull(
    *,
    memory: int,
    state: int,
    num_members: int,
    position: int,
    layout: list[int],
    timeout_s: float,
    slot: int,
    rows: int,
    probs: int,
    width: int,
    dtype: str,
    row_map: int,
    sizes: list[int],
    stream: int,
) -> None: ...

# Layers; see cuda/include/megacore/cuda/{dense,router}.h.

MAX_NORM_BYTES: int
MAX_NORMED_HEAD_BYTES: int
MAX_ROUTER_EXPERTS: int
MAX_ROUTER_CHOICES: int
