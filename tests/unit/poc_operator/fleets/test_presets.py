# SPDX-License-Identifier: Apache-2.0
"""Presets: those of the package, those of ConfigMaps, and what a wrong one says."""

from fnmatch import fnmatchcase

import pytest
import yaml

from poc_gateway.node_api.job_results import NETWORK_DISTANCES
from poc_operator.apis.v1alpha1.fleet import FleetSpec
from poc_operator.fleets.resolve import (
    Invalid,
    Preset,
    PresetError,
    PresetStatTest,
    Resolved,
    packaged,
    parse_preset,
    resolve,
    with_config_maps,
)
from tests.docs.pages import ROOT
from tests.unit.poc_operator.fleets.build import AROUND
from vllm_poc.wire.messages import Protocol

SMALL = """
name: small
model: org/small
seqLen: 64
kDim: 12
gpus:
  - {product: H200, count: 2, tensor: 2}
"""

#: Nonces per minute on 8 GPUs that the network has published for prefill.
PUBLISHED = {
    "minimax-m2.7": {"H100": 4736, "H200": 6912, "B200": 10496, "B300": 14336},
    "glm-5.3-flash": {"H100": 1775, "H200": 2878, "B200": 5454, "B300": 8120},
    "deepseek-v4-flash": {"H100": 3072, "H200": 4864, "B200": 9216, "B300": 13824},
}


def packaged_preset(name: str) -> Preset:
    found = packaged()[name]
    assert isinstance(found, Preset)
    return found


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_figures_of_the_networks_models_are_the_published_ones(name: str) -> None:
    preset = packaged_preset(name)
    assert preset.revision
    assert (preset.seq_len, preset.k_dim) == (1024, 12)
    assert preset.stat_test is not None
    network = preset.stat_test.thresholds(Protocol.ARTIFACT)
    # As the gateway judges by.
    assert network.dist_threshold == next(
        distance for pattern, distance in NETWORK_DISTANCES.items() if fnmatchcase(preset.model.lower(), pattern)
    )
    assert (network.p_mismatch, network.p_value_threshold) == (0.1, 0.05)
    figures = {gpu.product: (gpu.nonces_per_minute or 0) * 8 / gpu.count for gpu in preset.gpus}
    assert figures == PUBLISHED[name]


@pytest.mark.parametrize("name", packaged())
def test_a_packaged_preset_bears_the_name_of_its_file_and_sets_each_flag_once(name: str) -> None:
    preset = packaged_preset(name)
    for gpu in preset.gpus:
        flags = [flag.partition("=")[0] for flag in (*preset.args, *gpu.args)]
        assert len(flags) == len(set(flags)), flags


@pytest.mark.parametrize(
    ("product", "fits"),
    [
        ("NVIDIA-H200", True),
        ("H200", True),
        ("NVIDIA-H200-NVL", True),
        ("NVIDIA-GH200-480GB", False),
        ("NVIDIA-H100-80GB-HBM3", False),
        ("NVIDIA-H200-MIG-1g.18gb", False),
        ("NVIDIA-H200-SHARED", False),
    ],
)
def test_an_entry_fits_whole_gpus_of_its_product(product: str, fits: bool) -> None:
    entry = packaged_preset("minimax-m2.7").entry(product, 2)
    assert (entry is not None) == fits


def test_without_a_number_the_entry_with_the_fewest_gpus_is_taken() -> None:
    more = parse_preset(SMALL + "  - {product: H200, count: 4, tensor: 4}\n  - {product: H200, count: 1, tensor: 1}\n")
    entry = more.entry("NVIDIA-H200", None)
    assert entry is not None
    assert entry.count == 1


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("kDim: 12", "kDim: twelve", "kDim"),
        ("kDim: 12\n", "", "kDim: Field required"),
        ("count: 2", "count: 0", "gpus.0.count"),
        ("tensor: 2", "tensor: 1", "tensor * pipeline must be count: 1 * 1 is not 2"),
        ("seqLen", "seqlen", "seqLen"),
        ("tensor: 2", "tensor: 2, args: [--port=1]", "must not set --port=1"),
        ("tensor: 2", "tensor: 2, args: [--tensor_parallel_size=1]", "must not set --tensor_parallel_size=1"),
        ("tensor: 2", "tensor: 2, env: {VLLM_POC_OPEN: '1'}", "must not set VLLM_POC_OPEN"),
        ("tensor: 2", "tensor: 2, args: [max-model-len]", "gpus.0.args.0"),
        ("kDim: 12", "kDim: 12\nstatTest: {distThreshold: 0.4}", "statTest.distThreshold: "),
        ("kDim: 12", "kDim: 12\nstatTest: {pMismatch: '2'}", "must be a decimal above 0 and below 1 in quotes"),
        ("kDim: 12", "kDim: 12\nstatTest: {distance: '0.4'}", "statTest.distance: Extra inputs"),
        ("name: small", "name: [", "it is no YAML"),
        ("name: small", "name: small\nrevision: 2024-13-01", "it is no YAML of a preset: month must be in 1..12"),
        ("name: small", "name: small\n2024-01-01: x", "it is no YAML of a preset: keys must be str"),
        ("name: small", "name: &a [*a]", "it is no YAML of a preset: Circular reference detected"),
        ("kDim: 12", f"kDim: {'9' * 5000}", "it is no YAML of a preset: Exceeds the limit"),
        ("name: small", "name: " + "[" * 5000, "it is no YAML of a preset: "),
        (SMALL, "- 1", "it: "),
        (SMALL, "", "it: "),
    ],
)
def test_a_wrong_preset_names_its_field(old: str, new: str, says: str) -> None:
    assert old in SMALL
    with pytest.raises(PresetError, match=r".") as error:
        parse_preset(SMALL.replace(old, new))
    assert says in str(error.value)


def test_presets_of_config_maps_come_beside_those_of_the_package() -> None:
    found = with_config_maps([("own", "small.yaml", SMALL)])
    assert found.keys() == {*packaged(), "small"}
    assert isinstance(found["small"], Preset)


def test_a_preset_of_a_config_map_may_have_the_networks_test() -> None:
    found = with_config_maps([("own", "small.yaml", SMALL + 'statTest: {distThreshold: "0.6"}\n')])["small"]
    assert isinstance(found, Preset)
    assert (found.stat_test, parse_preset(SMALL).stat_test) == (PresetStatTest(dist_threshold="0.6"), None)


def test_a_wrong_preset_of_a_config_map_harms_no_other_and_says_where_it_is() -> None:
    other = SMALL.replace("name: small", "name: other")
    found = with_config_maps(
        [
            ("own", "bad.yaml", "- 1"),
            ("own", "small.yaml", SMALL),
            ("own", "x.yaml", other),
            ("two", "small.yaml", SMALL),
        ]
    )
    assert found["bad"] == Invalid('key "bad.yaml" of ConfigMap "own": it: Input should be an object')
    assert found["x"] == Invalid('key "x.yaml" of ConfigMap "own": name is "other": the key must be "other.yaml"')
    assert isinstance(found["small"], Invalid)
    assert "another ConfigMap has this preset too" in found["small"].why
    assert all(found[name] == preset for name, preset in packaged().items())


EXAMPLES = [
    FleetSpec.model_validate(body["spec"])
    for path in sorted((ROOT / "docs" / "examples").glob("fleet-*.yaml"))
    for body in yaml.safe_load_all(path.read_text())
]


@pytest.mark.parametrize("name", packaged())
def test_each_packaged_preset_has_an_example_that_works(name: str) -> None:
    found = [spec for spec in EXAMPLES if spec.model.preset == name]
    assert found
    for spec in found:
        resolved = resolve(spec, AROUND, chosen="")
        assert isinstance(resolved, Resolved), resolved
        assert resolved.model == packaged_preset(name).model
