"""Any machine from its name: a catalogue of devices and nodes as data, and files of one's own in
the same form."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from rostra.config.base import Count, Section
from rostra.errors import RequestError
from rostra.hardware.cluster import Cluster, Device, Link, Node, Precision
from rostra.hardware.names import Names
from rostra.hardware.quantity import quantity

_POSITIVE = Field(gt=0, allow_inf_nan=False)
Bytes = Annotated[float, BeforeValidator(lambda x: quantity(x, "B")), _POSITIVE]
Bandwidth = Annotated[float, BeforeValidator(lambda x: quantity(x, "B/s")), _POSITIVE]
Flops = Annotated[float, BeforeValidator(lambda x: quantity(x, "FLOPS")), _POSITIVE]
Seconds = Annotated[float, BeforeValidator(lambda x: quantity(x, "s")), _POSITIVE]
Watts = Annotated[float, BeforeValidator(lambda x: quantity(x, "W")), _POSITIVE]


class LinkEntry(Section):
    """A link that the catalogue does not have."""

    name: str
    bandwidth: Bandwidth
    latency: Seconds


class Entry(Section):
    """A device and the node it stands in, as the catalogue and files of one's own describe them.

    Besides these keys, `like` takes all from another device, and `node` from a type of node,
    that are not given; links are tables or names of the catalogue.
    """

    name: str
    kind: Literal["gpu", "cpu"] = "gpu"
    memory: Bytes
    bandwidth: Bandwidth
    flops: dict[Precision, Flops] = Field(min_length=1)
    watts: Watts
    compute_capability: tuple[int, int] | None = None
    source: str = ""
    devices: Count
    link: LinkEntry
    host_link: LinkEntry
    host_memory: Bytes
    host_bandwidth: Bandwidth
    nvme: Bytes | None = None
    nvme_bandwidth: Bandwidth | None = None
    node_source: str = ""
    nodes: Count = 1
    network: LinkEntry
    price_per_hour: Annotated[float, Field(ge=0)] | None = None
    price_source: str = ""
    currency: str = "USD"


_LINKS = ("link", "host_link", "network")
_REFERENCES = ("like", "node")
_TIMES = r"(?:(\d{1,7})\s*[x×*]\s*)?"
_SPEC = re.compile(rf"\s*{_TIMES}{_TIMES}(\S.*?)\s*", re.IGNORECASE)


class Catalogue:
    """Links, types of nodes and devices by name, however it is written."""

    def __init__(self, tables: dict[str, dict[str, Any]]) -> None:
        self._tables = tables
        self._names = {
            kind: Names({name: values.get("aliases", ()) for name, values in table.items()})
            for kind, table in tables.items()
        }

    def names(self) -> list[str]:
        """All devices, as the catalogue writes them."""
        return list(self._tables["devices"])

    def find(self, kind: str, written: str) -> str | None:
        """The name that is meant; a device may be told by the memory that it has anyway
        (`T4-16GB`)."""
        found = self._names[kind].find(written)
        return self._sized(written) if found is None and kind == "devices" else found

    def _sized(self, written: str) -> str | None:
        if (found := self._names["devices"].without_size(written)) is None:
            return None
        name, size = found
        ratio = quantity(self.device(name)["memory"], "B") / size
        return name if 0.9 < ratio < 1.1 else None

    def near(self, kind: str, written: str) -> list[str]:
        """The names most like it, the nearest first."""
        return self._names[kind].near(written)

    def device(self, name: str) -> dict[str, Any]:
        """The whole entry of a device that the catalogue has under this very name."""
        return self.complete({"name": name} | self._tables["devices"][name])

    def complete(self, values: dict[str, Any]) -> dict[str, Any]:
        """`values` with what their `like` and `node` stand for. Raises LookupError for names
        that are unknown: the key, and the kind of thing it names."""
        whole: dict[str, Any] = {}
        if (like := values.get("like")) is not None:
            whole |= self.device(self._known("devices", "like", like))
        if (node := values.get("node")) is not None:
            whole |= self._tables["nodes"][self._known("nodes", "node", node)]
        if "price_per_hour" in values:  # another's source is not that of one's own price
            whole["price_source"] = ""
        whole |= {k: v for k, v in values.items() if k not in (*_REFERENCES, "aliases")}
        for key in _LINKS:
            if isinstance(link := whole.get(key), str):
                name = self._known("links", key, link)
                whole[key] = {"name": name} | self._tables["links"][name]
        return whole

    def _known(self, kind: str, key: str, name: Any) -> str:
        if not isinstance(name, str) or (found := self.find(kind, name)) is None:
            raise LookupError(key, kind)
        return found


@functools.cache
def known() -> Catalogue:
    """The one that comes with Rostra (catalogue.yaml)."""
    text = (files("rostra.hardware") / "catalogue.yaml").read_text(encoding="utf-8")
    return Catalogue(YAML(typ="safe", pure=True).load(text))


def device_names() -> list[str]:
    """All devices of the catalogue that comes with Rostra."""
    return known().names()


def read_cluster(text: str, price: float | None = None) -> Cluster:
    """The cluster that `text` names: `H100`, `8xH100`, `4x8xA100-80GB` (nodes x devices of a node
    x device), or the path of a YAML file that describes one.

    So many devices are in one node if its usual size has room for them, else in whole nodes.
    `price` is that of one device for an hour, instead of the catalogue's.
    Raises RequestError for unknown names, with the nearest known ones, and for impossible counts.
    """
    if price is not None and not price >= 0:
        raise RequestError(f"price = {price}: should be zero or more, for one device and hour")
    if Path(text).suffix.lower() in (".yaml", ".yml"):
        return cluster_of(_own(Path(text)), price)
    found = _SPEC.fullmatch(text)
    written = "" if found is None else found[3]
    name = known().find("devices", written)
    if found is None or name is None:
        raise RequestError(_unknown(text, written))
    usual = Entry.model_validate(known().device(name))
    counts = [int(count) for count in found.groups()[:2] if count is not None]
    if 0 in counts:
        raise RequestError(f"hardware = {text!r}: there must be one device at the least")
    nodes, devices = _divided(counts, usual.devices, name, text)
    cluster = cluster_of(_part(usual, devices, nodes), price)
    if nodes == 1 and devices > usual.devices:  # a name that means the same when it is read
        return replace(cluster, name=f"1x{cluster.name}")
    return cluster


def _unknown(text: str, name: str) -> str:
    near = known().near("devices", name)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return (
        f"hardware = {text!r}: unknown device {name!r}; {hint}"
        f"known: {', '.join(known().names())}; "
        "or give a YAML file that describes it (docs/hardware.md)"
    )


def _divided(counts: list[int], usual: int, name: str, text: str) -> tuple[int, int]:
    """Nodes, and devices in each."""
    if len(counts) == 2:
        return counts[0], counts[1]
    devices = counts[0] if counts else 1
    if devices <= usual:
        return 1, devices
    if devices % usual:
        less, more = devices // usual * usual, (devices // usual + 1) * usual
        raise RequestError(
            f"hardware = {text!r}: a node has {usual} {name}, and {devices} fill no whole number "
            f"of nodes; give {less}x{name} or {more}x{name}, or say how many nodes there are and "
            f"how many each has: 2x{-(-devices // 2)}x{name}"
        )
    return devices // usual, usual


def _part(entry: Entry, devices: int, nodes: int) -> Entry:
    """Nodes of so many devices: the host has grown or shrunk with them."""
    share = devices / entry.devices
    host = {
        key: None if (whole := getattr(entry, key)) is None else whole * share
        for key in ("host_memory", "host_bandwidth", "nvme", "nvme_bandwidth")
    }
    return entry.model_copy(update={**host, "devices": devices, "nodes": nodes})


def cluster_of(entry: Entry, price: float | None = None, calibrated: bool = False) -> Cluster:
    """An entry as a value; `price` of one device for an hour, where it is not the entry's."""
    device = Device(
        name=entry.name,
        kind=entry.kind,
        memory_bytes=round(entry.memory),
        flops=dict(entry.flops),
        bandwidth=entry.bandwidth,
        watts=entry.watts,
        compute_capability=entry.compute_capability,
        source=entry.source,
    )
    link, host_link, network = (
        Link(x.name, x.bandwidth, x.latency) for x in (entry.link, entry.host_link, entry.network)
    )
    node = Node(
        device=device,
        devices=entry.devices,
        link=link,
        host_link=host_link,
        host_memory_bytes=round(entry.host_memory),
        host_bandwidth=entry.host_bandwidth,
        nvme_bytes=round(entry.nvme or 0),
        nvme_bandwidth=entry.nvme_bandwidth or 0.0,
    )
    several = f"{entry.nodes}x" if entry.nodes > 1 else ""
    return Cluster(
        node=node,
        nodes=entry.nodes,
        network=network,
        price_per_hour=entry.price_per_hour if price is None else price,
        price_source=entry.price_source if price is None else "",
        currency=entry.currency,
        name=f"{several}{entry.devices}x{entry.name}",
        calibrated=calibrated,
    )


def _own(path: Path) -> Entry:
    """A file of one's own."""
    try:
        values: Any = YAML(typ="rt", pure=True).load(path.read_text(encoding="utf-8"))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise RequestError(f"{path}{line}: not valid YAML: {error.problem}") from error
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        raise RequestError(f"{path}: cannot read the hardware file: {error}") from error
    if not hasattr(values, "lc") or not hasattr(values, "items"):
        raise RequestError(f"{path}:1: hardware is a table of figures; see docs/hardware.md")
    lines = {str(key): values.lc.key(key)[0] + 1 for key in values}
    problems = []
    keys = [*_REFERENCES, *Entry.model_fields]
    for key, line in lines.items():
        if key not in keys:
            problems.append(f"{path}:{line}: {key}: unknown key; {_nearest(key, keys)}")
    if problems:
        raise RequestError("\n".join(problems))
    try:
        return Entry.model_validate(known().complete({"name": path.stem, **values}))
    except LookupError as error:
        key, kind = error.args
        near = known().near(kind, str(values.get(key)))
        hint = f"did you mean {' or '.join(near)}?" if near else "see docs/hardware.md"
        place = f"{path}:{lines[key]}: {key} = {values.get(key)!r}"
        raise RequestError(f"{place}: unknown; {hint}") from None
    except ValidationError as error:
        raise RequestError("\n".join(_told(path, lines, error))) from None


def _told(path: Path, lines: dict[str, int], error: ValidationError) -> Iterable[str]:
    for item in error.errors(include_url=False, include_context=False):
        key, *inner = (str(part) for part in item["loc"])
        place = f"{path}:{lines.get(key, 1)}: {'.'.join((key, *inner))}"
        said = item["msg"].removeprefix("Value error, ").replace("Input should be", "should be")
        if item["type"] == "missing":
            said = "missing; give it, or `like:` with a device that has it"
        elif item["type"] == "extra_forbidden":
            said = f"unknown key; {_nearest(inner[-1], list(LinkEntry.model_fields))}"
        yield f"{place}: {said}"


def _nearest(key: str, keys: list[str]) -> str:
    near = difflib.get_close_matches(key, keys, n=1)
    return f"did you mean `{near[0]}`?" if near else f"known here: {', '.join(keys)}"
