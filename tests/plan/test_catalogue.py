"""Machines by name: the catalogue, files of one's own, this machine."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from rostra.errors import RequestError
from rostra.hardware import (
    PRECISIONS,
    Gpu,
    calibration_path,
    device_names,
    load_calibration,
    machine,
    probe,
    read_cluster,
    save_calibration,
    this_cluster,
)
from rostra.hardware.catalogue import known
from rostra.hardware.quantity import quantity
from support import REPOSITORY


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("8xH100", "8xH100"),
        ("h100", "1xH100"),
        ("2xL4", "2xL4"),
        ("4x8xA100-80GB", "4x8xA100-80GB"),
        ("2x RTX 4090", "2xRTX-4090"),
        ("2 × NVIDIA GeForce RTX 4090", "2xRTX-4090"),
        ("16xH100", "2x8xH100"),
        ("a100", "1xA100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "1xA100-40GB"),
        ("72xGB200", "72xGB200"),
        ("1x16xV100", "1x16xV100-16GB"),
        ("80GB A100 SXM4", "1xA100-80GB"),
        ("A100 40G", "1xA100-40GB"),
        ("h100_96gb_hbm2e_500w", "1xH100-96GB"),
        ("4090", "1xRTX-4090"),
        ("4xT4-16GB", "4xT4"),
        ("RTX 3090 (24 GB)", "1xRTX-3090"),
        ("L40S-48GB", "1xL40S"),
        ("2x4090", "2xRTX-4090"),
        ("2x 3090 Ti", "2xRTX-3090-Ti"),
    ],
)
def test_names_are_read_however_they_are_written(text: str, name: str) -> None:
    cluster = read_cluster(text)
    assert cluster.name == name
    assert read_cluster(cluster.name) == cluster


# Names that PyTorch gives to devices.
@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("Tesla V100-PCIE-16GB", "V100-16GB-PCIe"),
        ("Tesla T4", "T4"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB-PCIe"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_a_device_is_known_by_the_name_that_torch_gives_it(reported: str, name: str) -> None:
    assert known().find("devices", reported) == name


def test_every_entry_is_complete_and_lawful() -> None:
    for name in device_names():
        cluster = read_cluster(name)
        device, node = cluster.device, cluster.node
        assert device.source, name
        assert node.host_memory_bytes > 0 and node.host_bandwidth > 0, name
        assert set(device.flops) <= set(PRECISIONS), name
        peaks = [device.flops[p] for p in ("fp32", "tf32", "bf16", "fp8") if p in device.flops]
        assert peaks == sorted(peaks), name
        assert cluster.price_per_hour is None or 0 < cluster.price_per_hour < 20, name
        # no device reads its own memory slower than others' through a link
        assert cluster.network.bandwidth <= node.link.bandwidth < device.bandwidth, name
        assert 1e-6 <= cluster.network.latency <= 1e-4, name
        assert cluster.price_per_hour is None or cluster.price_source, name


def test_figures_are_those_of_the_data_sheets() -> None:
    a100, h100 = read_cluster("8xA100-80GB"), read_cluster("8xH100")
    assert (a100.device.flops["bf16"], h100.device.flops["bf16"]) == (312e12, 989.4e12)
    assert (a100.node.link.bandwidth, h100.node.link.bandwidth) == (300e9, 450e9)
    assert h100.network.bandwidth == 50e9  # 400 Gb/s
    assert h100.device.memory_bytes == pytest.approx(79.1 * 2**30, rel=0.01)
    assert "bf16" not in read_cluster("T4").device.flops


def test_a_part_of_a_node_has_a_part_of_its_host() -> None:
    whole, half = read_cluster("8xA100-80GB").node, read_cluster("4xA100-80GB").node
    assert half.host_memory_bytes == whole.host_memory_bytes / 2
    assert half.nvme_bandwidth == whole.nvme_bandwidth / 2
    assert half.link == whole.link and half.host_link == whole.host_link


def test_the_documented_table_is_the_catalogue() -> None:
    page = (REPOSITORY / "docs" / "hardware.md").read_text()
    for name in device_names():
        cluster = read_cluster(name)
        device, usual = cluster.device, known().device(name)["devices"]
        kind = "bf16" if "bf16" in device.flops else "fp16"
        peak = f"{device.flops[kind] / 1e12:.4g}" + ("" if kind == "bf16" else " (fp16)")
        price = "" if cluster.price_per_hour is None else f"{cluster.price_per_hour:.2f}"
        row = (
            f"| {name} | {device.memory_bytes / 2**30:.1f} | {peak} | "
            f"{device.bandwidth / 1e9:.0f} | {usual} | {cluster.node.link.name} | "
            f"{cluster.network.bandwidth * 8e-9:.4g} | {price} |"
        )
        assert row in page, row


def test_a_price_of_ones_own_wins() -> None:
    given = read_cluster("8xH100", price=2.5)
    assert (given.price_per_hour, given.price_source) == (2.5, "")
    assert read_cluster("8xH100", price=0).price_per_hour == 0
    with pytest.raises(RequestError, match="zero or more"):
        read_cluster("8xH100", price=-1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("8xH1000", "did you mean H100"),
        ("a100-32gb", "did you mean .*A100-40GB"),
        ("RTX 4099", "did you mean RTX-4090"),
        ("T4-32GB", "did you mean .*T4"),
        ("12xH100", "8xH100 or 16xH100.*2x6xH100"),
        ("0xH100", "at the least"),
        ("tpu", "known: .*H100.*YAML file"),
        ("", "unknown device"),
        ("8x", "unknown device"),
    ],
)
def test_what_cannot_be_read_is_said_with_the_nearest(text: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        read_cluster(text)


OWN = """\
name: Castor
memory: 40 GiB
bandwidth: 1.2 TB/s
flops: {fp32: 20 TFLOPS, bf16: 2.5e14}
watts: 300
devices: 4
link: {name: Pollux, bandwidth: 80 GB/s, latency: 2 us}
host_link: PCIe 5 x16
host_memory: 256 GB
host_bandwidth: 300 GB/s
nodes: 2
network: InfiniBand HDR
price_per_hour: 1.5
currency: EUR
"""


def test_a_device_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "castor.yaml"
    path.write_text(OWN)
    cluster = read_cluster(str(path))
    assert (cluster.name, cluster.devices) == ("2x4xCastor", 8)
    assert cluster.device.flops == {"fp32": 20e12, "bf16": 250e12}
    assert cluster.device.memory_bytes == 40 * 2**30
    assert cluster.node.link.latency == 2e-6
    assert cluster.network.bandwidth == 25e9
    assert cluster.node.nvme_bytes == 0
    assert (cluster.price_per_hour, cluster.currency) == (1.5, "EUR")
    assert read_cluster(str(path), price=1).price_per_hour == 1


def test_the_documented_files_are_read(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "hardware.md").read_text()
    files = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    for index, text in enumerate(files):
        (tmp_path / f"{index}.yaml").write_text(text)
        read_cluster(str(tmp_path / f"{index}.yaml"))
    assert len(files) == 2


def test_a_known_device_with_changes(tmp_path: Path) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text(
        "like: H100\nname: H100 at 500 W\nwatts: 500\nnodes: 4\nnetwork: EFA 400\n"
        "price_per_hour: 2\n"
    )
    ours, plain = read_cluster(str(path)), read_cluster("4x8xH100")
    assert ours.network.latency == 20e-6
    assert (ours.price_per_hour, ours.price_source) == (2, "")
    assert ours.name == "4x8xH100 at 500 W"
    changed = replace(plain.device, name="H100 at 500 W", watts=500)
    assert ours.device == changed and ours.node == replace(plain.node, device=changed)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("watts: 300", "wats: 300"), r"castor\.yaml:5: wats: unknown key; did you mean `watts`"),
        (("40 GiB", ".inf"), r"castor\.yaml:2: memory: should be a finite number"),
        (("watts: 300\n", ""), r"watts: missing; give it, or `like:`"),
        (("1.2 TB/s", "1.2 TB"), r"castor\.yaml:3: bandwidth: '1.2 TB' is no figure in B/s"),
        (("watts: 300", "watts: -300"), r"castor\.yaml:5: watts: should be greater than 0"),
        (("PCIe 5 x16", "PCIe 6 x16"), r"yaml:8: host_link = 'PCIe 6 x16': unknown; did you mean"),
        (("latency: 2 us", "delay: 2 us"), r"yaml:7: link\.delay: unknown key.*latency"),
        (("name: Castor", "like: H1O0"), r"yaml:1: like = 'H1O0': unknown; did you mean H100"),
        (("nodes: 2", "nodes: 0"), r"castor\.yaml:11: nodes: should be greater than or equal"),
        (("flops: {fp32", "flops: {fp33"), r"castor\.yaml:4: flops\.fp33"),
        (("memory: 40 GiB", "memory: ["), r"castor\.yaml:\d+: not valid YAML"),
    ],
)
def test_mistakes_in_a_file_name_line_and_key(
    tmp_path: Path, change: tuple[str, str], said: str
) -> None:
    path = tmp_path / "castor.yaml"
    path.write_text(OWN.replace(*change))
    with pytest.raises(RequestError, match=said):
        read_cluster(str(path))


def test_a_file_that_is_not_there_or_no_table(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot read the hardware file"):
        read_cluster(str(tmp_path / "none.yaml"))
    (tmp_path / "list.yaml").write_text("- H100\n")
    with pytest.raises(RequestError, match="a table of figures"):
        read_cluster(str(tmp_path / "list.yaml"))


def test_figures_with_units() -> None:
    assert quantity("3.35 TB/s", "B/s") == 3.35e12
    assert quantity("400 Gb/s", "B/s") == 50e9
    assert quantity("400Gbps", "B/s") == 50e9
    assert quantity("79.1 GiB", "B") == 79.1 * 2**30
    assert quantity("2.5e14", "FLOPS") == 2.5e14
    assert quantity("130 TOPS", "FLOPS") == 130e12
    assert quantity("14 us", "s") == pytest.approx(14e-6)
    for wrong in ("3 apples", "GB", "3 GB/s", True, None):
        with pytest.raises(ValueError, match="no figure in B"):
            quantity(wrong, "B")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROSTRA_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("cache")
def test_this_machine_without_a_calibration() -> None:
    cluster, hardware = this_cluster(), probe()
    assert cluster.devices == max(1, len(hardware.gpus))
    assert cluster.node.host_memory_bytes == hardware.memory_bytes
    assert not cluster.calibrated
    assert (cluster.price_per_hour, cluster.price_source) == (None, "")
    assert cluster.device.flops["fp32"] > 0
    assert this_cluster(price=0.3).price_per_hour == 0.3


@pytest.mark.usefixtures("cache")
@pytest.mark.skipif(bool(probe().gpus), reason="of machines without GPUs")
def test_ranks_share_the_processors() -> None:
    one, four = this_cluster(), this_cluster(ranks=4)
    assert (one.devices, four.devices) == (1, 4)
    assert four.device.memory_bytes == pytest.approx(one.device.memory_bytes / 4, abs=1)
    assert four.device.flops == {k: v / 4 for k, v in one.device.flops.items()}
    assert four.device.bandwidth == one.device.bandwidth / 4
    assert four.node.host_memory_bytes == one.node.host_memory_bytes


MEASURED = {
    "flops": {"fp32": 2e11, "bf16": 4e11},
    "bandwidth": 2e10,
    "links": {"2": {"bandwidth": 3e9, "latency": 1e-4}, "4": {"bandwidth": 1e9, "latency": 3e-4}},
    "disk": {"write": 5e8, "read": 1e9},
}


@pytest.mark.skipif(bool(probe().gpus), reason="of machines without GPUs")
def test_what_was_measured_here_is_used(cache: Path) -> None:
    assert save_calibration(MEASURED) == calibration_path() == cache / "calibration.json"
    cluster = this_cluster(ranks=3)
    assert cluster.calibrated
    assert cluster.device.flops == {"fp32": 2e11 / 3, "bf16": 4e11 / 3}
    assert (cluster.node.link.bandwidth, cluster.node.link.latency) == (3e9, 1e-4)
    assert this_cluster(ranks=4).node.link.bandwidth == 1e9
    assert cluster.node.nvme_bandwidth == 1e9


def test_what_was_measured_elsewhere_is_not_used_and_said(cache: Path) -> None:
    save_calibration(MEASURED)
    assert load_calibration() == MEASURED
    content = json.loads((cache / "calibration.json").read_text())
    content["machine"]["cores"] = 9000
    (cache / "calibration.json").write_text(json.dumps(content))
    said: list[str] = []
    assert not this_cluster(notice=said.append).calibrated
    assert len(said) == 1 and "cores was 9000, is" in said[0] and "rostra calibrate" in said[0]
    (cache / "calibration.json").write_text("{")
    assert load_calibration(notice=said.append) is None
    assert "cannot be read" in said[1]


@pytest.mark.usefixtures("cache")
def test_gpus_of_this_machine_are_the_catalogue_s(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    gpu = Gpu("NVIDIA A100-SXM4-80GB", 85_100_000_000, (8, 0))
    found = replace(probe(), gpus=(gpu, gpu), accelerator="cuda")
    monkeypatch.setattr(machine, "probe", lambda: found)
    monkeypatch.setattr(machine, "best_device", lambda: torch.device("cuda"))
    cluster = this_cluster()
    assert cluster.name == "2xA100-80GB"
    assert cluster.device.memory_bytes == 85_100_000_000
    assert cluster.node.link.name == "NVLink 3"
    assert (cluster.price_per_hour, cluster.price_source) == (None, "")
    assert cluster.node.host_memory_bytes == found.memory_bytes
    assert this_cluster(ranks=1).devices == 1
    with pytest.raises(RequestError, match="3 ranks: this machine has 2 A100-80GB"):
        this_cluster(ranks=3)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("name", "capability", "multiprocessors", "clock", "bf16"),
    [  # peaks of data sheets
        ("NVIDIA GeForce RTX 4070", (8, 9), 46, 2475e3, 58.3e12),
        ("NVIDIA L40 (unheard-of)", (8, 9), 142, 2490e3, 362.1e12),
        ("NVIDIA H100 unheard-of", (9, 0), 132, 1830e3, 989.4e12),
        ("NVIDIA A800", (8, 0), 108, 1410e3, 312e12),
    ],
)
def test_gpus_of_no_catalogue_are_estimated(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    capability: tuple[int, int],
    multiprocessors: int,
    clock: float,
    bf16: float,
) -> None:
    import torch

    class Properties:
        multi_processor_count = multiprocessors
        clock_rate = clock
        memory_clock_rate = 10_501_000
        memory_bus_width = 192

    found = replace(probe(), gpus=(Gpu(name, 12 * 2**30, capability),), accelerator="cuda")
    monkeypatch.setattr(machine, "probe", lambda: found)
    monkeypatch.setattr(machine, "best_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    device = this_cluster().device
    assert device.flops["bf16"] == pytest.approx(bf16, rel=0.02)
    assert device.bandwidth == pytest.approx(504e9, rel=0.01)
    assert device.source.startswith("estimated")
