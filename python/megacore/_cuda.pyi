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
    param_bf16: int,
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
