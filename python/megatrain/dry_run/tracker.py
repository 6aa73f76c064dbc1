"""Tracker of a step: operations, bytes of storages and host synchronizations, by dispatch mode."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megacore import host_values
from megacore.host_values import HostRead, short_place
from megacore.pipeline import Action, ActionKind, ActionRecorder
from megacore.pipeline.clock import PhaseClock

_ATEN = torch.ops.aten
_COPIES = (_ATEN._to_copy.default, _ATEN.copy_.default)
# Operations that take indices of another device.
_INDEXING = (
    _ATEN.index.Tensor,
    _ATEN.index_put.default,
    _ATEN.index_put_.default,
    _ATEN._index_put_impl_.default,
)
_MIXED = (*_COPIES, *_INDEXING)
# Operations whose result has a size, or is a number, that depends on values.
_READING = (
    _ATEN.nonzero.default,
    _ATEN.masked_select.default,
    _ATEN._unique2.default,
    _ATEN.unique_dim.default,
    _ATEN.unique_consecutive.default,
    _ATEN.equal.default,
    _ATEN.repeat_interleave.Tensor,
)
# Products, whose shapes torch computes without a look at the dtypes.
_PRODUCTS = (_ATEN.mm.default, _ATEN.bmm.default, _ATEN.addmm.default, _ATEN.baddbmm.default)
_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)
_FORWARD = (ActionKind.FORWARD, ActionKind.RECV_FORWARD)
BUILD, OUTSIDE = "build", "between"
# Shape, stride, and other arguments of torch.empty_strided.
_Spec: TypeAlias = tuple[torch.Size, tuple[int, ...], dict[str, Any]]


class _Here(threading.local):
    """Phase and last parameter of a thread: a forward and a backward may run in turns."""

    phase = OUTSIDE
    param: str | None = None


class DryRunError(Exception):
    """Error of a step that a dry run has found, with its place."""


class StepTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracker of operations, storages and host synchronizations on the device of a model.

    Args:
        device_type: Type of the device whose storages count: ``"meta"``, ``"cuda"`` for fake
            tensors, or ``"cpu"`` for a real run, whose operations are only counted.

    Attributes:
        operations: Operations by ``(phase, layer)``. A layer is that of the last parameter used.
        peak_bytes: Most bytes of storages at once, by phase.
        live_bytes: Bytes of storages at present.
        reads: Named reads of device values, by read.
        syncs: Reads past `megacore.host_values`, by place.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: Counter[tuple[str, str]] = Counter()
        self.peak_bytes: defaultdict[str, int] = defaultdict(int)
        self.live_bytes = 0
        self.reads: Counter[HostRead] = Counter()
        self.syncs: Counter[str] = Counter()
        self._device_type = device_type
        self._is_dry = device_type != "cpu"
        self._here = _Here()
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._params: dict[tuple[int, int], str] = {}
        self._param_storages: set[int] = set()
        self._shapes = _ShapeCache()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Track the work inside ``with``."""
        with host_values.listen(self._note_read), self:
            yield

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Account the work inside ``with`` to a phase."""
        before, self._here.phase = self._here.phase, name
        self._update_peak()
        try:
            yield
        finally:
            self._here.phase = before

    def name_params(self, params: Iterable[tuple[str, Tensor]]) -> None:
        """Set the names of parameters, and of their gradients, by which layers are recognized."""
        for name, tensor in params:
            storage = tensor.untyped_storage()._cdata
            self._param_storages.add(storage)
            self._params.setdefault((storage, int(tensor.storage_offset())), name)

    def clear(self) -> None:
        """Forget counts and peaks; storages stay."""
        for counts in (self.operations, self.peak_bytes, self.reads, self.syncs):
            counts.clear()
        self._update_peak()

    @property
    def param(self) -> str | None:
        """The last parameter that an operation of this thread used."""
        return self._here.param

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Count an operation and the storages of its results."""
        del types
        kwargs = kwargs or {}
        tensors: list[Tensor] = []
        key = (func, _key_of(args, tensors), _key_of(tuple(kwargs.items()), tensors))
        self._find_param(tensors)
        self.operations[self._here.phase, layer_of(self._here.param)] += 1
        if self._is_dry:
            self._check_devices(func, tensors)
            if func in _PRODUCTS:
                _check_dtypes(func, tensors)
            if self._reads_device(func, tensors, args, kwargs):
                self.syncs[f"{func} at {place_of_caller()}"] += 1
                return self._answer(func, args)
            result = self._shapes.run(key, tensors, lambda: func(*args, **kwargs))
        else:
            result = func(*args, **kwargs)
        for each in _tensors_of(result):
            self._track(each)
        return result

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing its compiler for this mode."""
        return False

    def _find_param(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()._cdata
            if storage in self._param_storages:
                name = self._params.get((storage, int(tensor.storage_offset())))
                self._here.param = name or self._here.param

    def _track(self, tensor: Tensor) -> None:
        if tensor.device.type != self._device_type:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        num_bytes = storage.nbytes()

        def free(_: object) -> None:
            self._storages.pop(key, None)
            self.live_bytes -= num_bytes

        self._storages[key] = weakref.ref(storage, free)
        self.live_bytes += num_bytes
        self._update_peak()

    def _update_peak(self) -> None:
        phase = self._here.phase
        self.peak_bytes[phase] = max(self.peak_bytes[phase], self.live_bytes)

    def _note_read(self, read: HostRead) -> None:
        self.reads[read] += 1

    def _check_devices(self, func: Any, tensors: list[Tensor]) -> None:
        """Raise an error for tensors of the host beside those of the device.

        Numbers without dimensions are arguments of kernels.
        """
        if func in _MIXED or all(tensor.is_meta for tensor in tensors):
            return
        devices = {tensor.device.type for tensor in tensors if tensor.dim() > 0}
        if len(devices) > 1 and self._device_type in devices:
            shapes = ", ".join(f"{list(each.shape)} on {each.device.type}" for each in tensors)
            raise DryRunError(f"{func} gets tensors on different devices: {shapes}")

    def _reads_device(
        self, func: Any, tensors: list[Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> bool:
        if not any(tensor.device.type == self._device_type for tensor in tensors):
            return False
        if func in _INDEXING:  # a mask is turned into positions first
            return any(each is not None and each.dtype == torch.bool for each in args[1])
        if func is _ATEN._local_scalar_dense.default or func in _READING:
            return func is not _ATEN.repeat_interleave.Tensor or kwargs.get("output_size") is None
        if func is _ATEN._to_copy.default:
            device = kwargs.get("device")
            return device is not None and torch.device(device).type == "cpu"
        return func is _ATEN.copy_.default and tensors[0].device.type == "cpu"

    def _answer(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Return the result of a read without data, where its shape is known."""
        tensor = args[0]
        if func is _ATEN._local_scalar_dense.default:
            number = float("nan") if tensor.dtype.is_floating_point else 0
            return bool(number) if tensor.dtype == torch.bool else number
        if func is _ATEN._to_copy.default:
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
        if func is _ATEN.copy_.default:
            return tensor
        raise DryRunError(
            f"{func} waits for the device to learn the size of its result; use an operation whose "
            "result has a fixed size, or read the number by megacore.host_values"
        )


class _ShapeCache:
    """Results of operations on the meta device by the shapes of their arguments.

    torch computes many of them by formulas in Python, which take most of the time of a dry run.
    """

    def __init__(self) -> None:
        # None: not from the shapes alone, because a result shares memory with an argument.
        self._specs: dict[Any, tuple[_Spec | None, ...] | None] = {}

    def run(self, key: Any, tensors: list[Tensor], call: Callable[[], Any]) -> Any:
        """Return new results for the arguments of ``key``, by ``call`` if they are not known."""
        func = key[0]
        if not _is_pure(func):
            return call()
        try:
            specs = self._specs.get(key, ())
        except TypeError:  # an argument cannot be a key
            return call()
        if specs is None:
            return call()
        if not specs:
            result = call()
            self._specs[key] = _specs_of(result, tensors)
            return result
        made = [
            None if spec is None else torch.empty_strided(*spec[:2], **spec[2]) for spec in specs
        ]
        return made[0] if len(made) == 1 and _returns_one(func) else tuple(made)


@functools.cache
def _is_pure(func: Any) -> bool:
    """Return whether results are new tensors, as far as the schema says."""
    schema = func._schema
    return (
        func.namespace in ("aten", "megacore")
        and not schema.is_mutable
        and not func.is_view
        and all(str(each.type) == "Tensor" for each in schema.returns)
        and torch.Tag.nondeterministic_seeded not in func.tags
    )


@functools.cache
def _returns_one(func: Any) -> bool:
    return len(func._schema.returns) == 1


def _specs_of(result: Any, tensors: list[Tensor]) -> tuple[_Spec | None, ...] | None:
    """Return the shapes of results; ``None`` if one is no new memory of the meta device."""
    shared = {tensor.untyped_storage()._cdata for tensor in tensors}
    specs: list[_Spec | None] = []
    for each in (result,) if isinstance(result, Tensor) else result:
        if each is None:
            specs.append(None)
            continue
        storage = each.untyped_storage()
        if not each.is_meta or storage._cdata in shared or each.storage_offset() != 0:
            return None
        shared.add(storage._cdata)
        specs.append((each.shape, each.stride(), {"dtype": each.dtype, "device": "meta"}))
    return tuple(specs)


def _key_of(values: Any, tensors: list[Tensor]) -> tuple[Any, ...]:
    """Return what the results' shapes depend on, and append the tensors to a list."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
            found.append((value.shape, value.stride(), value.dtype, value.is_meta))
        elif isinstance(value, list | tuple):
            found.append(_key_of(value, tensors))
        else:
            found.append((type(value), value))
    return tuple(found)


def _tensors_of(result: Any) -> Iterator[Tensor]:
    """Yield the tensors of an operation's result."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, list | tuple):
        for each in result:
            yield from _tensors_of(each)


def _check_dtypes(func: Any, tensors: list[Tensor]) -> None:
    if len({tensor.dtype for tensor in tensors}) > 1:
        shapes = ", ".join(f"{list(each.shape)} {each.dtype}" for each in tensors)
        raise DryRunError(f"{func} gets tensors of different dtypes: {shapes}")


class TrackedClock(PhaseClock):
    """Clock of a step whose phases are those of a tracker."""

    def __init__(self, device: torch.device, tracker: StepTracker) -> None:
        super().__init__(device)
        self._tracker = tracker

    @contextmanager
    def phase(self, name: str, *, on_host: bool = False) -> Iterator[None]:
        """See `PhaseClock`."""
        with self._tracker.phase(name), super().phase(name, on_host=on_host):
            yield


class TrackedActions(ActionRecorder):
    """Recorder of pipeline actions that splits passes into forward and backward."""

    def __init__(self, rank: int, tracker: StepTracker) -> None:
        super().__init__(rank=rank)
        self._tracker = tracker

    @contextmanager
    def record(self, action: Action) -> Iterator[None]:
        """See `ActionRecorder`."""
        phase = "forward" if action.kind in _FORWARD else "backward"
        with self._tracker.phase(phase), super().record(action):
            yield


@functools.cache
def layer_of(param: str | None) -> str:
    """Return the layer of a parameter, or the part of the model.

    Example:
        >>> layer_of("layers.3.mlp.up"), layer_of("embedding.weight"), layer_of(None)
        ('layers.3', 'embedding', '')
    """
    first, *rest = (param or "").split(".")
    return f"{first}.{rest[0]}" if rest and rest[0].isdecimal() else first


def place_of_caller() -> str:
    """Return file, line and function of the innermost running frame outside of torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if is_own(frame.f_code.co_filename):
            break
        frame = frame.f_back
    return f"{short_place(frame.f_code.co_filename, frame.f_lineno)} in {frame.f_code.co_name}"


def is_own(path: str) -> bool:
    """Return whether a file is neither torch's nor of the dry run."""
    return not path.startswith((_TORCH, _HERE, "<"))
