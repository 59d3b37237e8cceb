"""curves.png: its panels, scales and marks, read from the figure before it is drawn."""

import io
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.axes
import matplotlib.figure

from engine.model.metrics import ResultNames
from engine.report.curves import figure_of_run
from engine.report.tables import best_point

PLAIN = ResultNames({"train": {}, "validation": {}}, ["train", "validation"])


def rows(epochs: int, **columns: Any) -> list[dict[str, Any]]:
    """Returns rows of ten steps each; a column is a list, or a number for all rows."""
    found: list[dict[str, Any]] = [{"epoch": number, "step": 10 * number} for number in range(1, epochs + 1)]
    for name, values in columns.items():
        for number, row in enumerate(found):
            row[name.replace("__", "/")] = values[number] if isinstance(values, list) else values
    return found


def figure(title: str, names: ResultNames, rows: list[dict[str, Any]], **marks: Any) -> matplotlib.figure.Figure:
    settings: Any = SimpleNamespace(run_dir=Path(title), monitor=marks.pop("monitor", ""))
    return figure_of_run(settings, names, rows, **{"validations": [], "resumed": [], "direction": "min", **marks})


def panels(figure: matplotlib.figure.Figure) -> dict[str, matplotlib.axes.Axes]:
    return {axes.get_title(): axes for axes in figure.axes}


def curves(axes: matplotlib.axes.Axes) -> dict[str, list[tuple[float, float]]]:
    lines = [line for line in axes.get_lines() if "/" in line.get_label()]
    return {line.get_label(): [(float(x), float(y)) for x, y in line.get_xydata()] for line in lines}


def marks(axes: matplotlib.axes.Axes) -> dict[str, list[float]]:
    """Returns where the vertical lines are, by their style: "--" the best, ":" resumed."""
    found: dict[str, list[float]] = {}
    for line in axes.get_lines():
        if line.get_label().startswith("_child"):
            found.setdefault(line.get_linestyle(), []).append(float(line.get_xdata()[0]))
    return found


def test_datasets_of_a_metric_share_a_panel_and_elements_of_arrays_have_none() -> None:
    names = ResultNames({"train": {}, "validation": {}}, ["train", "validation/easy", "validation/hard"])
    scores = {f"validation/hard/f1/{index}": 0.5 for index in range(100)}
    names.arrays = dict.fromkeys(scores, "validation/hard/f1")
    losses = {"train/loss": 1.0, "validation/easy/loss": 2.0, "validation/hard/loss": 3.0}
    drawn = panels(figure("run", names, rows(2, **losses, **scores), monitor="validation/hard/f1/7"))
    assert {title: list(curves(axes)) for title, axes in drawn.items()} == {
        "f1/7": ["validation/hard/f1/7"],  # It is monitored.
        "loss": list(losses),
    }
    assert curves(drawn["loss"])["validation/hard/loss"] == [(1.0, 3.0), (2.0, 3.0)]
    colours = [line.get_color() for axes in drawn.values() for line in axes.get_lines() if "/" in line.get_label()]
    assert len(set(colours)) == 3  # A dataset has the same in every panel.


def test_best_and_resumed_epochs_and_validations_between_them_are_marked() -> None:
    given = rows(3, train__loss=2.0, validation__loss=[3.0, 1.0, 1.0], validation__auc=[0.1, 0.9, 0.9])
    between = [{"step": 5, "validation/loss": 4.0}, {"step": 25, "validation/loss": 2.0}]
    drawn_figure = figure("run", PLAIN, given, monitor="validation/loss", resumed=[10, 15], validations=between)
    drawn = panels(drawn_figure)
    assert [marks(axes) for axes in drawn.values()] == [{":": [1.0, 1.5], "--": [2.0]}] * 2
    stars = {title: [list(line.get_xydata()[0]) for line in axes.get_lines() if line.get_marker() == "*"]
             for title, axes in drawn.items()}  # fmt: skip
    assert stars == {"loss": [[2.0, 1.0]], "auc": []}
    assert drawn_figure.get_suptitle() == "run, epoch 3; best validation/loss 1 in epoch 2"
    validations = [(0.5, 4.0), (1.0, 3.0), (2.0, 1.0), (2.5, 2.0), (3.0, 1.0)]
    assert curves(drawn["loss"]) == {"train/loss": [(1.0, 2.0), (2.0, 2.0), (3.0, 2.0)], "validation/loss": validations}


def test_best_is_the_first_of_equals_and_never_nan() -> None:
    points = [(1.0, math.nan), (2.0, 0.5), (3.0, 0.7), (4.0, 0.7), (5.0, 0.5)]
    assert [best_point(points, each) for each in ("max", "min")] == [(3.0, 0.7), (2.0, 0.5)]
    assert best_point(points[:1], "min") is None


def test_a_loss_that_falls_far_is_on_a_log_scale() -> None:
    cases = {
        "loss far": ([2.0, 0.5, 0.05], "log"),
        "loss to zero": ([2.0, 0.5, 0.0], "linear"),
        "rises, as an accuracy does": ([0.01, 0.5, 0.9], "linear"),
        "loss with a gap": ([2.0, math.nan, 0.05], "log"),
        "infinite loss": ([math.inf, 1.0, -math.inf], "linear"),
    }
    given = rows(3, **{f"train/{name}": values for name, (values, _) in cases.items()})
    drawn = panels(figure("run", PLAIN, given))
    assert {title: axes.get_yscale() for title, axes in drawn.items()} == {each: cases[each][1] for each in cases}


def test_gaps_and_odd_names_do_not_stop_the_drawing() -> None:
    given = rows(3, **{"train/$\\frac{": 1.0, "learning_rate__a": 0.1, "learning_rate__b": 0.2})
    del given[1]["train/$\\frac{"]
    given[2] |= {"validation/late": None, "train/infinite": math.inf}
    drawn_figure = figure("$x_{", PLAIN, given)
    drawn_figure.savefig(io.BytesIO(), format="png", dpi=20)
    drawn = panels(drawn_figure)
    assert list(drawn) == ["$\\frac{", "late", "infinite", "learning rate"]
    assert curves(drawn["$\\frac{"]) == {"train/$\\frac{": [(1.0, 1.0), (3.0, 1.0)]}
