# SPDX-License-Identifier: Apache-2.0
"""What a pod does while it loads: from the words of vLLM to what people see, and what is asked of the cluster."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from poc_operator.cli import looking
from poc_operator.cli.loading import last_line, step_of
from poc_operator.cli.looking import LOG_BYTES, LOG_LINES, MOST_LOGS
from tests.support.fakes.api_paths import ApiPaths
from tests.unit.poc_operator.cli import seen
from tests.unit.poc_operator.cli.conftest import Run

#: All that a server on a CPU wrote until it served, with vLLM 0.32; paths are short.
LOG = (Path(__file__).parent / "loading.txt").read_text()
ENGINE, WORKER = "(EngineCore pid=301) INFO 11-28 10:00:00", "(Worker_TP0 pid=79) INFO 11-28 10:00:00"
SHARDS = "(Worker_TP0 pid=79) Loading safetensors checkpoint shards:  46% Completed | 21/46 [01:02<01:14,  2.97s/it]\n"
GRAPHS = "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE)"


def steps(log: str) -> list[str]:
    """Return the steps that the lines of a log are about, each once where it begins."""
    told = [str(step) for line in log.splitlines() if (step := step_of(line))]
    return [step for step, before in zip(told, ["", *told], strict=False) if step != before]


def test_a_log_tells_each_step_of_a_start() -> None:
    assert steps(LOG) == [
        "starting the engine",
        "reading weights",
        "reading weights 0 % (0 of 1 files)",
        "reading weights 100 % (1 of 1 files)",
        "preparing weights",
        "compiling",
        "measuring memory",
        "warming up kernels",
        "starting the server",
        "preparing PoC",
        "waiting for the startup probe",
    ]


#: What CPUs, one rank and models on a disk do not show, in the words of vLLM's source and of logs from GPUs.
@pytest.mark.parametrize(
    ("line", "step"),
    [
        (f"{WORKER} [gpu_model_runner.py:5040] Starting to load model org/model...", "fetching weights"),
        (f"{WORKER} [gpu_model_runner.py:5040] Starting to load model /models/m...", "reading weights"),
        ("model-00003-of-00046.safetensors:  43%|####3     | 2.15G/5.00G [00:10<00:13]", "downloading weights 43 %"),
        ("model-00003-of-00046.safetensors: downloading bytes:  43%|##  | 2.15G/5.00G", "downloading weights 43 %"),
        ("Downloading [model-00003-of-00046.safetensors]:  43%|##  | 2.15G/5.00G", "downloading weights 43 %"),
        ("Fetching 46 files:   4%|4         | 2/46 [00:10<03:52]", "downloading weights 4 %"),
        (
            f"{WORKER} [weight_utils.py:533] Time spent downloading weights for org/model: 61.5 seconds",
            "reading weights",
        ),
        (SHARDS, "reading weights 46 % (21 of 46 files)"),
        (SHARDS.replace("shards", "shards (eager)"), "reading weights 46 % (21 of 46 files)"),
        (SHARDS.replace("safetensors", "pt"), "reading weights 46 % (21 of 46 files)"),
        (
            "Multi-thread loading shards:  50% Completed | 2/4 [00:01<00:01,  1.0it/s]",
            "reading weights 50 % (2 of 4 files)",
        ),
        (
            "Loading safetensors using Runai Model Streamer:  50% Completed | 200/400 [00:01<00:01,  1.0it/s]",
            "reading weights 50 %",
        ),
        (f"{WORKER} [default_loader.py:501] Loading weights took 27.99 seconds", "preparing weights"),
        (
            f"{WORKER} [gpu_model_runner.py:5150] Model loading took 79.52 GiB memory and 197.7 seconds",
            "measuring memory",
        ),
        (f"{WORKER} [monitor.py:43] Starting torch.compile", "compiling"),
        (f"{WORKER} [backends.py:1104] Using cache directory: /cache/vllm/1 for vLLM's torch.compile", "compiling"),
        (f"{WORKER} [backends.py:1166] [eagle] Dynamo bytecode transform time: 1.26 s", "compiling"),
        (f"{WORKER} [backends.py:398] Compiling a graph for compile range (1, 8192) takes 20.31 s", "compiling"),
        (f"{WORKER} [monitor.py:53] torch.compile took 63.00 s in total", "measuring memory"),
        (f"{WORKER} [monitor.py:81] Initial profiling/warmup run took 14.48 s", "measuring memory"),
        (f"{WORKER} [gpu_worker.py:760] Available KV cache memory: 20.36 GiB", "measuring memory"),
        (f"{ENGINE} [kv_cache_utils.py:1733] GPU KV cache size: 3,076,565 tokens", "warming up kernels"),
        (f"{WORKER} [kernel_warmup.py:291] Warming up FlashInfer attention.", "warming up kernels"),
        ("flashinfer.jit: [Autotuner]: Autotuning process starts ...", "warming up kernels"),
        ("DeepGEMM warmup:  38%|###8      | 546/1447 [00:00<00:00, 2191.25it/s]", "warming up kernels 38 %"),
        (f"{GRAPHS}:  80%|########  | 54/67 [00:09<00:02,  5.43it/s]", "capturing CUDA graphs 80 %"),
        ("Capturing prefill CUDA graphs (FULL): 100%|##########| 35/35", "capturing CUDA graphs 100 %"),
        (
            f"{WORKER} [gpu_model_runner.py:6745] Graph capturing finished in 3 secs, took 0.12 GiB",
            "starting the server",
        ),
        (
            f"{ENGINE} [core.py:302] init engine (profile, create kv cache, warmup model) took 59.60 s",
            "starting the server",
        ),
        (f"{WORKER} [base.py:299] Warming up multi-modal processing...", "None"),
        (f"{WORKER} [utils.py:347] Using LBHNC KV cache layout.", "None"),
        ("", "None"),
    ],
)
def test_a_line_of_vllm_tells_a_step(line: str, step: str) -> None:
    assert str(step_of(line)) == step


def test_the_last_known_words_count_also_within_a_bar_that_writes_over_itself() -> None:
    bar = "".join(f"\r{GRAPHS}: {percent:3}%|# | {percent}/100 [00:01<?]" for percent in (0, 40, 80))
    log = f"{SHARDS}{WORKER} [x.py:1] Loading weights took 2.0 seconds\n{bar}"
    assert str(step_of(log)) == "capturing CUDA graphs 80 %"
    assert str(step_of(f"{log}\n{WORKER} [x.py:1] something new\n")) == "capturing CUDA graphs 80 %"
    assert str(step_of(f"{log}\n{ENGINE} [core.py:1] init engine (profile) took 1 s\n")) == "starting the server"


def test_a_last_line_commands_no_terminal() -> None:
    assert last_line("one\n\x1b[31mtwo\x1b[0m\x07 three\r\n \n") == "two three"
    assert last_line("\n\r\n") == ""


def log_of(name: str) -> str:
    return f"{seen.PODS}/{name}/log"


def test_status_shows_what_pods_that_load_do(run: Run, api: ApiPaths) -> None:
    api.answers |= seen.that_loads("demo-0", "demo-1")
    api.answers |= {log_of("demo-0"): SHARDS, log_of("demo-1"): "nothing that is known\n"}
    done = run("status")
    (known,) = [line for line in done.out.splitlines() if line.startswith("demo-0 ")]
    (other,) = [line for line in done.out.splitlines() if line.startswith("demo-1 ")]
    assert "  Loading: reading weights 46 % (21 of 46 files)  " in known
    assert "  Loading  " in other
    assert "note" not in done.out
    pods = json.loads(run("status", "-o", "json").out)["pods"]
    assert [pod["stage"] for pod in pods] == ["Loading", "Loading"]
    assert [pod["loading"] for pod in pods] == [
        {"step": "reading weights", "percent": 46, "done": 21, "files": 46},
        None,
    ]


def test_only_the_ends_of_few_logs_are_read(run: Run, api: ApiPaths) -> None:
    names = [f"demo-{number}" for number in range(MOST_LOGS + 2)]
    api.answers |= seen.that_loads(*names)
    api.answers[seen.PODS].append(seen.a_pod("demo-ready"))
    api.answers |= {log_of(name): SHARDS for name in names}
    run("status")
    asked = [one for one in api.asked if one.path.endswith("/log")]
    assert sorted(one.path for one in asked) == sorted(map(log_of, names[:MOST_LOGS]))
    wanted = {"container": "vllm", "previous": "false", "tailLines": str(LOG_LINES), "limitBytes": str(LOG_BYTES)}
    assert all(one.query == {name: [value] for name, value in wanted.items()} for one in asked)


def test_no_log_is_read_of_pods_that_serve_or_end(run: Run, api: ApiPaths) -> None:
    run("status")
    api.answers |= seen.that_loads("demo-0")
    api.answers[seen.PODS][0]["metadata"]["deletionTimestamp"] = seen.START.isoformat()
    assert "Terminating" in run("status").out
    assert [one.path for one in api.asked if one.path.endswith("/log")] == []


def test_a_log_that_is_cut_is_read_again_for_its_end(run: Run, api: ApiPaths) -> None:
    """The kubelet counts bytes from the first line on, so that of long lines it sends the beginning."""

    def answer(query: dict[str, list[str]]) -> Any:  # noqa: ANN401
        lines = [SHARDS] + [f"\r{GRAPHS}: {percent:3}%|{'#' * 16_000}\n" for percent in range(30)]
        tail = "".join(lines[-int(query["tailLines"][0]) :])
        return tail[: int(query["limitBytes"][0])]

    api.answers |= seen.that_loads("demo-0")
    api.answers[log_of("demo-0")] = answer
    assert "Loading: capturing CUDA graphs 29 %" in run("status").out


def test_a_log_that_may_not_be_read_is_noted(run: Run, api: ApiPaths) -> None:
    api.answers |= seen.that_loads("demo-0", "demo-1")
    api.answers |= {log_of(name): (403, {"message": "pods/log is forbidden"}) for name in ("demo-0", "demo-1")}
    done = run("status")
    assert (done.code, "Loading:" in done.out) == (0, False)
    assert "note: 2 logs of pods that load could not be read, the first: demo-0: you lack a right" in done.out


def test_explain_tells_what_pods_do_and_how_logs_end(run: Run, api: ApiPaths) -> None:
    names = ["demo-0", "demo-1", "demo-2", "demo-3"]
    api.answers |= seen.that_loads(*names)
    secret, long = "hf_AbCdEfGhIjKlMnOp", "x " * 300
    api.answers |= {
        log_of("demo-0"): f"{ENGINE} [monitor.py:43] Starting torch.compile\n",
        log_of("demo-1"): f"password={secret} {long}\n",
        log_of("demo-2"): "",
        log_of("demo-3"): (403, {"message": "pods/log is forbidden"}),
    }
    done = run("explain", "fleet/demo")
    assert done.code == 0, done.err
    for part in (
        "PodNotReady: Pod demo-0 is Loading: compiling.",
        "PodNotReady: Pod demo-1 is Loading.\n  Its log ends with: password=REDACTED x x",
        "PodNotReady: Pod demo-2 is Loading.\n  Its log is empty.",
        "PodNotReady: Pod demo-3 is Loading.\n  Its log could not be read: you lack a right (pods/log is forbidden)",
        *(f"  kubectl -n poc logs {name} -c vllm --tail=50\n" for name in names),
    ):
        assert part in done.out, done.out
    assert secret not in done.out
    assert max(map(len, done.out.splitlines())) < 300


def test_a_pod_that_crashed_shows_the_log_of_before(run: Run, api: ApiPaths) -> None:
    api.answers |= seen.that_loads("demo-0")
    ended = {"terminated": {"reason": "OOMKilled", "exitCode": 137}}
    api.answers[seen.PODS][0]["status"]["containerStatuses"][0]["lastState"] = ended
    api.answers[log_of("demo-0")] = SHARDS
    done = run("explain", "fleet/demo")
    pod = "Pod demo-0 is Loading: reading weights 46 % (21 of 46 files); it last ended with OOMKilled, exit code 137."
    assert pod in done.out
    assert "  kubectl -n poc logs demo-0 --previous --tail=50\n" in done.out


def test_a_log_is_waited_for_only_so_long(run: Run, api: ApiPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking, "LOG_SECONDS", 0.2)
    api.answers |= seen.that_loads("demo-0")
    api.held[log_of("demo-0")] = threading.Event()
    done = run("status")
    assert (done.code, "the API server does not answer" in done.out) == (0, True)


def _that_loads_on_its_own(api: ApiPaths, **container: Any) -> None:  # noqa: ANN401 - of a pod's spec
    """Lay down a pod of no fleet, behind a sidecar, whose server loads for a round that waits for it."""
    pod, labels = seen.an_own_pod("own-0", {"model": "m"}, ready=False), {"matchLabels": {"model": "m"}}
    pod["spec"]["containers"][0] |= container
    pod["status"]["containerStatuses"][0]["started"] = "startupProbe" not in container
    pod["spec"]["containers"].insert(0, {"name": "proxy"})
    pod["status"]["conditions"][0]["reason"] = "ContainersNotReady"
    waiting = seen.a_round(state="Pending", assignments=[])
    waiting["spec"] = {key: value for key, value in waiting["spec"].items() if key != "fleetRef"} | {"selector": labels}
    api.answers |= {
        seen.FLEETS: [],
        seen.ROUNDS: [waiting],
        f"{seen.ROUNDS}/round-1": waiting,
        seen.PODS: seen.by_selector(pod),
        log_of("own-0"): SHARDS,
    }


def test_pods_of_no_fleet_show_what_they_do_too(run: Run, api: ApiPaths) -> None:
    _that_loads_on_its_own(api)
    assert "  Loading: reading weights 46 % (21 of 46 files)  " in run("status").out
    asked = [one.query["container"] for one in api.asked if one.path == log_of("own-0")]
    assert asked == [["kserve-container"]], "the one with the server's port"
    told = run("explain", "round-1").out
    assert "PodNotReady: Pod own-0 is Loading: reading weights 46 % (21 of 46 files)." in told
    assert "  kubectl -n poc logs own-0 -c kserve-container --tail=50\n" in told


def test_a_pod_of_no_fleet_loads_only_as_long_as_its_startup_probe_allows(run: Run, api: ApiPaths) -> None:
    _that_loads_on_its_own(api, startupProbe={"periodSeconds": 10, "failureThreshold": 60})
    assert "  Loading: reading weights 46 %" in run("status").out
    api.asked.clear()
    _that_loads_on_its_own(api, startupProbe={"periodSeconds": 1, "failureThreshold": 1})
    assert "  ContainersNotReady  " in run("status").out
    assert not [one for one in api.asked if one.path.endswith("/log")]
