"""A fake NVML, as ctypes sees it, that answers from a table; for machines without the driver."""

from __future__ import annotations

import ctypes
import json
import os
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, LOST = 3, 4, 6, 15
_FIRST_MIG = 100


def card(uuid: str, bus: int, **answers: Any) -> dict[str, Any]:
    """Return what NVML reports about a GPU; the keys of ``answers`` are names of its functions.

    ``used`` and ``reserved`` are bytes of memory, ``processes`` pairs of pid and bytes, ``migs``
    the UUIDs of MIG instances, ``fabric`` a byte of the cluster's UUID, the clique and the state,
    ``code`` is the error that NVML returns for it, and
    ``links`` the far end of each NVLink: a bus, "switch", or None if the link is down.
    """
    return {"uuid": uuid, "bus": bus, **answers}


class FakeNvml:
    """The functions of NVML that meshrun uses, for a table of GPUs; ``None`` is a lost GPU."""

    driver = "570.124.06"

    def __init__(self, cards: Sequence[dict[str, Any] | None], *, lacks: str = "") -> None:
        """Make a driver without the functions whose names end in ``lacks``."""
        self.cards, self.lacks = cards, lacks
        self.open = 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        function: Any = getattr(type(self), f"_{name}", None)
        if self.lacks and name.endswith(self.lacks):
            raise AttributeError(name)
        if function is not None:
            return lambda *args: function(self, *args)
        return lambda gpu, *args: self._look_up(name, gpu, args)

    def _look_up(self, name: str, gpu: Any, args: Any) -> int:
        """Answer from the card's table, by the function's name and plain arguments."""
        plain = [str(arg.value) for arg in args if not hasattr(arg, "_obj")]
        places = [arg._obj for arg in args if hasattr(arg, "_obj")]
        found = self._card(gpu).get(" ".join([name, *plain]))
        if found is None:
            return NOT_SUPPORTED
        for place, value in zip(places, found if isinstance(found, list) else [found], strict=True):
            place.value = value
        return 0

    def _card(self, handle: Any) -> dict[str, Any]:
        found = self.cards[(handle.value - 1) % _FIRST_MIG]
        assert found is not None
        return found

    def _nvmlInit_v2(self) -> int:  # noqa: N802
        self.open += 1
        return 0

    def _nvmlShutdown(self) -> int:  # noqa: N802
        self.open -= 1
        return 0

    def _nvmlSystemGetDriverVersion(self, text: Any, size: Any) -> int:  # noqa: N802
        assert size.value >= 80
        text.value = self.driver.encode()
        return 0

    def _nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self.cards)
        return 0

    def _nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:  # noqa: N802
        if code := (self.cards[index.value] or {"code": LOST}).get("code", 0):
            return int(code)
        handle._obj.value = 1 + index.value
        return 0

    def _nvmlDeviceGetHandleByPciBusId_v2(self, address: bytes, handle: Any) -> int:  # noqa: N802
        return self._find(handle, lambda each: self._address(each) == address.decode())

    def _nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:  # noqa: N802
        for index, each in enumerate(self.cards):
            for place, mig in enumerate(each.get("migs", []) if each else []):
                if mig == uuid.decode():
                    handle._obj.value = 1 + index + _FIRST_MIG * (1 + place)
                    return 0
        return self._find(handle, lambda each: each["uuid"] == uuid.decode())

    def _find(self, handle: Any, matches: Callable[[dict[str, Any]], bool]) -> int:
        for index, each in enumerate(self.cards):
            if each is not None and matches(each):
                handle._obj.value = 1 + index
                return 0
        return NOT_FOUND

    def _nvmlDeviceGetUUID(self, gpu: Any, text: Any, size: Any) -> int:  # noqa: N802
        assert size.value == 96
        instance = (gpu.value - 1) // _FIRST_MIG
        found = self._card(gpu)
        text.value = (found["migs"][instance - 1] if instance else found["uuid"]).encode()
        return 0

    def _nvmlDeviceGetName(self, gpu: Any, text: Any, size: Any) -> int:  # noqa: N802
        assert size.value == 96
        text.value = self._card(gpu).get("model", "NVIDIA H100 80GB HBM3").encode()
        return 0

    @staticmethod
    def _address(found: dict[str, Any]) -> str:
        return f"{found.get('domain', 0):04x}:{found['bus']:02x}:00.0"

    def _nvmlDeviceGetPciInfo_v3(self, gpu: Any, info: Any) -> int:  # noqa: N802
        found = self._card(gpu)
        return self._write_pci(info, found.get("domain", 0), found["bus"])

    @staticmethod
    def _write_pci(info: Any, domain: int, bus: int) -> int:
        legacy, full = b"0000:FF:1F.0", b"00000000:FF:1F.0"
        info.raw = struct.pack("=16s5I32s", legacy, domain, bus, 0, 0x233010DE, 0, full)
        return 0

    def _nvmlDeviceGetMigMode(self, gpu: Any, now: Any, later: Any) -> int:  # noqa: N802
        if "migs" not in self._card(gpu):
            return NOT_SUPPORTED
        now._obj.value = later._obj.value = int(bool(self._card(gpu)["migs"]))
        return 0

    def _nvmlDeviceGetMaxMigDeviceCount(self, _: Any, count: Any) -> int:  # noqa: N802
        count._obj.value = 7
        return 0

    def _nvmlDeviceGetMigDeviceHandleByIndex(  # noqa: N802
        self, gpu: Any, index: Any, handle: Any
    ) -> int:
        if index.value >= len(self._card(gpu)["migs"]):
            return NOT_FOUND
        handle._obj.value = gpu.value + _FIRST_MIG * (1 + index.value)
        return 0

    def _nvmlDeviceGetDeviceHandleFromMigDeviceHandle(  # noqa: N802
        self, instance: Any, handle: Any
    ) -> int:
        if instance.value <= _FIRST_MIG:
            return NOT_SUPPORTED
        handle._obj.value = instance.value % _FIRST_MIG
        return 0

    def _nvmlDeviceGetGpuFabricInfoV(self, gpu: Any, info: Any) -> int:  # noqa: N802
        version = struct.unpack_from("=I", info.raw)[0]
        assert (version, len(info.raw)) == (0x02000024, 36)
        found = self._card(gpu).get("fabric")
        if found is None:
            return NOT_SUPPORTED
        uuid, clique, state = found
        info.raw = struct.pack("=I16sIIB3xI", version, bytes([uuid] * 16), 0, clique, state, 0)
        return 0

    def _nvmlDeviceGetMemoryInfo_v2(self, gpu: Any, info: Any) -> int:  # noqa: N802
        version = struct.unpack_from("=I", info.raw)[0]
        assert version == 40 | 2 << 24
        found = self._card(gpu)
        numbers = (80 << 30, found.get("reserved", 0), 0, found.get("used", 0))
        info.raw = struct.pack("=I4x4Q", version, *numbers).ljust(len(info.raw), b"\0")
        return 0

    def _nvmlDeviceGetComputeRunningProcesses_v3(  # noqa: N802
        self, gpu: Any, count: Any, infos: Any
    ) -> int:
        found = self._card(gpu).get("processes", [])
        unknown = 2**64 - 1
        packed = (
            struct.pack("=I4xQII", pid, unknown if used is None else used, 2**32 - 1, 2**32 - 1)
            for pid, used in found
        )
        infos.raw = b"".join(packed).ljust(len(infos.raw), b"\0")
        count._obj.value = len(found)
        return 0

    def _nvmlDeviceGetNvLinkState(self, gpu: Any, link: Any, state: Any) -> int:  # noqa: N802
        links = self._card(gpu).get("links", [])
        if link.value >= len(links):
            return NOT_SUPPORTED
        state._obj.value = int(links[link.value] is not None)
        return 0

    def _nvmlDeviceGetNvLinkRemotePciInfo_v2(  # noqa: N802
        self, gpu: Any, link: Any, info: Any
    ) -> int:
        far = self._card(gpu)["links"][link.value]
        return self._write_pci(info, 0, 99 if far == "switch" else far)

    def _nvmlDeviceGetNvLinkRemoteDeviceType(  # noqa: N802
        self, gpu: Any, link: Any, kind: Any
    ) -> int:
        kind._obj.value = 2 if self._card(gpu)["links"][link.value] == "switch" else 0
        return 0

    def _nvmlDeviceGetTopologyCommonAncestor(  # noqa: N802
        self, one: Any, other: Any, level: Any
    ) -> int:
        found = self._card(one).get("levels", {}).get(str(self._card(other)["bus"]))
        if found is None:
            return NOT_SUPPORTED
        level._obj.value = found
        return 0


class NvmlInFile(FakeNvml):
    """A driver for other processes: its GPUs are in a JSON file, which each call reads again."""

    def __init__(self, path: str) -> None:
        self.path, self.lacks, self.open = path, "", 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        """Return a function that waits, or kills its process, if the file's folder says so."""
        folder = os.path.dirname(os.environ["FAKE_NVML"])
        if os.path.exists(os.path.join(folder, f"{name} crashes")):
            os.abort()
        while os.path.exists(os.path.join(folder, f"{name} hangs")):
            time.sleep(0.05)
        return super().__getattr__(name)

    @property
    def cards(self) -> Any:
        """The current content of the file."""
        with open(self.path) as file:
            return json.load(file)


def install() -> None:
    """Make this process load a driver whose GPUs are in the file that ``FAKE_NVML`` names."""
    real: Any = ctypes.CDLL

    def library(name: str | None, *args: Any, **more: Any) -> Any:
        is_nvml = name is not None and name.startswith("libnvidia-ml")
        return NvmlInFile(os.environ["FAKE_NVML"]) if is_nvml else real(name, *args, **more)

    ctypes.CDLL = library  # type: ignore[assignment,misc]
