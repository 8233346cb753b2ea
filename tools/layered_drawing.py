"""Draws an acyclic graph as an SVG: boxes in layers, each above all boxes that its arrows lead to."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 208, 78  # of a box
GAP, LAYER_GAP, MARGIN = 16, 38, 12  # between boxes of a layer, between layers, around everything
LANE = 12  # width of an arrow that passes a layer
SWEEPS = 12
COLUMNS = 36  # characters per line of a box's text
LINES = 4
TIP = "M 0 0 L 8 4 L 0 8 z"


@dataclass(frozen=True)
class Box:
    """A node of the graph.

    Args:
        name: Its name, which arrows refer to; the title of the box.
        text: A sentence below the title.
        color: Fill of the box.
    """

    name: str
    text: str
    color: str


Graph = Mapping[str, Sequence[str]]  # name -> names that its arrows lead to


def draw(boxes: Sequence[Box], arrows: Graph) -> str:
    """Returns the SVG text; the same graph gives the same text.

    Args:
        boxes: All boxes, in the order in which boxes of a layer are placed at first.
        arrows: Arrows from each box; arrows that follow from others are left out.
    """
    by_name = {box.name: box for box in boxes}
    reduced = without_shortcuts({box.name: arrows.get(box.name, ()) for box in boxes})
    layers, lanes = list_layers(reduced)
    for number in range(SWEEPS):
        sort_layers(layers, lanes, downward=number % 2 == 0)
    positions = place_boxes(layers, by_name)
    width = max(x + measure_box(name, by_name)[0] for name, (x, _) in positions.items()) + MARGIN
    height = MARGIN * 2 + len(layers) * HEIGHT + (len(layers) - 1) * LAYER_GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" font-family="sans-serif">',
        f'<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="{TIP}" fill="#607080"/></marker></defs>',
        f'<rect width="{width:.0f}" height="{height}" fill="#ffffff"/>',
        *(arrow_path(lane, positions, by_name) for lane in lanes),
        *(box_text(by_name[name], *position) for name, position in positions.items() if name in by_name),
        "</svg>\n",
    ]
    return "\n".join(parts)


def without_shortcuts(arrows: Graph) -> dict[str, list[str]]:
    """Returns the graph without the arrows that lead where a chain of other arrows leads too."""
    reached: dict[str, set[str]] = {}

    def reach(name: str) -> set[str]:
        if name not in reached:
            reached[name] = set(arrows[name]).union(*(reach(other) for other in arrows[name]))
        return reached[name]

    return {
        name: [other for other in others if not any(other in reach(each) for each in others if each != other)]
        for name, others in arrows.items()
    }


def list_layers(arrows: Graph) -> tuple[list[list[str]], list[list[str]]]:
    """Returns the layers from top to bottom, and the lanes of the arrows: each a chain of names from layer to layer.

    A box is in the highest layer that is below all boxes whose arrows lead to it.
    """
    above: dict[str, list[str]] = {name: [] for name in arrows}
    for name, others in arrows.items():
        for other in others:
            above[other].append(name)
    depth: dict[str, int] = {}

    def measure_depth(name: str) -> int:
        if name not in depth:
            depth[name] = 1 + max((measure_depth(other) for other in above[name]), default=-1)
        return depth[name]

    layers: list[list[str]] = [[] for _ in range(1 + max(map(measure_depth, arrows)))]
    for name in arrows:
        layers[measure_depth(name)].append(name)
    lanes = []
    for name, others in arrows.items():
        for other in others:
            passed = [f"{name} > {other} {number}" for number in range(depth[name] + 1, depth[other])]
            for number, lane in enumerate(passed, depth[name] + 1):
                layers[number].append(lane)
            lanes.append([name, *passed, other])
    return layers, lanes


def sort_layers(layers: list[list[str]], lanes: Sequence[Sequence[str]], *, downward: bool) -> None:
    """Moves each box of a layer towards the mean position of the boxes that it is joined to in the layer before."""
    joined: dict[str, list[str]] = {}
    for lane in lanes:
        for upper, lower in zip(lane, lane[1:], strict=False):
            first, second = (lower, upper) if downward else (upper, lower)
            joined.setdefault(first, []).append(second)
    for layer in layers if downward else layers[::-1]:
        share = {name: (position + 0.5) / len(each) for each in layers for position, name in enumerate(each)}
        wanted = {
            name: sum(share[other] for other in others) / len(others) if (others := joined.get(name)) else share[name]
            for name in layer
        }
        layer.sort(key=lambda name: wanted[name])


def measure_box(name: str, boxes: Mapping[str, Box]) -> tuple[int, int]:
    """Returns the width and height of a box."""
    return (WIDTH if name in boxes else LANE), HEIGHT


def place_boxes(layers: Sequence[Sequence[str]], boxes: Mapping[str, Box]) -> dict[str, tuple[float, int]]:
    """Returns name -> left upper corner; every layer is centred."""
    widths = [sum(measure_box(name, boxes)[0] for name in layer) + GAP * (len(layer) - 1) for layer in layers]
    positions = {}
    for number, (layer, width) in enumerate(zip(layers, widths, strict=True)):
        x = MARGIN + (max(widths) - width) / 2
        for name in layer:
            positions[name] = (x, MARGIN + number * (HEIGHT + LAYER_GAP))
            x += measure_box(name, boxes)[0] + GAP
    return positions


def arrow_path(lane: Sequence[str], positions: Mapping[str, tuple[float, int]], boxes: Mapping[str, Box]) -> str:
    """Returns the SVG path of an arrow through the layers."""
    points = []
    for name in lane:
        x, y = positions[name]
        middle = x + measure_box(name, boxes)[0] / 2
        points += [(middle, y)] if name == lane[-1] else [(middle, y + HEIGHT)] if name == lane[0] else []
        points += [(middle, y), (middle, y + HEIGHT)] if name not in boxes else []
    path = f"M {points[0][0]:.0f} {points[0][1]}"
    for (x, y), (other_x, other_y) in zip(points, points[1:], strict=False):
        middle = (y + other_y) // 2
        path += f" C {x:.0f} {middle} {other_x:.0f} {middle} {other_x:.0f} {other_y}"
    title = escape(f"{lane[0]} imports {lane[-1]}")
    return f'<path d="{path}" fill="none" stroke="#607080" marker-end="url(#tip)"><title>{title}</title></path>'


def box_text(box: Box, x: float, y: int) -> str:
    """Returns the SVG text of a box."""
    middle = f"{x + WIDTH / 2:.0f}"
    lines = textwrap.wrap(box.text, COLUMNS, max_lines=LINES, placeholder=" …")
    spans = "".join(f'<tspan x="{middle}" dy="13">{escape(line)}</tspan>' for line in lines)
    return (
        f'<g><rect x="{x:.0f}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="5" fill="{box.color}" stroke="#607080"/>'
        f'<text x="{middle}" y="{y + 17}" text-anchor="middle" font-size="13" font-weight="bold" '
        f'fill="#102030">{escape(box.name)}</text>'
        f'<text y="{y + 20}" text-anchor="middle" font-size="10" fill="#304050">{spans}</text></g>'
    )
