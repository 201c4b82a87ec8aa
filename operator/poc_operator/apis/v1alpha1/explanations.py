# SPDX-License-Identifier: Apache-2.0
"""What each reason of a condition or an Event means, and what to do about it.

The reference pages of the kinds are made of these texts.
"""

from dataclasses import dataclass

from poc_operator.apis.v1alpha1.reasons import Reason

_ROUND = frozenset({"PoCRound"})
_VALIDATION = frozenset({"PoCValidation"})
_CALIBRATION = frozenset({"PoCCalibration"})
_NAMED_NONCES = _VALIDATION | _CALIBRATION
_ALL = _ROUND | _NAMED_NONCES
_FLEET = frozenset({"PoCFleet"})


@dataclass(frozen=True)
class Explanation:
    """Where a reason stands, what it means, and what a user should do; no ``remedy`` where nothing is wrong.

    ``kinds`` are those whose objects can have it.
    """

    where: str
    meaning: str
    remedy: str | None = None
    kinds: frozenset[str] = _ALL


EXPLANATIONS: dict[Reason, Explanation] = {
    Reason.PENDING: Explanation(
        "Ready=Unknown",
        "No operator has seen the object yet.",
        "Check that the operator runs and watches the namespace.",
        _ALL | _FLEET,
    ),
    Reason.FLEET_NOT_FOUND: Explanation(
        "Progressing=False",
        "There is no PoCFleet that `spec.fleetRef` names.",
        "Create it, or create the object with the right name.",
    ),
    Reason.IMAGE_MISSING: Explanation(
        "Stalled=True",
        "Neither the fleet nor the operator names a worker image.",
        "Set `spec.image`, or `fleets.image.repository` of the operator's chart.",
        _FLEET,
    ),
    Reason.PRESET_UNUSABLE: Explanation(
        "Stalled=True",
        "There is no such preset, or its ConfigMap is wrong. The message lists the presets that there are.",
        "Name one of them, or mend the ConfigMap.",
        _FLEET,
    ),
    Reason.GPU_UNKNOWN: Explanation(
        "Stalled=True",
        "The preset cannot tell the GPUs: no Kubernetes node has some that it knows, or there are several.",
        "Set `spec.gpu.product`.",
        _FLEET,
    ),
    Reason.GPU_UNSUPPORTED: Explanation(
        "Stalled=True",
        "The preset has no entry for these GPUs. The message names the nearest.",
        "Set `spec.gpu` to an entry, or use `spec.model.path` with flags of your own.",
        _FLEET,
    ),
    Reason.DECODE_UNSUPPORTED: Explanation(
        "Stalled=True",
        "The preset leaves no memory for the decode scheme on these GPUs, or less than `spec.decode.reserve`.",
        "Remove `spec.decode`, or set its `reserve` and `--gpu-memory-utilization` in `spec.engineArgs`.",
        _FLEET,
    ),
    Reason.CACHE_TOO_SMALL: Explanation(
        "Stalled=True", "The model's weights do not fit into `spec.cache.size`.", "Make it larger.", _FLEET
    ),
    Reason.POD_TEMPLATE_INVALID: Explanation(
        "Stalled=True",
        "`spec.podTemplate` cannot be merged into the pods' template. The message names the field.",
        "Give that field the form that pods have.",
        _FLEET,
    ),
    Reason.OBJECT_CONFLICT: Explanation(
        "Stalled=True, Degraded=True, Event",
        "An object that the fleet needs exists and does not belong to it. The fleet leaves it alone.",
        "Delete that object, or give the fleet another name.",
        _FLEET,
    ),
    Reason.PODS_OF_OTHERS: Explanation(
        "Event",
        "Pods of others have the fleet's label. The fleet leaves them alone, but chat and rounds go by the label. "
        "The message of the fleet names them as long as they are there.",
        "Take the label `poc.gonka.ai/fleet` from them.",
        _FLEET,
    ),
    Reason.OBJECT_REFUSED: Explanation(
        "Stalled=True, Degraded=True, Event",
        "The API server refuses an object of the fleet, or the deletion of an earlier download. The message has its "
        "words. `Stalled` is True only if an object is refused.",
        "Change what it names. If a right is missing, install the chart with `fleets.enabled`.",
        _FLEET,
    ),
    Reason.PODS_FAILING: Explanation(
        "Degraded=True, Stalled=True",
        "Pods cannot run: they crash (`CrashLoopBackOff`), or their image cannot be pulled (`ErrImagePull`, "
        "`ImagePullBackOff`). The message has the kubelet's reason, and the registry's words. `Stalled` is True after "
        "two minutes without an image, or without a Secret or ConfigMap that the pod names.",
        "If the image is not found, correct `spec.image`. If the registry denies it, set `spec.imagePullSecrets`. "
        "Otherwise look at the Events in `kubectl describe pod`, and at the pod's log if it crashes. Correct what "
        "they name, and the operator replaces the pods.",
        _FLEET,
    ),
    Reason.PODS_UNSCHEDULABLE: Explanation(
        "Degraded=True",
        "No Kubernetes node can take pods, or the one that downloads the model. The message has the scheduler's words.",
        "If it does not find a PVC, create that, or correct `spec.cache.existingClaim`. If a PVC is unbound, look at "
        "`kubectl describe pvc`. If GPUs are insufficient, free some or add Kubernetes nodes, or lower `spec.replicas` "
        "or `spec.gpu.count`. If there is a taint, tolerate it in `spec.podTemplate`.",
        _FLEET,
    ),
    Reason.DOWNLOADING: Explanation(
        "Ready=False, Progressing=True",
        "A Job downloads the model into the cache. Pods that serve another model go on; the StatefulSet gets the new "
        "template when the model is there.",
        kinds=_FLEET,
    ),
    Reason.DOWNLOAD_FAILED: Explanation(
        "Degraded=True, Event",
        "The Job that downloads the model has failed. The message has its container's words.",
        "Check the hub id and `huggingFace.tokenSecret`, and that the PVC has room. The Job is made anew some ten "
        "minutes after it failed. It is made anew at once when you change the spec, or delete the Job.",
        _FLEET,
    ),
    Reason.POD_HUNG: Explanation(
        "Degraded=True, Event",
        "A pod is ready and answers, and gets nothing done although requests or nonces wait. The operator evicts it, "
        "if `healing` allows that.",
        "Look at the log of the pod before it goes. If the model is slow and the pod is well, raise "
        "`healing.hungSeconds`.",
        _FLEET,
    ),
    Reason.LEADER_WORKER_SET_UNKNOWN: Explanation(
        "Stalled=True",
        "A replica spans several Kubernetes nodes, and the cluster does not know LeaderWorkerSets.",
        "Install LeaderWorkerSet, release 0.9 or newer, or remove `parallelism.kubernetesNodes`. The operator looks "
        "again every minute.",
        _FLEET,
    ),
    Reason.POD_MONITOR_UNKNOWN: Explanation(
        "Degraded=True, Event",
        "`metrics.podMonitor` is true, and the cluster does not know PodMonitors.",
        "Install Prometheus Operator with its CRDs, or set `metrics.podMonitor` to false. The operator looks again "
        "after a minute.",
        _FLEET,
    ),
    Reason.GPU_FAULTY: Explanation(
        "Degraded=True, Event",
        "The GPUs of a pod have had Xid errors, or double-bit errors of their memory, since the operator first asked "
        "the pod. Results may be wrong. After several the operator evicts the pod while no round needs it.",
        "Cordon the Kubernetes node that the message names, delete the pod if it is still there, and have the GPU "
        "reset or replaced.",
        _FLEET,
    ),
    Reason.PODS_OUTDATED: Explanation(
        "Progressing=True",
        "Pods have an old revision of the template. The message says what the update waits for.",
        "Nothing, as a rule. `update.strategy: Immediate` does not wait for rounds. With `Never`, delete the pods "
        "when no round runs.",
        _FLEET,
    ),
    Reason.UPDATE_STARTED: Explanation("Event", "Pods get a new revision of their template.", kinds=_FLEET),
    Reason.CANARY_PASSED: Explanation(
        "Event", "The first pod of a new revision is ready and has passed its self-check.", kinds=_FLEET
    ),
    Reason.UPDATE_COMPLETE: Explanation("Event", "All pods have the newest revision.", kinds=_FLEET),
    Reason.UPDATE_FAILED: Explanation(
        "Degraded, Stalled=True, Event",
        "The first pod of a new revision failed its self-check, could not run (such as `ErrImagePull`), or was not "
        "ready in time. The fleet went back to its last good revision. The message says what failed and what differs.",
        "Correct the spec. What failed is not tried again: to try the same once more, change an annotation in "
        "`spec.podTemplate.metadata.annotations`.",
        _FLEET,
    ),
    Reason.UPDATE_STOPPED: Explanation(
        "Degraded, Stalled=True, Event",
        "A pod failed with the new revision after the canary had passed. It failed its self-check, crashed, or was not "
        "ready in time. The fleet has pods of both revisions, and replaces none until that pod works.",
        "Look at the pod that the message names. If it is the pod's own fault, as of its GPUs, mend or delete it, and "
        "the update goes on. If the template is wrong, go back with `kubectl poc fleet rollout undo`, or correct the "
        "spec.",
        _FLEET,
    ),
    Reason.REPLICAS_NOT_READY: Explanation(
        "Ready=False, Progressing=True",
        "Pods are created or load their model. The message says what they wait for.",
        kinds=_FLEET,
    ),
    Reason.SELF_CHECK_FAILED: Explanation(
        "Degraded=True, or Progressing=False",
        "Pods compute other results than the fleet's other pods do, or than they did. They get no new slot. The "
        "message has the p-value of the network's test.",
        "Compare their fingerprints in `status.pods`. If a change was meant, set `spec.selfCheck.enabled` to false, "
        "and back once all pods have it: the vectors so far are forgotten.",
        _ALL | _FLEET,
    ),
    Reason.SELF_CHECKS_PENDING: Explanation(
        "Ready=False, or Progressing=True",
        "Pods have yet to pass the self-check. They get no slot until then. The message says what it waits for.",
        kinds=_ALL | _FLEET,
    ),
    Reason.ALL_REPLICAS_READY: Explanation("Ready=True", "All replicas are ready.", kinds=_FLEET),
    Reason.NO_MATCHING_PODS: Explanation(
        "Progressing=False",
        "No pod of the namespace matches `spec.selector`.",
        "Create a `PoCFleet` there, raise its `spec.replicas` from 0, or label your pods.",
    ),
    Reason.NO_POD_READY: Explanation(
        "Progressing=False",
        "Pods exist and none is ready. The message has the kubelet's reason, such as `ImagePullBackOff`.",
        "Loading a model takes minutes. Otherwise look at `kubectl describe pod`.",
    ),
    Reason.PODS_UNREACHABLE: Explanation(
        "Progressing=False, Failed=True",
        "Ready pods do not answer the PoC routes. The object fails when none has answered for `pollFailureSeconds`.",
        "Check `spec.port`, that vLLM runs with `--enable-poc`, network policies, and that operator and pods have the "
        "same token. The message names pods and errors.",
    ),
    Reason.PODS_BUSY: Explanation(
        "Progressing=False, Failed=True",
        "Every pod computes other work. With `concurrencyPolicy: Fail` one such pod fails the object.",
        "Wait, delete the other round, or stop foreign work with `POST /api/v1/pow/stop`. The message names it.",
    ),
    Reason.MODEL_MISMATCH: Explanation(
        "Accepted, Progressing=False",
        "`model.name` is not what the pods serve.",
        "Create the object with a served name, or select other pods.",
    ),
    Reason.SEQUENCE_TOO_LONG: Explanation(
        "Accepted, Progressing=False",
        "`model.seqLen` exceeds vLLM's limits.",
        "Use a smaller `seqLen`, or a larger `--max-model-len` and `--max-num-batched-tokens`.",
    ),
    Reason.K_DIM_TOO_LARGE: Explanation(
        "Accepted, Progressing=False",
        "`artifact.kDim` exceeds the model's hidden size.",
        "Use a smaller `kDim`.",
        _ROUND | _VALIDATION,
    ),
    Reason.SCHEME_NOT_OFFERED: Explanation(
        "Accepted, Progressing=False",
        "The pods do not offer the decode scheme, or do not say so by `GET versions`.",
        "Set `spec.decode` of the fleet; for other pods `VLLM_POC_DECODE_CODEBOOK` and `VLLM_POC_DECODE_RESERVE_BYTES`."
        " Or take pods of the network's plugin 0.2 or later, or create a new one with `artifact`.",
        _ROUND | _VALIDATION,
    ),
    Reason.MODEL_UNSUPPORTED: Explanation(
        "Accepted, Progressing=False",
        "PoC cannot run on this model, or with one of vLLM's flags. The message names it.",
        "Leave the flag out, or serve another model.",
    ),
    Reason.REQUEST_REFUSED: Explanation(
        "Accepted, Progressing=False",
        "The pods refused the start for another reason, such as a callback host that is not allowed.",
        "The message says why. `callbackAllow` of the fleet or `VLLM_POC_CALLBACK_ALLOW` allows a callback host.",
        _ROUND,
    ),
    Reason.PROOFS_UNAVAILABLE: Explanation(
        "Accepted, Progressing=False",
        "The proofs cannot be read. The ConfigMap or its entry does not exist or has no list of proofs, or the gateway "
        "has no results of `proofs.round`.",
        "Create them; the validation waits until `startDeadlineSeconds`. The message says what is missing.",
        _VALIDATION,
    ),
    Reason.CALLBACK_SECRET_UNAVAILABLE: Explanation(
        "Accepted, Progressing=False; Degraded=True, Event",
        "The Secret of `callbackSecretRef` does not exist, cannot be read, or has no user and password. Pods that "
        "compute continue, and none is started.",
        "Create the Secret, or install the operator's chart with `rbac.readSecrets=true`. The round waits until "
        "`startDeadlineSeconds`. The message says what is missing.",
        _ROUND,
    ),
    Reason.INTERNAL_ERROR: Explanation(
        "Progressing=False, Degraded=True, Event",
        "The operator failed on this object. It tries again, at first after seconds, later every 5 min; others go on.",
        "The message and the operator's log say why. Another spec is tried at once. If the message names a field, "
        "delete the object and create it with another value.",
    ),
    Reason.TOO_MANY_SLOTS: Explanation(
        "Failed=True",
        "`nodes` makes more than 3 000 slots.",
        "Serve fewer ML node ids in one round, or use fewer groups.",
        _ROUND,
    ),
    Reason.START_DEADLINE_EXCEEDED: Explanation(
        "Failed=True",
        "No pod started within `startDeadlineSeconds`. The message has what was waited for last.",
        "Remove that cause and create the object again, or set a longer deadline.",
    ),
    Reason.PODS_IDLE: Explanation(
        "Failed=True",
        "No pod has worked on it for `startDeadlineSeconds` since it started: its pods are gone, refuse, or compute "
        "other work. The message has what was waited for last.",
        "Remove that cause and create the object again, or set a longer deadline.",
    ),
    Reason.DEADLINE_EXCEEDED: Explanation(
        "Failed=True",
        "The work was not complete within `activeDeadlineSeconds`.",
        "Use more pods, a longer deadline, or less work.",
    ),
    Reason.BACKOFF_LIMIT_EXCEEDED: Explanation(
        "Failed=True",
        "All of the work was given up, since pods lost it more often than `retry` allows.",
        "Find out why pods restart: `kubectl logs --previous`.",
    ),
    Reason.PROOFS_CHANGED: Explanation(
        "Failed=True",
        "The proofs changed while they were checked.",
        "Create another validation for the new ones.",
        _VALIDATION,
    ),
    Reason.NOTHING_COMPUTED: Explanation(
        "Failed=True",
        "The pods had no finite result to compare or to measure.",
        "Look at the pods' logs and GPUs.",
        _NAMED_NONCES,
    ),
    Reason.FRAUD_DETECTED: Explanation(
        "Complete=True",
        "The proofs are not what an honest prover would have computed.",
        "The message has the p-value, `status.mismatchNonces` the nonces.",
        _VALIDATION,
    ),
    Reason.SLOTS_FAILED: Explanation(
        "Degraded=True",
        "Some slots or samples were given up; the others go on.",
        "Find out why pods restart: `kubectl logs --previous`. `status.errors` has the last error of each.",
    ),
    Reason.SLOTS_LEAVING: Explanation(
        "Degraded=True",
        "Pods are being deleted or are not selected any more, and have not confirmed that they stopped. Their slots "
        "move on when they have, or when their leases have run out. The message names the first.",
        "Wait, or look why that pod does not end. If its Kubernetes node is lost for good, delete the Node object.",
        _ROUND,
    ),
    Reason.SLOTS_PAUSED: Explanation(
        "Degraded=True, Event",
        "vLLM sleeps, is paused, or gets new weights in pods that have slots. They compute nothing meanwhile. The "
        "message names them.",
        "Wake vLLM up or resume it, or delete the pod: its slot then moves to a spare.",
        _ROUND,
    ),
    Reason.SLOTS_STALLED: Explanation(
        "Degraded=True",
        "Pods get nothing done or do not answer. The message names the first.",
        "Look at that pod's log. With `stall.action: DeletePod` the operator deletes such pods.",
        _ROUND,
    ),
    Reason.SLOTS_WAITING: Explanation(
        "Degraded=True", "Some slots have no pod.", "Wait for the replacement pod, or add one.", _ROUND
    ),
    Reason.PODS_DISAGREE: Explanation(
        "Degraded=True, Event",
        "Pods that recomputed the same nonces differ. The message names those outside the majority, or all where there "
        "is none.",
        "Look at these pods' GPUs; serve the same weights and vLLM everywhere.",
        _ROUND,
    ),
    Reason.RESULTS_CONFLICT: Explanation(
        "Degraded=True, Event",
        "Results came to the gateway twice for the same nonce, and differ. The message names slots and both pods. A "
        "third pod computes the nonce; until then none of the results is forwarded.",
        "Look at these pods' GPUs: one of the two is faulty or lies. Without a third pod, add one, or say through the "
        "gateway's route `rivals` which is honest.",
        _ROUND,
    ),
    Reason.RESULTS_FORGED: Explanation(
        "Degraded=True, Event",
        "Pods delivered results that another pod, which computed the same nonces, does not confirm. None of them is "
        "forwarded, unless it was before its rival came.",
        "Look at these pods' GPUs, and check that they run an image that you trust. The gateway's route `conflicts` "
        "has all results.",
        _ROUND,
    ),
    Reason.DELIVERIES_FAILING: Explanation(
        "Degraded=True",
        "For a minute a receiver has accepted no result of these pods. The message has its address and its last "
        "answer. Results wait, and pods try again; at 50 000 a pod computes no more. Results that are refused for good "
        "are dropped, and count as rejected.",
        "`HTTP 507`: give the gateway's volume room. `HTTP 401`: correct the user and the password, or give operator "
        "and gateway the same secrets. `HTTP 404` or `HTTP 405`: make a new round with the right `callbackURL`. "
        "`certificate`: renew the receiver's certificate. Otherwise look whether the receiver runs, and whether a "
        "NetworkPolicy is in the way.",
        _ROUND,
    ),
    Reason.RECEIVER_FAILING: Explanation(
        "Degraded=True",
        "For a minute the receiver at `callbackURL` has taken no results from the gateway. The message has its last "
        "answer. Results wait there, and the gateway tries again. The message of a round that ends says how many.",
        "`HTTP 401` or `HTTP 403`: correct the Secret of `callbackSecretRef`. `HTTP 404` or `HTTP 405`: make a new "
        "round with the right `callbackURL`. `certificate`: renew the receiver's certificate. Otherwise look whether "
        "the receiver runs, and whether a NetworkPolicy is in the way.",
        _ROUND,
    ),
    Reason.DELIVERIES_REFUSED: Explanation(
        "Degraded=True, Event",
        "Pods sent results of other slots, or of nonces that they cannot have reached. None was stored.",
        "Check that these pods run an image that you trust, that the clocks of the Kubernetes nodes agree, and "
        "`--max-nonces-per-second`.",
        _ROUND,
    ),
    Reason.ROUND_FULL: Explanation(
        "Degraded=True, Event",
        "The gateway stores no more results of the round, which has as many as one round may have. Pods keep what they "
        "have computed, and deliver it when there is room.",
        "Raise the value of the gateway's chart that the message names, or end the round with `finish`. Other rounds "
        "go on.",
        _ROUND,
    ),
    Reason.GATEWAY_CONTRADICTORY: Explanation(
        "Degraded=True, Event",
        "Numbers of the gateway cannot be true: more results than nonces, or further than any pod can be. The slots in "
        "the message are counted as their pods tell.",
        "Check that `--gateway-url` leads to your gateway and that it asks for credentials, and "
        "`--max-nonces-per-second`.",
        _ROUND,
    ),
    Reason.GATEWAY_UNREACHABLE: Explanation(
        "Degraded=True, Event",
        "The gateway did not answer the operator, or not as expected. Pods keep their results and deliver later.",
        "Check that the gateway runs, `--gateway-url`, and that both have the same `POC_GATEWAY_OPERATOR_TOKEN`.",
        _ROUND,
    ),
    Reason.DELIVERY_INCOMPLETE: Explanation(
        "Degraded=True, Event",
        "The pods have stopped and some computed nonces were not delivered.",
        "Check the receiver. The nonces can be computed again in another round.",
        _ROUND,
    ),
    Reason.RESULTS_REJECTED: Explanation(
        "Degraded=True, Event",
        "Nonces had no finite result, or the receiver refused them with 4xx.",
        "Look at the receiver's log and at `delivery_error` in the pod's status.",
    ),
    Reason.THEORY_DISAGREES: Explanation(
        "Degraded=True, Event",
        "The measured valid rate is not what theory expects of this target.",
        "Check that the pods serve the model that you think, and its weights.",
        _CALIBRATION,
    ),
    Reason.STALLED: Explanation(
        "Event",
        "A pod makes no progress, or does not answer; or it should be deleted and the operator may not.",
        "Look at that pod's log.",
        _ROUND,
    ),
    Reason.REPORT_CONTRADICTORY: Explanation(
        "Degraded=True, Event",
        "The counters in a pod's status cannot be true. They tell of more nonces than it can have computed, or of "
        "more delivered results than the gateway has. They are not counted until they can be true again.",
        "The message names the pods. Check that they run an image that you trust, and `--max-nonces-per-second`. Check "
        "that the gateway has not lost results, as when an old copy of its database was put back.",
        _ROUND,
    ),
    Reason.REPLACED: Explanation(
        "Event", "Other work of a pod is stopped, since `concurrencyPolicy` is Replace.", None, _ROUND
    ),
    Reason.WORK_LOST: Explanation(
        "Event",
        "A pod lost its slot or sample. The message says why, and where it starts again or that it was given up.",
    ),
    Reason.DELETED: Explanation("Failed=True", "The object is being deleted; its pods are stopped before it goes."),
    Reason.PODS_LEFT: Explanation(
        "Degraded=True, Event",
        "Pods had not confirmed that they stopped 120 s after the object was deleted, or `stopDeadlineSeconds` after "
        "the round ended or was suspended.",
        "Look whether these pods answer. The operator asks them on, and stops those that come back.",
    ),
    Reason.ORPHAN_STOPPED: Explanation(
        "Event, also on the pod",
        "A pod computed for this round, which is over or gives it no slot any more. The operator stopped it.",
        "Nothing, unless it happens often: then look why the pod does not answer when it is told to stop.",
        _ROUND,
    ),
    Reason.STARTED: Explanation("Event", "The first pod confirmed its start."),
    Reason.ACCEPTED: Explanation("Accepted=True", "Nothing is wrong with the spec."),
    Reason.STARTING: Explanation("Progressing=True", "Pods have been told to start and have not confirmed yet."),
    Reason.RUNNING: Explanation(
        "Progressing=True; Complete, Failed, Ready, Stalled=False", "The work goes on; it is not over."
    ),
    Reason.STOPPING: Explanation("Progressing=True", "Pods deliver what is left and stop."),
    Reason.COMPLETED: Explanation("Complete, Ready=True; Progressing=False", "The work is done; the message says why."),
    Reason.NO_FRAUD_DETECTED: Explanation(
        "Complete, Ready=True; Progressing=False", "The proofs may come from an honest prover.", None, _VALIDATION
    ),
    Reason.ALL_SLOTS_WORK: Explanation("Degraded=False", "Nothing is lost or missing."),
    Reason.SUSPENDED: Explanation(
        "Suspended=True; Progressing=False", "`spec.suspend` is true and all pods have stopped."
    ),
    Reason.NOT_SUSPENDED: Explanation("Suspended=False", "Not suspended, or still stopping."),
}
