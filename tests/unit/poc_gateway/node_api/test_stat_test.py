# SPDX-License-Identifier: Apache-2.0
"""By which thresholds a validation is judged: the request's, the settings', the network's."""

from typing import Any

import pytest
from pydantic import ValidationError

from poc_gateway.node_api.job_results import stat_test_of
from poc_gateway.node_api.messages import NetworkGenerate
from poc_gateway.settings import Settings
from tests.unit.poc_gateway.node_api.requests import PARAMS, validation

Thresholds = tuple[float, float, float]


def judged(model: str, stat_test: Any, **settings: str) -> Thresholds:  # noqa: ANN401
    body = validation(params=PARAMS | {"model": model}, stat_test=stat_test)
    environment = {f"POC_GATEWAY_{name.upper()}": value for name, value in settings.items()}
    test = stat_test_of(NetworkGenerate.model_validate(body), Settings.from_environment(environment))
    return test.dist_threshold, test.p_mismatch, test.fraud_threshold


@pytest.mark.parametrize(
    ("model", "distance"),
    [
        ("MiniMaxAI/MiniMax-M2.7", 0.75),
        ("deepseek-ai/DeepSeek-V4-Flash-0731", 0.41),
        ("zai-org/GLM-5.3-Flash", 0.44),
        ("Qwen/Qwen3-0.6B", 0.4),
    ],
)
@pytest.mark.parametrize("stat_test", [None, {}])
def test_the_networks_thresholds_are_the_default(model: str, distance: float, stat_test: Any) -> None:  # noqa: ANN401
    assert judged(model, stat_test) == (distance, 0.1, 0.01)


@pytest.mark.parametrize(
    ("stat_test", "tau"), [(None, 0.025), ({"p_mismatch": 0.1}, 0.02), ({"dist_threshold": 0.03}, 0.03)]
)
def test_chains_are_not_judged_by_a_distance_of_vectors(stat_test: Any, tau: float) -> None:  # noqa: ANN401
    """Hardly any wrong chain is as far off as two vectors may be."""
    body = validation(params=PARAMS | {"model": "m", "decode": True, "max_tokens": 12}, stat_test=stat_test)
    settings = Settings.from_environment({"POC_GATEWAY_STAT_TESTS": '{"*": {"dist_threshold": 0.7}}'})
    test = stat_test_of(NetworkGenerate.model_validate(body), settings)
    assert (test.dist_threshold, test.p_mismatch, test.fraud_threshold) == (tau, 0.1, 0.01)


def test_the_request_comes_first_then_the_settings() -> None:
    tests = '{"*minimax*": {"dist_threshold": 0.7, "fraud_threshold": 0.02}, "*": {"p_mismatch": 0.2}}'
    model = "MiniMaxAI/MiniMax-M2.7"
    assert judged(model, None, stat_tests=tests) == (0.7, 0.1, 0.02)
    assert judged(model, {"dist_threshold": 0.5, "p_mismatch": 0.3}, stat_tests=tests) == (0.5, 0.3, 0.02)
    assert judged("other", None, stat_tests=tests) == (0.4, 0.2, 0.01)


def test_the_chains_threshold_yields_to_the_requests_own() -> None:
    sent = {"p_value_threshold": 0.05}
    assert judged("m", sent) == (0.4, 0.1, 0.01)
    assert judged("m", sent, p_value_threshold="apply") == (0.4, 0.1, 0.05)
    assert judged("m", sent | {"fraud_threshold": 0.02}, p_value_threshold="apply") == (0.4, 0.1, 0.02)
    tests = '{"*": {"fraud_threshold": 0.03}}'
    assert judged("m", sent, p_value_threshold="apply", stat_tests=tests)[2] == 0.05
    assert judged("m", None, p_value_threshold="apply", stat_tests=tests)[2] == 0.03


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be JSON"),
        ('{"*": {"p_value": 1}}', "Extra inputs are not permitted"),
        ('{"*": {"p_mismatch": 2}}', "less than or equal to 1"),
    ],
)
def test_wrong_settings_are_explained(text: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Settings.from_environment({"POC_GATEWAY_STAT_TESTS": text})
