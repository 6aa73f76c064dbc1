# Hand-written; tests/unit/test_stubs.py compares it with the built module (where it is built).

def device_count() -> int: ...
def runtime_version() -> int: ...
def compiled_archs() -> list[str]: ...
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
    stream: int,
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
    stream: int,
) -> None: ...

# Tensors are addresses; enumerators are numbers; see cuda/include/megacore/cuda/grouped_gemm.h.
def grouped_gemm(
    *,
    product: int,
    a: int,
    b: int,
    m_splits: int,
    d: int,
    operand: int,
    result: int,
    num_rows: int,
    num_experts: int,
    out_features: int,
    in_features: int,
    accumulate: bool,
    accumulate_mask: int,
    clear_tail: bool,
    tile: int,
    along_columns: bool,
    workspace: int,
    workspace_bytes: int,
    stream: int,
    first_row: int = 0,
    expected_rows: int = 0,
) -> None: ...
def grouped_gemm_set_up(
    *,
    product: int,
    a: int,
    b: int,
    m_splits: int,
    d: int,
    operand: int,
    result: int,
    num_rows: int,
    num_experts: int,
    out_features: int,
    in_features: int,
    accumulate: bool,
    accumulate_mask: int,
    clear_tail: bool,
    tile: int,
    along_columns: bool,
    workspace: int,
    workspace_bytes: int,
    stream: int,
    first_row: int = 0,
    expected_rows: int = 0,
) -> None: ...
def grouped_gemm_archs() -> list[str]: ...
def grouped_gemm_workspace_bytes(*, num_experts: int) -> int: ...
def grouped_gemm_plan(
    *,
    product: int,
    num_rows: int,
    num_experts: int,
    out_features: int,
    in_features: int,
    major: int,
    expected_rows: int = 0,
) -> tuple[int, bool]: ...

MAX_SORTED_EXPERTS: int
MAX_TOP_K_COLUMNS: int
SUM_BLOCKS: int

def sort_workspace_numel(*, numel: int, num_experts: int) -> int: ...
def sort_by_expert(
    *,
    expert_of: int,
    numel: int,
    num_experts: int,
    row_map: int,
    tokens_per_expert: int,
    workspace: int,
    stream: int,
) -> None: ...
def permute(
    *,
    tokens: int,
    weights: int,
    rows: int,
    is_written: int,
    row_map: int,
    num_tokens: int,
    num_choices: int,
    num_rows: int,
    width: int,
    dtype: str,
    stream: int,
) -> None: ...
def unpermute(
    *,
    rows: int,
    weights: int,
    tokens: int,
    row_map: int,
    num_tokens: int,
    num_choices: int,
    num_rows: int,
    width: int,
    dtype: str,
    stream: int,
) -> None: ...
def row_dots(
    *,
    tokens: int,
    rows: int,
    dots: int,
    row_map: int,
    num_tokens: int,
    num_choices: int,
    num_rows: int,
    width: int,
    dtype: str,
    stream: int,
) -> None: ...
def top_k(*, scores: int, rows: int, columns: int, k: int, chosen: int, stream: int) -> None: ...
def swiglu(
    *, x: int, probs: int, y: int, num_rows: int, rows: int, width: int, dtype: str, stream: int
) -> None: ...
def swiglu_backward(
    *,
    grad_y: int,
    x: int,
    probs: int,
    grad_x: int,
    grad_probs: int,
    num_rows: int,
    rows: int,
    width: int,
    dtype: str,
    stream: int,
) -> None: ...
def gelu(
    *, x: int, probs: int, y: int, num_rows: int, rows: int, width: int, dtype: str, stream: int
) -> None: ...
def gelu_backward(
    *,
    grad_y: int,
    x: int,
    probs: int,
    grad_x: int,
    grad_probs: int,
    num_rows: int,
    rows: int,
    width: int,
    dtype: str,
    stream: int,
) -> None: ...
def sum_of_squares(
    *,
    values: int,
    numel: int,
    dtype: str,
    partial_sums: int,
    total: int,
    stream: int,
) -> None: ...

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
def plan_offload(
    *,
    counts: int,
    num_ranks: int,
    num_experts: int,
    num_spare_slots: int,
    planner: str,
    tolerance_per_million: int,
    min_imbalance_per_million: int,
    domain_size: int,
    slot_expert: int,
    rerouted: int,
    load_before: int,
    load_after: int,
    summary: int,
    elapsed_ns: int,
    stream: int,
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
    stream: int,
) -> None: ...
def count_held(
    *,
    sums: int,
    slot_expert: int,
    numel: int,
    first: int,
    end: int,
    num_bytes: int,
    stream: int,
) -> None: ...
def reroute(
    *,
    expert_of: int,
    row_map: int,
    counts: int,
    numel: int,
    num_ranks: int,
    num_experts: int,
    num_spare_slots: int,
    total: int,
    first: int,
    slot_expert: int,
    tokens: int,
    place_of: int,
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
    shift: int,
    kept: int,
    arriving: int,
    stream: int,
) -> None: ...
def peer_map_copies(
    *,
    experts: int,
    sorted: int,
    shift: int,
    members: int,
    num_tokens: int,
    num_choices: int,
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
MAX_ROUTER_EXPERTS: int
MAX_ROUTER_CHOICES: int

def norm_partial_rows(*, rows: int, width: int, dtype: str) -> int: ...
def rms_norm(
    *,
    x: int,
    weight: int,
    eps: float,
    y: int,
    scale: int,
    rows: int,
    width: int,
    dtype: str,
    stream: int,
) -> None: ...
def rms_norm_backward(
    *,
    grad_y: int,
    x: int,
    weight: int,
    scale: int,
    grad_x: int,
    grad_weight: int,
    partial_sums: int,
    rows: int,
    width: int,
    dtype: str,
    stream: int,
) -> None: ...
def split_and_rotate(
    *,
    qkv: int,
    q: int,
    k: int,
    v: int,
    cos: int,
    sin: int,
    num_tokens: int,
    batch: int,
    num_groups: int,
    q_per_kv: int,
    head_dim: int,
    num_rotated: int,
    position_per_sample: bool,
    backward: bool,
    dtype: str,
    stream: int,
) -> None: ...
def route_partial_rows(*, num_tokens: int, num_pools: int) -> int: ...
def route(
    *,
    logits: int,
    bias: int,
    keeps_ids: bool,
    probs: int,
    ids: int,
    counts: int,
    totals: int,
    partial_sums: int,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    num_pools: int,
    is_sigmoid: bool,
    softmax_after_top_k: bool,
    normalize: bool,
    scaling: float,
    stream: int,
) -> None: ...
def route_backward(
    *,
    grad_probs: int,
    grad_totals: int,
    logits: int,
    ids: int,
    grad_logits: int,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    num_pools: int,
    is_sigmoid: bool,
    softmax_after_top_k: bool,
    normalize: bool,
    scaling: float,
    stream: int,
) -> None: ...
