"""One small adapter per loader under test, all with the same three calls. Layer: tools.

``available`` says why a loader can't run here (or ``None``), ``load`` returns when all tensors are usable and owned by
the caller, ``check`` compares what came with the files. What a loader needs once a process (its import) is done in
``available``; what it needs once a file set (a conversion) in ``prepare``; neither is timed.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

from bench.check import CheckResult, check_raw, check_tensors


class Loader:
    """Base of all adapters."""

    name: ClassVar[str] = ""
    #: Distribution whose version is recorded.
    distribution: ClassVar[str] = ""
    #: Modules that must import.
    modules: ClassVar[tuple[str, ...]] = ()
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    #: Set before anything is imported.
    environment: ClassVar[Mapping[str, str]] = {}

    def __init__(self, device: str, options: Mapping[str, str], rc_site: str | None = None) -> None:
        self.device = device
        self.options = dict(options)
        self.rc_site = rc_site

    @property
    def target(self) -> str:
        """Device as torch names it."""
        return "cuda:0" if self.device == "cuda" else "cpu"

    def available(self) -> str | None:
        """Import what is needed; return the reason if this loader can't run here."""
        if self.device not in self.devices:
            return f"does not load to {self.device}"
        for variable, value in self.environment.items():
            os.environ.setdefault(variable, value)
        for module in self.modules:
            try:
                importlib.import_module(module)
            except Exception as error:  # whatever a foreign package raises at import is the reason to report
                return f"import {module}: {type(error).__name__}: {error}"
        return None

    def version(self) -> str | None:
        """Return the version of the distribution, if known."""
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    def prepare(self, paths: list[Path]) -> None:
        """Convert the files if this loader has its own format; not timed."""

    def files(self, paths: list[Path]) -> list[Path]:
        """Return the files that this loader reads in place of ``paths``."""
        return paths

    def load(self, paths: list[Path]) -> Any:
        """Load all tensors; on return they are usable (the caller synchronises the device once more)."""
        raise NotImplementedError

    def check(self, result: Any, paths: list[Path]) -> CheckResult:
        """Compare every byte that came with what the files hold."""
        return check_tensors(result, paths)

    def report(self, result: Any) -> dict[str, Any] | None:
        """Return what the loader itself says about the load."""
        return None


class Xds(Loader):
    """``xds.load`` to torch."""

    name = "xds"
    distribution = "xpu-direct-storage"
    modules: ClassVar[tuple[str, ...]] = (
        "xds",
        "xds.checkpoint",
        "xds.filesystem",
        "xds.direct.backend",
        "xds.engine.mover",
        "xds.interop.torch_tensors",
    )
    devices: ClassVar[tuple[str, ...]] = ("cuda", "cpu")
    framework: ClassVar[str] = "torch"

    def load(self, paths: list[Path]) -> Any:
        import xds

        if len(paths) == 1:
            source: Any = f"xds://{paths[0]}"
        else:
            source = f"xds://{paths[0].parent}/model.safetensors.index.json"
        device = self.target if self.device == "cuda" else "cpu"
        return xds.load(source, device=device, framework=self.options.get("framework", self.framework))

    def report(self, result: Any) -> dict[str, Any] | None:
        report: dict[str, Any] = result.report.as_dict()
        return report


class XdsCupy(Xds):
    """``xds.load`` to CuPy."""

    name = "xds-cupy"
    modules = (*Xds.modules, "xds.interop.cupy_arrays", "cupy")
    devices = ("cuda",)
    framework = "cupy"


class XdsNumpy(Xds):
    """``xds.load`` to NumPy."""

    name = "xds-numpy"
    modules = (*Xds.modules, "xds.interop.numpy_arrays")
    devices = ("cpu",)
    framework = "numpy"


class Safetensors(Loader):
    """``safetensors.torch.load_file``, a file after another, as its users call it."""

    name = "safetensors"
    distribution = "safetensors"
    modules = ("safetensors.torch",)
    devices: ClassVar[tuple[str, ...]] = ("cuda", "cpu")

    def load(self, paths: list[Path]) -> Any:
        from safetensors.torch import load_file

        tensors: dict[str, Any] = {}
        for path in paths:
            tensors.update(load_file(path, device=self.target))
        return tensors


class SafetensorsOwned(Safetensors):
    """The same to the host, then a copy of each tensor: ``load_file`` alone maps the file and copies nothing."""

    name = "safetensors-owned"
    devices = ("cpu",)

    def load(self, paths: list[Path]) -> Any:
        tensors = super().load(paths)
        return {name: tensor.clone() for name, tensor in tensors.items()}


class SafetensorsPrefetch(Loader):
    """``safe_open(...).prefetch()`` of safetensors 0.9, all files at once."""

    name = "safetensors-prefetch"
    distribution = "safetensors"
    modules = ("safetensors.torch",)

    def available(self) -> str | None:
        if self.rc_site is None:
            return "no --rc-site (folder with safetensors 0.9) given"
        sys.path.insert(0, self.rc_site)
        reason = super().available()
        if reason is not None:
            return reason
        import safetensors

        if not hasattr(safetensors.safe_open, "prefetch"):
            return f"safetensors {safetensors.__version__} from {safetensors.__file__} has no prefetch"
        return None

    def version(self) -> str | None:
        import safetensors

        return str(safetensors.__version__)

    def load(self, paths: list[Path]) -> Any:
        import safetensors

        # Eight a loader is its default; one file alone gets a thread a CPU.
        cpus = len(os.sched_getaffinity(0))
        threads = int(self.options.get("threads", max(8, cpus // len(paths))))
        opener: Any = safetensors.safe_open
        handles = [opener(path, framework="pt", device=self.target) for path in paths]
        loaders = [handle.prefetch(threads=threads) for handle in handles]
        tensors: dict[str, Any] = {}
        for loader in loaders:
            for name, tensor in loader:
                tensors[name] = tensor
            loader.close()
        return tensors


class InstantTensor(Loader):
    """``instanttensor.safe_open`` over all files, tensors owned."""

    name = "instanttensor"
    distribution = "instanttensor"
    modules = ("torch", "instanttensor")

    def load(self, paths: list[Path]) -> Any:
        import instanttensor

        backend = None
        if choice := self.options.get("backend"):
            kind = instanttensor.BackendPolicy if choice == "BUFFERED" else instanttensor.Backend
            backend = kind[choice]
        with instanttensor.safe_open([str(path) for path in paths], "pt", self.target, backend=backend) as file:
            return dict(file.tensors())


class FastSafetensors(Loader):
    """fastsafetensors without GDS, 16 threads; ``direct=0`` reads through the page cache."""

    name = "fastsafetensors"
    distribution = "fastsafetensors"
    modules = ("torch", "fastsafetensors")

    def available(self) -> str | None:
        if direct := self.options.get("direct"):
            os.environ["FASTSAFETENSORS_ODIRECT"] = direct
        return super().available()

    def load(self, paths: list[Path]) -> Any:
        from fastsafetensors import SafeTensorsFileLoader

        loader = SafeTensorsFileLoader(None, device=self.target, nogds=True, max_threads=16)
        try:
            loader.add_filenames({0: [str(path) for path in paths]})
            buffers = loader.copy_files_to_device()
            tensors = {name: buffers.get_tensor(name) for name in loader.get_keys()}
            buffers.close()
            return tensors
        finally:
            loader.close()


class FlashPack(Loader):
    """FlashPack's own file, packed before the timing, into its blocks and views."""

    name = "flashpack"
    distribution = "flashpack"
    modules = ("torch", "flashpack", "flashpack.deserialization")

    def _pack(self, paths: list[Path]) -> Path:
        return paths[0].parent / "packed.flashpack"

    def files(self, paths: list[Path]) -> list[Path]:
        return [self._pack(paths)]

    def prepare(self, paths: list[Path]) -> None:
        if self._pack(paths).exists():
            return
        import flashpack
        from safetensors.torch import load_file

        tensors: dict[str, Any] = {}
        for path in paths:
            tensors.update(load_file(path))
        flashpack.pack_to_file(tensors, str(self._pack(paths)), None)

    def load(self, paths: list[Path]) -> Any:
        from flashpack.deserialization import iterate_from_flash_tensor, read_flashpack_file

        storage, metadata = read_flashpack_file(str(self._pack(paths)), device=self.target)
        return dict(iterate_from_flash_tensor(storage, metadata))


class RunAI(Loader):
    """Run:ai model streamer, concurrency 16."""

    name = "runai"
    distribution = "runai-model-streamer"
    modules = ("torch", "runai_model_streamer")
    environment: ClassVar[Mapping[str, str]] = {
        "RUNAI_STREAMER_CONCURRENCY": "16",
        "RUNAI_STREAMER_LOG_LEVEL": "WARNING",
    }

    def load(self, paths: list[Path]) -> Any:
        from runai_model_streamer import SafetensorsStreamer

        with SafetensorsStreamer() as streamer:
            streamer.stream_files([str(path) for path in paths], device=self.target)
            return dict(streamer.get_tensors())


class KvikIO(Loader):
    """KvikIO: the files' plain bytes, 16 threads, 16 MiB tasks; no tensors are made."""

    name = "kvikio-raw"
    distribution = "kvikio-cu13"
    modules = ("cupy", "kvikio")
    environment: ClassVar[Mapping[str, str]] = {
        "KVIKIO_COMPAT_MODE": "ON",
        "KVIKIO_NTHREADS": "16",
        "KVIKIO_TASK_SIZE": str(16 << 20),
        "KVIKIO_BOUNCE_BUFFER_SIZE": str(16 << 20),
    }

    def load(self, paths: list[Path]) -> Any:
        import cupy
        import kvikio

        files = [kvikio.CuFile(path, "r") for path in paths]
        buffers = {str(path): cupy.empty(path.stat().st_size, dtype=cupy.uint8) for path in paths}
        futures = [file.pread(buffers[str(path)]) for file, path in zip(files, paths, strict=True)]
        for future, path in zip(futures, paths, strict=True):
            got = future.get()
            if got != buffers[str(path)].nbytes:
                raise OSError(f"kvikio read {got} of {buffers[str(path)].nbytes} bytes of {path}")
        for file in files:
            file.close()
        return buffers

    def check(self, result: Any, paths: list[Path]) -> CheckResult:
        return check_raw(result, paths)


class ReadInto(Loader):
    """Plain ``readinto`` of whole files into fresh NumPy arrays, one thread."""

    name = "readinto"
    distribution = "numpy"
    modules = ("numpy",)
    devices = ("cpu",)

    def load(self, paths: list[Path]) -> Any:
        return {str(path): self._read(path) for path in paths}

    @staticmethod
    def _read(path: Path) -> Any:
        import numpy as np

        with path.open("rb", buffering=0) as file:
            array = np.empty(os.fstat(file.fileno()).st_size, dtype=np.uint8)
            view = memoryview(array.data)
            done = 0
            while done < len(view):
                got = file.readinto(view[done:])
                if not got:
                    raise OSError(f"{path} ended at byte {done} of {len(view)}")
                done += got
        return array

    def check(self, result: Any, paths: list[Path]) -> CheckResult:
        return check_raw(result, paths)


class ReadIntoThreads(ReadInto):
    """The same, a thread a file."""

    name = "readinto-threads"

    def load(self, paths: list[Path]) -> Any:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            return {str(path): array for path, array in zip(paths, pool.map(self._read, paths), strict=True)}


LOADERS: dict[str, type[Loader]] = {
    kind.name: kind
    for kind in (
        Xds, XdsCupy, XdsNumpy, Safetensors, SafetensorsOwned, SafetensorsPrefetch, InstantTensor, FastSafetensors,
        FlashPack, RunAI, KvikIO, ReadInto, ReadIntoThreads,
    )
}  # fmt: skip


def parse_peer(text: str) -> tuple[str, dict[str, str]]:
    """Return name and options of ``name:key=value:key=value``; raises ValueError for an unknown name."""
    name, *pairs = text.split(":")
    if name not in LOADERS:
        raise ValueError(f"no loader {name!r}; there are {', '.join(LOADERS)}")
    return name, dict(pair.split("=", 1) for pair in pairs)


def is_ours(peer: str) -> bool:
    """Whether a peer is XDS itself."""
    return peer.split(":")[0] in ("xds", "xds-cupy", "xds-numpy")


def is_raw(peer: str) -> bool:
    """Whether a peer delivers plain bytes and no tensors."""
    return peer.split(":")[0] in ("kvikio-raw", "readinto", "readinto-threads")
