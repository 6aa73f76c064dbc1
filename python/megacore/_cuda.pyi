# Hand-written; tests/unit/test_stubs.py compares it with the built module (where it is built).

def device_count() -> int: ...
def runtime_version() -> int: ...
def driver_version() -> int: ...
def compiled_archs() -> list[str]: ...

def grouped_gemm_archs() -> list[str]: ...

MAX_SORTED_EXPERTS: int
MAX_TOP_K_COLUMNS: int

# Members; see cuda/include/megacore/cuda/peer_exchange.h.
PEER_STATE_NUMEL: int

def peer_sort_numel(*, num_tokens: int, num_choices: int, num_experts: int) -> int: ...

# Layers; see cuda/include/megacore/cuda/{dense,router}.h.

MAX_NORM_BYTES: int
MAX_NORMED_HEAD_BYTES: int
MAX_ROUTER_EXPERTS: int
MAX_ROUTER_CHOICES: int
