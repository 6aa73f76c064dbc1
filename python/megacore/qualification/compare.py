"""One operation by our kernel and by torch: the first difference, and both times."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from megacore.ops.kernel_choice import MEASURED, leaving
from megacore.qualification.cases import (
    AWKWARD,
    Call,
    Draw,
    Sizes,
    calls_of,
    measured_calls,
    operation_names,
)

# Allowed difference, relative to a number and to the root mean square of all numbers of a result.
# Two roundings to a 16-bit dtype differ by its last bit, sums in another order by less.
_TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 3e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 2e-2,
}
# torch rounds operands that are scaled back to bfloat16, and weight gradients to their dtype.
_NARROWER = ("fp8_product", "add_weight_grad_")
# A kernel must be slower by more than the noise of a measurement to be replaced.
SLOWER = 1.1
# Our products on CPUs are taken where they are faster by more than the noise.
FASTER = 0.95
_ROUNDS = 7
_LEAST_S = 2e-4
# Two rounds are enough where the times differ by this factor and one takes this long.
_FAR_APART, _LONG_S = 3.0, 0.1


def dtypes_of(device: torch.device) -> tuple[torch.dtype, ...]:
    """Return the dtypes of activations that kernels of a device take."""
    narrow = (torch.bfloat16,) if device.type == "cpu" else (torch.bfloat16, torch.float16)
    return (torch.float32, *narrow)


def first_difference(name: str, device: torch.device, left: Collection[str] = ()) -> str | None:
    """Compare an operation with its reference on awkward shapes; return where it differs.

    Args:
        name: Name of the operation.
        device: Device of the tensors.
        left: Operations whose kernels must not be used.

    Returns:
        A description of the first difference, or of the kernel's error; ``None`` without one.
    """
    for dtype in dtypes_of(device):
        for sizes in AWKWARD:
            for run, arguments in calls_of(name, Draw(sizes, dtype, device)):
                for given in (arguments, *_moved(arguments, sizes)):
                    problem = _difference(name, device, left, run, given)
                    if problem is not None:
                        kind = str(dtype).removeprefix("torch.")
                        return f"{problem} at {sizes.text()}, {kind}"
    return None


def _difference(
    name: str,
    device: torch.device,
    left: Collection[str],
    run: Callable[..., Any],
    arguments: list[Any],
) -> str | None:
    with leaving(operation_names(device.type), device.type):
        expected = _results(run, arguments)
    try:
        with leaving(left, device.type):
            found = _results(run, arguments)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    except (RuntimeError, ValueError) as error:
        return f"fails ({str(error).splitlines()[0]})"
    if len(found) != len(expected):
        return f"has {len(found)} results, not {len(expected)},"
    for one, other in zip(found, expected, strict=True):
        if not _is_near(one, other, is_narrower=name in _NARROWER):
            return "differs"
    return None


def _results(run: Callable[..., Any], arguments: list[Any]) -> list[Tensor]:
    """Return the results of a call, and all tensors that it may have written."""
    given = [x.clone() if isinstance(x, Tensor) and not _is_moved(x) else x for x in arguments]
    given = [_move(x) if isinstance(x, Tensor) and _is_moved(x) else x for x in given]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        found = run(*given)
    found = [found] if isinstance(found, Tensor) else list(found or ())
    return [*found, *(x for x in given if isinstance(x, Tensor))]


def _is_near(found: Tensor, expected: Tensor, *, is_narrower: bool) -> bool:
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return False
    if expected.dtype not in _TOLERANCE:  # integers, and 8-bit floats, which have one rounding
        bits = (
            each.view(torch.uint8) if each.dtype.itemsize == 1 else each
            for each in (found, expected)
        )
        return torch.equal(*bits)
    tolerance = _TOLERANCE[torch.bfloat16 if is_narrower else expected.dtype]
    found, expected = found.double(), expected.double()
    finite = expected[expected.isfinite()]
    scale = finite.square().mean().sqrt().item() if finite.numel() else 0.0
    return torch.allclose(found, expected, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


# Kernels load packs of 16 bytes where addresses allow it.
_PACK = 16
_MOST_MOVED = 64


def _moved(arguments: list[Any], sizes: Sizes) -> list[list[Any]]:
    """Return the arguments with each tensor one element behind an aligned address; small ones."""
    if sizes.tokens >= _MOST_MOVED:
        return []
    return [[_move(x) if isinstance(x, Tensor) else x for x in arguments]]


def _move(x: Tensor) -> Tensor:
    memory = x.new_empty(x.numel() + 1)
    return memory[1:].view(x.shape).copy_(x)


def _is_moved(x: Tensor) -> bool:
    return x.data_ptr() % _PACK != 0


# ---- times ---------------------------------------------------------------------------------------


def times_of(
    name: str, device: torch.device, sizes: Sizes | None, dtype: torch.dtype, left: Collection[str]
) -> tuple[float, float] | None:
    """Measure all calls of an operation by our kernel and by torch, in turns.

    Args:
        name: Name of the operation.
        device: Device of the tensors.
        sizes: Sizes of the run; those of `MEASURED` have their own.
        dtype: dtype of activations.
        left: Operations whose kernels must not be used.

    Returns:
        Seconds of both; the lowest of seven, or of two if they are far apart. ``None`` if a run of
        these sizes has no such call, or the device has no memory for it.

    Sync:
        Waits for the device.
    """
    try:
        calls = list(_timed_calls(name, device, sizes, dtype))
        return _best_times(name, calls, device, left) if calls else None
    except torch.OutOfMemoryError:
        return None


def _best_times(
    name: str, calls: list[Call], device: torch.device, left: Collection[str]
) -> tuple[float, float]:
    ways = list(left), [*left, name]
    best = [float("inf")] * 2
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        repeats = 0
        for number in range(_ROUNDS + 1):  # the first finds the number of repetitions
            for place, names in enumerate(ways):
                with leaving(names, device.type):
                    seconds = _seconds(calls, device, max(1, repeats))
                if repeats:
                    best[place] = min(best[place], seconds / repeats)
                else:
                    best[place] = seconds
            if not repeats:
                repeats = max(1, min(100, round(_LEAST_S / max(min(best), 1e-9))))
                best = [float("inf")] * 2
            elif number > 1 and max(best) > _FAR_APART * min(best) and max(best) > _LONG_S:
                break
    return best[0], best[1]


def _timed_calls(
    name: str, device: torch.device, sizes: Sizes | None, dtype: torch.dtype
) -> Iterator[Call]:
    if name in MEASURED:
        return measured_calls(name)
    return iter(()) if sizes is None else calls_of(name, Draw(sizes, dtype, device))


def _seconds(calls: list[Call], device: torch.device, repeats: int) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    # Other work does not count against one thread.
    is_alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if is_alone else time.perf_counter
    start = clock()
    for _ in range(repeats):
        for run, arguments in calls:
            run(*arguments)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - start
