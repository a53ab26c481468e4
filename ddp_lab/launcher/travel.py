"""How functions, arguments and results travel between processes.

Code of notebook cells travels by value, with the text it was compiled from. Large buffers (tensors,
arrays) are written once into an anonymous file in memory and mapped by whoever gets them.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import io
import itertools
import mmap
import os
import pickle
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any

import cloudpickle

from ddp_lab.launcher import processes, source

_APART = 1 << 16  # a buffer of at least so many bytes is kept out of the pickle
_INLINE = 1 << 17  # a parcel of at most so many bytes goes through the socket itself
_WRITE = 1 << 30  # pwrite takes at most 2 GiB at once
_ALIGN = 64  # bytes: where a buffer may start, so that any element type sits well


@dataclass
class Parcel:
    """A pickled object: the pickle and its buffers, in one message or in one anonymous file."""

    sizes: list[int]  # bytes of the pickle and of each buffer
    inline: bytes | None  # all of it, or None when it is in `descriptor`
    descriptor: int | None = None

    @property
    def descriptors(self) -> list[int]:
        return [] if self.descriptor is None else [self.descriptor]

    def share(self) -> Parcel:
        """The same parcel with a descriptor of its own, for one more receiver."""
        copy = None if self.descriptor is None else os.dup(self.descriptor)
        return Parcel(self.sizes, self.inline, copy)

    def close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle that keeps the names and sources of cells and moves tensors as plain buffers.

    CUDA tensors arrive on the CPU: a notebook that only looks at a result should not touch a GPU.
    """

    def __init__(self, file: io.BytesIO, buffer_callback: Callable[[Any], Any] | None) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self.sources: dict[str, str] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, CodeType):
            return self._reduce_code(obj)
        torch = sys.modules.get("torch")
        if torch is not None and hasattr(torch, "storage"):
            if isinstance(obj, torch.storage.TypedStorage):
                return self._reduce_typed_storage(obj)
            if isinstance(obj, torch.UntypedStorage):
                return self._reduce_storage(obj)
            if type(obj) is torch.Tensor and obj.dtype in torch.storage._new_dtypes():
                return self._reduce_as_integers(obj)
        if isinstance(obj, functools._lru_cache_wrapper):
            return self._reduce_cached(obj)
        if isinstance(obj, BaseException) and isinstance(type(obj).__init__, FunctionType):
            return self._reduce_exception(obj)
        reduced = super().reducer_override(obj)
        if isinstance(reduced, tuple) and reduced[-1] is cloudpickle.cloudpickle._class_setstate:
            make, arguments, state = reduced[:3]
            return _make_class, (make, arguments), state, None, None, _set_class_state
        return reduced

    def _reduce_code(self, code: CodeType) -> Any:
        # cloudpickle forgets where code came from; tracebacks in the rank need it.
        label = source.cell_label(code.co_filename) or code.co_filename
        if label not in self.sources and label != code.co_filename:
            self.sources[label] = source.source_of(code.co_filename)
        make, arguments = self.dispatch_table[CodeType](code)[:2]
        return _make_code, (make, arguments, label)

    def _reduce_typed_storage(self, storage: Any) -> Any:
        # Tensors that share memory have one untyped storage, which pickle's memo recognises.
        return _make_typed_storage, (storage._untyped_storage, storage.dtype)

    def _reduce_storage(self, storage: Any) -> Any:
        import torch

        if storage.device.type == "meta":
            return storage.__reduce_ex__(5)
        flat = torch.tensor([], dtype=torch.uint8).set_(storage.cpu())
        return _make_storage, (pickle.PickleBuffer(flat.numpy().data),)

    def _reduce_as_integers(self, tensor: Any) -> Any:
        # Pickle and torch disagree on storages of float8, uint16 and the like.
        import torch

        same_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        plain = tensor.detach().view(same_size[tensor.dtype.itemsize])
        return torch.Tensor.view, (plain, tensor.dtype)

    def _reduce_cached(self, function: Any) -> Any:
        # Python sends only the name, which means nothing elsewhere for a function of a cell.
        if cloudpickle.cloudpickle._lookup_module_and_qualname(function) is not None:
            return NotImplemented  # a function of a module is found by its name
        return _make_cached, (function.__wrapped__, *function.cache_parameters().values())

    def _reduce_exception(self, error: BaseException) -> Any:
        # Python would call the class with `args`, which is wrong for many an `__init__`.
        if type(error).__reduce__ is not BaseException.__reduce__:
            return NotImplemented
        return _make_exception, (type(error), error.args), error.__dict__ or None


class CallPickler(Pickler):
    """Also lets functions of the notebook meet again, in the rank's `__main__`.

    cloudpickle gives all functions that shared their globals one new dictionary; here that
    dictionary is the rank's namespace, which `put`, `get` and `%%ranks` use too.
    """

    def persistent_id(self, obj: Any) -> str | None:
        if not isinstance(obj, dict):
            return None
        stand_in = self.globals_ref.get(id(sys.modules["__main__"].__dict__))
        return "namespace" if obj is stand_in else None


class Unpickler(pickle.Unpickler):
    """Reads what both picklers write; `namespace` stands for the sender's `__main__`."""

    def __init__(self, file: Any, buffers: list[memoryview], namespace: dict[str, Any] | None):
        super().__init__(file, buffers=buffers)
        self._namespace = namespace

    def persistent_load(self, pid: str) -> dict[str, Any]:
        if pid != "namespace" or self._namespace is None:
            raise pickle.UnpicklingError(f"nothing here is called {pid!r}")
        return self._namespace


def _make_code(make: Callable[..., CodeType], arguments: tuple[Any, ...], label: str) -> CodeType:
    return make(*arguments).replace(co_filename=label)


_received: weakref.WeakSet[type] = weakref.WeakSet()
"""Classes that came from another process, as against those that were defined in this one."""


def _make_class(make: Callable[..., type], arguments: tuple[Any, ...]) -> type:
    known = arguments[-2] in cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID
    made = make(*arguments)  # the known one, if there is one
    if not known:
        _received.add(made)
    return made


def _set_class_state(cls: type, state: Any) -> None:
    # An instance that comes back brings its class along as the rank has it; the notebook's own
    # class stays as the notebook has it.
    if cls in _received:
        cloudpickle.cloudpickle._class_setstate(cls, state)


def _make_storage(buffer: Any) -> Any:
    import torch

    view = memoryview(buffer)
    if view.nbytes == 0:
        return torch.UntypedStorage(0)
    if view.readonly:  # came within the pickle
        view = memoryview(bytearray(view))
    return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()


def _make_cached(function: Callable[..., Any], maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


def _make_exception(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    error = kind.__new__(kind, *args)
    error.args = args
    return error


def _make_typed_storage(untyped: Any, dtype: Any) -> Any:
    import torch

    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


def pack(obj: Any, pickler: type[Pickler] = Pickler) -> tuple[Parcel, dict[str, str]]:
    """The object as a parcel, and the sources of the cells whose code is in it.

    Raises whatever pickling raises, and OSError when memory for the parcel runs out.
    """
    buffers: list[memoryview] = []

    def keep_apart(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < _APART:
            return True
        buffers.append(view)
        return False

    file = io.BytesIO()
    writer = pickler(file, keep_apart)
    writer.dump(obj)
    segments = [file.getbuffer(), *buffers]
    sizes = [segment.nbytes for segment in segments]
    if sum(sizes) <= _INLINE:
        padded = (bytes(segment).ljust(_round_up(segment.nbytes), b"\0") for segment in segments)
        return Parcel(sizes, b"".join(padded)), writer.sources
    return Parcel(sizes, None, _write(segments)), writer.sources


def unpack(parcel: Parcel, namespace: dict[str, Any] | None = None) -> Any:
    """The object in a parcel, which is closed. What is written to it, nobody else sees."""
    offsets = _offsets(parcel.sizes)
    if parcel.inline is not None:
        whole = memoryview(bytearray(parcel.inline))
    else:
        assert parcel.descriptor is not None
        try:
            whole = _map(parcel.descriptor, offsets[-1] + parcel.sizes[-1])
        finally:
            parcel.close()
    segments = [whole[at : at + size] for at, size in zip(offsets, parcel.sizes, strict=True)]
    return Unpickler(io.BytesIO(segments[0]), segments[1:], namespace).load()


def _map(descriptor: int, length: int) -> memoryview:
    """A file's bytes as memory, shared until written to; unmapped with the last reference.

    Shared memory would do for results, but then a loader's workers, forks of the notebook, could
    write to the notebook's tensors.
    """
    if not processes.LINUX:
        return memoryview(mmap.mmap(descriptor, length, access=mmap.ACCESS_COPY))
    # The mmap module would keep a descriptor open for each result that a notebook holds on to.
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address = libc.mmap(None, length, access, mmap.MAP_PRIVATE, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    memory = (ctypes.c_char * length).from_address(address)
    weakref.finalize(memory, libc.munmap, address, length).atexit = False
    return memoryview(memory).cast("B")


def _round_up(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _offsets(sizes: list[int]) -> list[int]:
    return [0, *itertools.accumulate(_round_up(size) for size in sizes[:-1])]


def _write(segments: list[memoryview]) -> int:
    descriptor = processes.anonymous_file("ddp-lab-parcel")
    try:
        sizes = [segment.nbytes for segment in segments]
        for segment, at in zip(segments, _offsets(sizes), strict=True):
            rest = segment.cast("B") if segment.nbytes else segment
            while rest.nbytes:
                written = os.pwrite(descriptor, rest[:_WRITE], at)
                rest, at = rest[written:], at + written
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def culprit(fn: Any, args: tuple[Any, ...]) -> str | None:
    """What in a function or its arguments cannot be pickled, by the name the learner gave it."""
    seen = {id(fn)}
    for name, value in [*_names_in(fn), *_named_arguments(fn, args)]:
        if (found := _blame(name, value, depth=8, seen=seen)) is not None:
            return found
    return None


def _named_arguments(fn: Any, args: tuple[Any, ...]) -> list[tuple[str, Any]]:
    try:
        given = inspect.signature(fn).bind(*args).arguments
    except (TypeError, ValueError):  # builtins may have no signature
        given = {f"argument {i}": value for i, value in enumerate(args, 1)}
    return list(given.items())


def _names_in(fn: Any) -> list[tuple[str, Any]]:
    """The variables that travel with a function: closure, globals that it reads, defaults."""
    if isinstance(fn, MethodType):
        return [("self", fn.__self__), *_names_in(fn.__func__)]
    if isinstance(fn, functools.partial):
        return [*_names_in(fn.func), *_named_arguments(fn.func, fn.args), *fn.keywords.items()]
    if isinstance(fn, type):
        return [(fn.__qualname__, fn)]
    if not isinstance(fn, FunctionType):
        return [("self", fn)]  # an object that can be called
    names = []
    code = fn.__code__
    for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
        try:
            names.append((name, cell.cell_contents))
        except ValueError:  # not assigned yet
            continue
    read = cloudpickle.cloudpickle._extract_code_globals(code)
    names += [(name, fn.__globals__[name]) for name in read if name in fn.__globals__]
    defaults = fn.__defaults__ or ()
    positional = code.co_varnames[: code.co_argcount]
    names += list(zip(positional[len(positional) - len(defaults) :], defaults, strict=True))
    return names + list((fn.__kwdefaults__ or {}).items())


def _blame(name: str, value: Any, depth: int, seen: set[int]) -> str | None:
    """The innermost part of `value` that cannot be pickled, or None when all of it can."""
    if id(value) in seen or _travels(value):
        return None
    seen.add(id(value))
    for part, content in _parts(name, value) if depth else []:
        if (found := _blame(part, content, depth - 1, seen)) is not None:
            return found
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return f"`{name}` (a {kind})"


def _parts(name: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, FunctionType | functools.partial):
        return [(f"{part}` in `{name}", content) for part, content in _names_in(value)]
    if isinstance(value, MethodType):
        return [(f"{name}.__self__", value.__self__), (name, value.__func__)]
    if isinstance(value, property):
        return [(name, value.fget), (name, value.fset)]
    if isinstance(value, staticmethod | classmethod):
        return [(name, value.__func__)]
    if isinstance(value, dict):
        return [(f"{name}[{key!r}]", content) for key, content in value.items()]
    if isinstance(value, list | tuple):
        return [(f"{name}[{i}]", content) for i, content in enumerate(value)]
    parts = [(f"{name}.{part}", content) for part, content in _attributes(value)]
    if not isinstance(value, type):  # the class travels too
        parts.append((type(value).__qualname__, type(value)))
    return parts


def _attributes(value: Any) -> list[tuple[str, Any]]:
    slots = [
        slot
        for kind in type(value).__mro__
        for slot in getattr(kind, "__slots__", ())
        if not slot.startswith("__") and hasattr(value, slot)
    ]
    return [
        *getattr(value, "__dict__", {}).items(),
        *((slot, getattr(value, slot)) for slot in slots),
    ]


def _travels(value: Any) -> bool:
    try:
        CallPickler(io.BytesIO(), lambda _: False).dump(value)
    except Exception:
        return False
    return True
