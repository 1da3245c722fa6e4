"""Test that results on disk are complete, state what was measured, and do not need a plotting library."""

import json
import sys

import pytest

from tokenmix_core._utils.optional import install_command
from tokenmix_core._utils.versions import software
from tokenmix_core.evaluation.report import (
    draw,
    figure_of,
    format_rows,
    format_table,
    training_result,
    write_report,
    write_result,
)


def result(suite="demo", plots=1):
    curve = {"title": "A|B", "x": "t", "y": "v", "log_x": True, "log_y": False, "series": {"m": ([1, 2], [3.0, 4.0])}}
    rows = [{"task": "one", "value": 0.5}, {"task": "two\nlines | bar", "value": 123456.0, "extra": 20000}]
    return {"suite": suite, "settings": {"seed": 0}, "rows": rows, "plots": [curve] * plots}


def test_table_has_a_column_for_each_key_and_equally_wide_lines():
    lines = format_table(result()["rows"]).splitlines()
    assert [cell.strip() for cell in lines[0].strip("|").split("|")] == ["task", "value", "extra"]
    assert len({len(line) for line in lines}) == 1
    assert lines[2].split() == ["|", "one", "|", "0.5", "|", "-", "|"]
    # characters in a cell must not break the table
    assert "two⏎lines \\| bar" in lines[3]
    assert "123,456" in lines[3]
    assert "20,000" in lines[3]


def test_long_texts_are_shown_verbatim_outside_a_table():
    text = "def f(x):\n    return x | 1\n" * 5
    shown = format_rows([{"prompt": "def", "continuation": text}])
    assert text in shown
    assert not shown.startswith("|")
    assert format_rows(result()["rows"]) == format_table(result()["rows"])


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (1e-9, "1.000e-09"),
        (0.0, "0"),
        (12, "12"),
        (3e9, "3.000e+09"),
        (float("nan"), "nan"),
        (True, "True"),
    ],
)
def test_numbers_are_shown_shortly(value, shown):
    assert format_table([{"x": value}]).splitlines()[-1].strip("| ") == shown


@pytest.mark.parametrize("plots", [0, 1, 2])
def test_a_result_comes_back_from_its_json_beside_its_plots(tmp_path, plots):
    pytest.importorskip("matplotlib")
    files = write_result(result(plots=plots), tmp_path / "new" / "folder")
    names = {0: [], 1: ["demo.png"], 2: ["demo-1.png", "demo-2.png"]}[plots]
    assert [f.name for f in files] == ["demo.json", *names, "report.md"]
    assert {f.name for f in files} == {f.name for f in (tmp_path / "new" / "folder").iterdir()}
    read = json.loads(files[0].read_text())
    assert read == json.loads(json.dumps(result(plots=plots))) | {"provenance": software()}
    assert all(f.read_bytes().startswith(b"\x89PNG") for f in files[1:-1])
    assert all(f"({name})" in files[-1].read_text() for name in names)


def test_a_heatmap_shows_its_values(tmp_path):
    from matplotlib.image import imread

    flat, steep = ([[a, b], [b, a]] for a, b in ((0.5, 0.5), (0.0, 1.0)))
    pixels = []
    for name, heatmap in (("flat", flat), ("steep", steep)):
        plot = {"title": "share", "x": "head", "y": "layer", "series": {}, "heatmap": heatmap}
        draw(plot, tmp_path / f"{name}.png")
        image = imread(tmp_path / f"{name}.png")
        height, width = image.shape[:2]
        pixels.append([image[height * a // 4, width * b // 4, :3] for a in (1, 3) for b in (1, 2)])
    # the first image has four equal fields; the second has equal fields only along its diagonals
    assert all((p == pixels[0][0]).all() for p in pixels[0])
    assert (pixels[1][0] == pixels[1][3]).all()
    assert (pixels[1][1] == pixels[1][2]).all()
    assert (pixels[1][0] != pixels[1][1]).any()


def curves(count=8, x=(1, 2, 3), **more):
    names = [f"attention → linear at {i}, a long name" for i in range(count)]
    return {"title": "T" * 30, "x": "layer", "y": "v", "series": {n: (list(x), [1.0] * len(x)) for n in names}, **more}


@pytest.mark.parametrize("count", [1, 2, 8])
def test_text_is_inside_the_figure_and_beside_the_curves(count):
    title, y = "Perplexity by position, with several switches " * 3, "mqar:mqar-256-4,mqar-256-16,mqar-256-64, a share"
    figure = figure_of(curves(count, title=title, y=y))
    figure.canvas.draw()
    (axes,), (legend,) = figure.axes, figure.legends
    assert not legend.get_window_extent().overlaps(axes.get_window_extent())
    for text in (legend, axes.title, axes.xaxis.label, axes.yaxis.label):
        box = text.get_window_extent()
        assert figure.bbox.contains(box.x0, box.y0)
        assert figure.bbox.contains(box.x1, box.y1), f"{text} leaves the figure"


@pytest.mark.parametrize("layers", [[1], [1, 3], list(range(0, 40))])
def test_a_heatmap_names_its_rows_by_their_labels_alone(layers):
    labels = [str(layer) for layer in layers]
    heatmap = [[0.5, 0.1]] * len(layers)
    plot = {"title": "t", "x": "head", "y": "layer", "series": {}, "heatmap": heatmap, "y_labels": labels}
    axes = figure_of(plot).axes[0]
    shown = [text.get_text() for text in axes.get_yticklabels()]
    assert shown == labels[:: -(-len(layers) // 16)]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0", "1"]


@pytest.mark.parametrize("x", [[0], [3], [0, 1], [1, 3, 5]])
def test_whole_x_have_whole_ticks(x):
    figure = figure_of(curves(1, x))
    figure.canvas.draw()
    (axes,) = figure.axes
    low, high = axes.get_xlim()
    ticks = [tick for tick in axes.get_xticks() if low <= tick <= high]
    assert ticks
    assert all(float(tick).is_integer() for tick in ticks)


def test_points_are_not_joined_and_small_logarithmic_ranges_have_plain_labels():
    plot = curves(2, log_y=True)
    plot["series"] = {"a": ([1, 1, 1], [3.0, 5.0, 4.0]), "b": ([1, 2, 3], [3.0, 4.0, 5.0])}
    figure = figure_of(plot | {"points": ["a"]})
    figure.canvas.draw()
    (axes,) = figure.axes
    assert [line.get_linewidth() > 0 for line in axes.lines] == [False, True]
    assert {"3", "5"} <= {text.get_text() for text in axes.get_yticklabels()}


def test_without_matplotlib_all_but_the_plots_is_written(tmp_path, monkeypatch, capsys):
    (tmp_path / "demo.png").write_text("of an earlier run")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    files = write_result(result(), tmp_path)
    assert [f.name for f in files] == ["demo.json", "report.md"]
    assert {f.name for f in files} == {f.name for f in tmp_path.iterdir()}, "a plot stands beside other numbers"
    assert install_command("tokenmix-core[plots]") in capsys.readouterr().err


def test_report_holds_every_result_of_the_folder_and_nothing_else(tmp_path):
    write_result(result("first", plots=0), tmp_path)
    (tmp_path / "foreign.json").write_text("[1, 2]")
    (tmp_path / "config.json").write_text('{"rows": []}')
    write_result(result("second", plots=0), tmp_path)
    text = write_report(tmp_path).read_text()
    assert [line for line in text.splitlines() if line.startswith("#")] == ["# Evaluation", "## first", "## second"]
    assert "seed: 0" in text


def test_training_log_becomes_a_curve_over_tokens():
    log = [{"step": s, "loss": 5.0 - s, "tokens_per_second": 10.0 * s} for s in (1, 2, 3, 4)]
    made = training_result([*log, {"step": 4, "train_runtime": 1.0}], 100)
    assert made["plots"][0]["series"]["training loss"] == ([100, 200, 300, 400], [4.0, 3.0, 2.0, 1.0])
    assert [row["step"] for row in made["rows"]] == [1, 3, 4]
    assert made["settings"]["tokens per second"] == 25
    assert training_result([], 100)["rows"] == []
