"""The arena's scatter plots can be read: every label is beside its point, inside the frame and free of the others."""

import itertools

import pytest
from matplotlib.text import Annotation

from arena.plots import Plot, scatter_figure


@pytest.mark.parametrize("spread", [0.0, 0.02, 1.0])
def test_labels_are_inside_the_frame_and_cover_neither_each_other_nor_points(spread):
    names = ("attention", "gdn", "mamba2", "oryx-tm", "oryx-tg", "nats-l", "lalte", "lansa")
    variants = [(name, mode) for name in names for mode in ("", "attention → linear")]
    points = {variant: (1e6 * (1 + spread * i), 0.9 + 0.1 * spread * (i % 3)) for i, variant in enumerate(variants)}
    figure = scatter_figure(Plot("p", "Recall", "state (bytes)", "accuracy", True, points))
    figure.canvas.draw()
    (axes,) = figure.axes
    labels = [text.get_window_extent() for text in axes.texts if isinstance(text, Annotation)]
    assert len(labels) == len(points)
    for box in labels:
        assert axes.bbox.x0 <= box.x0
        assert box.x1 <= axes.bbox.x1
        assert axes.bbox.y0 <= box.y0
        assert box.y1 <= axes.bbox.y1
        assert not any(box.contains(*axes.transData.transform(point)) for point in points.values())
    assert not any(one.overlaps(other) for one, other in itertools.combinations(labels, 2))
