"""Which ends of workers Ray restarts and counts."""

import pickle
from typing import Any

import pytest


@pytest.fixture(scope="module")
def ray_group() -> Any:
    pytest.importorskip("ray.train")
    from engine.cluster import ray_group

    return ray_group


def test_final_exit_code_of_any_worker_ends_the_training(ray_group: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from ray.train import ControllerError

    with pytest.raises(ControllerError) as raised:
        ray_group.Restarts().after_exception(None, {0: RuntimeError("node\ngone"), 1: SystemExit(2)})
    # Ray carries it to the program that started the training.
    again = pickle.loads(pickle.dumps(raised.value.controller_failure))
    assert (again.exit_code, str(again)) == (2, "a worker ended with exit code 2, see its line")
    assert capsys.readouterr().out == "ended: worker 0 (RuntimeError: node), worker 1 (SystemExit: 2)\n"
    assert ray_group.code_of(raised.value) == 2


def test_stop_is_not_counted_and_a_failure_is(ray_group: Any) -> None:
    from ray.train import FailureConfig, PreemptionError, WorkerGroupError
    from ray.train.v2._internal.execution.failure_handling import DefaultFailurePolicy, FailureDecision

    policy = DefaultFailurePolicy(FailureConfig(max_failures=1))
    for _ in range(3):
        with pytest.raises(PreemptionError) as raised:
            ray_group.Restarts().after_exception(None, {0: SystemExit(42), 1: SystemExit(42)})
        assert policy.make_decision(raised.value) == FailureDecision.RETRY
    failures = {0: SystemExit(43), 1: RuntimeError("gone")}
    ray_group.Restarts().after_exception(None, failures)  # Raises nothing, so Ray's own rule applies.
    decisions = [policy.make_decision(WorkerGroupError("", failures)) for _ in range(2)]
    assert decisions == [FailureDecision.RETRY, FailureDecision.RAISE]
