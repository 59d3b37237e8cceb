"""Projects whose task is not the default one: the steps of a GAN, and rules of the hooks that are broken."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from rendering import Bake, run


@pytest.mark.long
def test_repeated_steps_are_bit_equal(bake: Callable[..., Bake]) -> None:
    # Where four gradients are summed in an order that depends on the timing, a fifth of the repetitions differ.
    project = bake(starter="gan")
    program = Path(__file__).parent / "helpers/repeated_steps.py"
    first, second = (project.run("python", program, "30").stdout.split() for _ in range(2))
    assert len(first) == 1
    assert second == first


# The rule, its line in task.py, the broken line, the tests that fail, and what --check says.
SAME_NUMBERS = {"test_one_and_four_replicas_agree"}
APPLY = "    apply_gradients(optimizer, tape, loss, model.trainable_variables"
SUMMED = f"""    gradients = tape.gradient(loss, model.trainable_variables)
    gradients = tf.distribute.get_replica_context().all_reduce('SUM', gradients)
{APPLY}, gradients"""
BROKEN_RULES = {
    "the replica's own batch size": (
        ("global_batch_size=config.global_batch_size", "global_batch_size=len(labels)"),
        SAME_NUMBERS,
        r"task\.py compute_loss +the loss is .* divide by config\.global_batch_size",
    ),
    "an own sum of gradients": (
        (APPLY, SUMMED),
        SAME_NUMBERS,
        r"task\.py train_step +the loss agrees, and the gradient of .* differs: .* without a sum of your own",
    ),
    "training mode in validation": (
        ("predictions = model(features, training=False)", "predictions = model(features, training=True)"),
        {"test_padding_does_not_count", "test_evaluation_changes_nothing"},
        r"task\.py evaluation_step +random in validation, .*: dropout: call the model with training=False",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("rule", BROKEN_RULES)
def test_shipped_tests_and_check_fail_when_a_rule_is_broken(rule: str, bake: Callable[..., Bake]) -> None:
    project = bake()
    (sound, broken), failing, said = BROKEN_RULES[rule]
    project.replace("task.py", sound, broken)
    if "training" in rule:
        # Which shows only if the model has a layer that is another one in training.
        flatten = "keras.layers.Flatten(),"
        project.replace("task.py", flatten, f"{flatten}\n            keras.layers.Dropout(0.2),")
    tests = run("python", "-m", "pytest", "-q", "tests/test_same_numbers.py", folder=project.folder)
    assert tests.returncode == 1, tests.stdout
    assert set(re.findall(r"(?m)^FAILED tests/test_same_numbers\.py::(\S+)", tests.stdout)) == failing
    check = run("python", "train.py", "--check", folder=project.folder)
    assert check.returncode == 2, check.stdout
    failed = [line for line in check.stdout.splitlines() if line.startswith("FAIL")]
    assert any(re.match(f"FAIL +{said}", line) for line in failed), check.stdout
    # One broken rule is reported for one hook.
    assert len({re.split("  +", line)[1] for line in failed}) == 1, check.stdout
