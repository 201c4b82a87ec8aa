# SPDX-License-Identifier: Apache-2.0
"""What a fleet serves on which GPUs, and what it is told if that cannot be said."""

from dataclasses import replace
from typing import Any

import pytest

from poc_operator.apis.v1alpha1.reasons import Reason
from poc_operator.fleets.render import render
from poc_operator.fleets.resolve import Invalid, Refusal, Resolved, Surroundings, resolve
from tests.unit.poc_operator.fleets.build import AROUND, a_fleet

GLM: dict[str, Any] = {"model": {"preset": "glm-5.3-flash"}}
MINIMAX: dict[str, Any] = {"model": {"preset": "minimax-m2.7"}}


def resolved(around: Surroundings = AROUND, *, chosen: str = "", **spec: Any) -> Resolved:  # noqa: ANN401
    found = resolve(a_fleet(**spec).spec, around, chosen=chosen)
    assert isinstance(found, Resolved), found
    return found


def refused(around: Surroundings = AROUND, **spec: Any) -> Refusal:  # noqa: ANN401
    found = resolve(a_fleet(**spec).spec, around)
    assert isinstance(found, Refusal), found
    return found


def test_a_preset_takes_the_product_of_the_cluster() -> None:
    found = resolved(**MINIMAX)
    assert (found.model, found.gpu_product, found.gpu_count) == ("MiniMaxAI/MiniMax-M2.7", "NVIDIA-H200", 2)
    assert (found.tensor, found.pipeline, found.nonces_per_minute) == (2, 1, 1728)
    assert "--max-num-seqs=608" in found.args
    assert found.stat_test.dist_threshold == "0.75"


def test_a_combination_that_a_preset_lacks_is_refused_with_the_nearest() -> None:
    found = refused(**GLM, gpu={"product": "NVIDIA-H200", "count": 2})
    assert found.reason is Reason.GPU_UNSUPPORTED
    assert "preset glm-5.3-flash has no entry for 2 × NVIDIA-H200; the nearest is 4 × H200" in found.message  # noqa: RUF001
    other = refused(**GLM, gpu={"product": "Tesla-T4", "count": 7})
    assert "the nearest is 8 × H100" in other.message  # noqa: RUF001


@pytest.mark.parametrize(
    ("products", "says"),
    [
        (None, "the operator may not read the labels of Kubernetes nodes: set gpu.product"),
        ([], "the Kubernetes nodes have no label nvidia.com/gpu.product"),
        (
            ["Tesla-T4"],
            "the Kubernetes nodes have Tesla-T4; preset minimax-m2.7 has an entry for none of them (4 ",
        ),
        (["NVIDIA-B200", "NVIDIA-H200"], "has an entry for several of them: set gpu.product"),
    ],
)
def test_a_product_that_cannot_be_told_is_asked_for(products: list[str] | None, says: str) -> None:
    found = refused(replace(AROUND, products=products), **MINIMAX)
    assert found.reason is Reason.GPU_UNKNOWN
    assert says in found.message


def test_products_that_the_preset_does_not_know_are_in_nobodys_way() -> None:
    assert resolved(replace(AROUND, products=["NVIDIA-B200", "Tesla-T4"]), **MINIMAX).gpu_product == "NVIDIA-B200"


def test_a_fleet_keeps_its_product_when_kubernetes_nodes_come_and_go() -> None:
    for products in ([], None, ["NVIDIA-B200", "NVIDIA-H200"]):
        around = replace(AROUND, products=products)
        assert resolved(around, chosen="NVIDIA-H200", **MINIMAX).gpu_product == "NVIDIA-H200"
    told = resolved(chosen="NVIDIA-H200", **MINIMAX, gpu={"product": "NVIDIA-B200"})
    assert told.gpu_product == "NVIDIA-B200"


def test_a_part_of_a_products_name_is_refused_with_the_whole() -> None:
    """The presets say "H200"; the label of a Kubernetes node has more words."""
    around = replace(AROUND, products=["NVIDIA-H200", "NVIDIA-B200"])
    for product in ("H200", "h200"):
        found = refused(around, **MINIMAX, gpu={"product": product})
        assert f'={product}: set gpu.product to "NVIDIA-H200"' in found.message
    for product in ("NVIDIA-H200", "NVIDIA-H200-NVL"):  # a node of the latter may come
        assert resolved(around, **MINIMAX, gpu={"product": product}).gpu_product == product


def test_a_preset_for_any_gpu_asks_for_no_product() -> None:
    found = resolved(replace(AROUND, products=None), model={"preset": "qwen3-0.6b"})
    assert (found.gpu_product, found.gpu_count) == (None, 1)


@pytest.mark.parametrize(
    ("spec", "gpus", "ranks"),
    [
        ({}, 0, (1, 1)),
        ({"gpu": {"count": 4}}, 4, (4, 1)),
        ({"gpu": {"count": 4}, "parallelism": {"tensor": 2, "pipeline": 2}}, 4, (2, 2)),
    ],
)
def test_all_gpus_of_a_pod_share_the_model(spec: dict[str, Any], gpus: int, ranks: tuple[int, int]) -> None:
    found = resolved(**spec)
    assert (found.model, found.gpu_count, (found.tensor, found.pipeline)) == ("org/model", gpus, ranks)


def test_without_an_image_nothing_can_be_run() -> None:
    around = replace(AROUND, image=None)
    assert refused(around).reason is Reason.IMAGE_MISSING
    assert resolved(around, image="own:1")


def test_an_unknown_preset_is_told_the_known_ones() -> None:
    found = refused(model={"preset": "minimax"})
    assert found.reason is Reason.PRESET_UNUSABLE
    assert 'there is no preset "minimax": choose one of deepseek-v4-flash, glm-5.3-flash, minimax-m2.7' in found.message


def test_an_invalid_preset_says_why() -> None:
    around = replace(AROUND, presets={"bad": Invalid("kDim: is missing")})
    assert "kDim: is missing" in refused(around, model={"preset": "bad"}).message


def test_a_cache_must_hold_the_weights() -> None:
    found = refused(**GLM, gpu={"product": "NVIDIA-H200"}, cache={"size": "300Gi"})
    assert found.reason is Reason.CACHE_TOO_SMALL
    assert "300Gi" in found.message
    assert "306 GiB" in found.message
    assert resolved(**GLM, gpu={"product": "NVIDIA-H200"}, cache={"size": "1Ti"})


@pytest.mark.parametrize(
    ("spec", "seconds"),
    [
        ({"model": {"path": "org/model"}}, 3600),
        ({"model": {"preset": "minimax-m2.7"}}, 3600 + 215 * 50),
        ({"model": {"preset": "minimax-m2.7"}, "startupSeconds": 600}, 600),
        ({"model": {"path": "org/model"}, "startupSeconds": 14_400}, 14_400),
        ({"model": {"preset": "minimax-m2.7"}, "huggingFace": {"offline": True}}, 3600),
    ],
)
def test_a_pod_has_the_time_that_the_download_of_its_weights_takes(spec: dict[str, Any], seconds: int) -> None:
    around = replace(AROUND, products=["NVIDIA-H200"])
    found = resolved(around, **spec)
    assert found.startup_seconds == seconds
    (workload,) = [body for body in render(a_fleet(**spec), found, around) if body["kind"] == "StatefulSet"]
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == seconds
