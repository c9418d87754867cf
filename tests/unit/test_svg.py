"""The picture of a layout: every rank once, in its color, with its groups."""

import math
import re
import stat
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from meshrun.errors import UsageError
from meshrun.layout import Layout, solve_layout
from meshrun.layout.spec import MeshSpec, parse_mesh
from meshrun.report import svg_style
from meshrun.report.svg import choose_color_dim, render_svg
from meshrun.report.svg_geometry import _best_grid
from meshrun.wording import count
from tests.kit import ROOT, run_meshrun

SVG = "{http://www.w3.org/2000/svg}"
LAYOUTS = [
    ("dp=2,tp=4", 1), ("dp=2,tp=4", 2), ("tp=4,dp=2", 2), ("dp=3,tp=4", 2), ("2x2x2x2", 4),
    ("dp=1", 1), ("pp=1,dp=2,tp=1", 2), ("pp=2,dp=4,tp=8", 8), ("dp=32", 1), ("dp=8,tp=16", 16),
    ("dp=64,tp=8", 64), ("pp=4,dp=16,tp=8", 64),
]  # fmt: skip


def layout(mesh: str | None, nnodes: int = 1, nproc: int | None = None) -> Layout:
    spec = parse_mesh(mesh) if mesh else None
    return solve_layout(spec, nnodes=nnodes, nproc_per_node=nproc)


def draw(plan: Layout, dim: str | None = None) -> ET.Element:
    return ET.fromstring(render_svg(plan, color_dim=choose_color_dim(plan, dim)))


def cells(picture: ET.Element) -> dict[int, ET.Element]:
    """Return the cell of each rank; a rank that is drawn twice fails."""
    found: dict[int, ET.Element] = {}
    for cell in picture.iter(f"{SVG}g"):
        label = cell.find(f"{SVG}text")
        if (cell.get("class") or "").startswith("cell ") and label is not None:
            assert int(label.text or "") not in found
            found[int(label.text or "")] = cell
    return found


def titled(picture: ET.Element, name: str) -> list[str]:
    """Return the titles of the groups drawn as lines of a class."""
    groups = [group for group in picture.iter(f"{SVG}g") if group.get("class") == name]
    return [
        title.text or "" for group in groups if (title := group.find(f"{SVG}title")) is not None
    ]


def texts(picture: ET.Element) -> list[str]:
    return [text.text or "" for text in picture.iter(f"{SVG}text")]


def linear(fill: str) -> list[float]:
    """Return the channels of a color in linear light."""
    channels = (channel / 255 for channel in bytes.fromhex(fill[1:]))
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colors as WCAG defines it, from 1 to 21."""
    darker, lighter = sorted(
        0.2126 * red + 0.7152 * green + 0.0722 * blue
        for red, green, blue in (linear(one), linear(other))
    )
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize(("mesh", "nnodes"), LAYOUTS)
def test_every_rank_has_one_cell_in_its_color(mesh: str, nnodes: int) -> None:
    """Each rank has one cell, whose color is that of its index in the dim."""
    plan = layout(mesh, nnodes)
    for dim, size in enumerate(plan.sizes):
        picture = draw(plan, str(dim))
        found = cells(picture)

        assert list(found) == list(range(plan.world_size))
        for rank, cell in found.items():
            name = svg_style.color_class(plan.coordinate(rank)[dim], size)
            assert cell.get("class") == f"cell {name}"
            style = next(picture.iter(f"{SVG}style")).text or ""
            assert f".{name} rect{{fill:{svg_style.color(name)}}}" in style


@pytest.mark.parametrize(("mesh", "nnodes"), LAYOUTS)
def test_groups_that_cross_are_counted(mesh: str, nnodes: int) -> None:
    """The legend's numbers are those of the layout's groups, counted one by one."""
    plan = layout(mesh, nnodes)
    legend = texts(draw(plan))
    for dim, label in enumerate(plan.dim_labels):
        groups = list(plan.groups(dim))
        crossing = sum(plan.crosses_nodes(group) for group in groups)

        cross = "crosses" if len(groups) == 1 else "cross"
        row = f"{label}: {crossing} of {count(len(groups), 'group')} {cross} nodes"
        assert row in {text.removesuffix(" (of one rank)") for text in legend}


def test_uneven_nodes_are_counted_too() -> None:
    plan = Layout(mesh=parse_mesh("dp=3,tp=4"), nproc_per_node=(2, 6, 4))

    assert [plan.count_crossing(dim) for dim in (0, 1)] == [4, 1]
    assert list(cells(draw(plan))) == list(range(12))
    assert "12 ranks on 3 nodes \u00d7 2-6 workers" in render_svg(plan)


def test_a_line_of_nodes_draws_every_group() -> None:
    """Those that cross nodes have a stroke of their own."""
    picture = draw(layout("dp=2,tp=4", 2))

    assert titled(picture, "in") == ["tp: ranks 0, 1, 2, 3", "tp: ranks 4, 5, 6, 7"]
    assert titled(picture, "over") == [f"dp: ranks {rank}, {rank + 4}" for rank in range(4)]


def test_rows_of_nodes_bundle_groups_that_cross() -> None:
    """Groups on the same nodes are one line."""
    picture = draw(layout("pp=2,dp=4,tp=8", 8))

    assert len(titled(picture, "in")) == 8
    assert titled(picture, "over") == [
        "dp: 8 groups on nodes 0, 1, 2, 3",
        "dp: 8 groups on nodes 4, 5, 6, 7",
        *(f"pp: 8 groups on nodes {node}, {node + 4}" for node in range(4)),
    ]


def test_a_grid_of_nodes_outlines_the_groups_of_rank_0() -> None:
    picture = draw(layout("pp=4,dp=16,tp=8", 64))
    counts = {
        name: sum(1 for group in picture.iter(f"{SVG}g") if group.get("class") == name
                  and group.find(f"{SVG}title") is not None for _ in group.iter(f"{SVG}rect"))
        for name in ("in", "over", "over second")
    }  # fmt: skip

    assert counts == {"in": 8, "over": 15, "over second": 3}  # rank 0 itself is outlined once


@pytest.mark.parametrize(("mesh", "nnodes"), [("dp=8,tp=8", 1), ("4x4x4", 1), ("4x16x8", 64)])
def test_outlines_of_two_dims_differ_in_more_than_thickness(mesh: str, nnodes: int) -> None:
    """In color, shape or dashes."""
    picture = draw(layout(mesh, nnodes))
    light = (next(picture.iter(f"{SVG}style")).text or "").partition(svg_style.DARK_QUERY)[0]
    rules = re.findall(r"\.meshrun (?:\.marks )?\.([\w.]+)\{([^}]*)\}", light)
    looks = []
    for outlines in picture.findall(f"{SVG}g[@class='marks']/{SVG}g/{SVG}title/.."):
        names = (outlines.get("class") or "").split()
        style: dict[str, str] = {}
        for selector, rule in rules:
            if {*selector.split(".")} <= {*names}:
                style.update(each.split(":") for each in rule.split(";"))
        looks.append((outlines[1].tag, style.get("stroke"), style.get("stroke-dasharray")))

    assert len({*looks}) == len(looks) > 1


def test_the_picture_has_a_background() -> None:
    """A viewer without media queries, or on black, shows dark text on a light background."""
    picture = draw(layout("dp=8,tp=8"))
    style = next(picture.iter(f"{SVG}style")).text or ""
    light, _, dark = style.partition(svg_style.DARK_QUERY)
    page, first = (child for child in list(picture)[3:5])

    assert (page.get("class"), page.get("width"), page.get("height")) == ("page", "100%", "100%")
    assert first.get("class") == "head"
    assert [picture.get(size, "").isdigit() for size in ("width", "height")] == [True, True]
    for rules in (light, dark):
        ground, ink = (
            re.search(rf"\.meshrun {what}{{fill:(#\w+)}}", rules)[1]  # type: ignore[index]
            for what in (r"\.page", "text")
        )
        assert contrast(ground, ink) > 12


def boxes_of_text(picture: ET.Element) -> Iterator[tuple[float, float, float, float]]:
    sizes = {"head": 16 * 1.12, "soft": 11, "at": 9, None: 12}
    small = {id(text) for group in picture.iter(f"{SVG}g") if group.get("class") == "small"
             for text in group.iter(f"{SVG}text")}  # fmt: skip
    inside = {id(text) for cell in cells(picture).values() for text in cell.iter(f"{SVG}text")}
    for text in picture.iter(f"{SVG}text"):
        size = sizes[text.get("class")]
        if id(text) in inside and text.get("class") is None:
            size = 9 if id(text) in small else 13
        width = svg_style.width_of(text.text or "", size)
        x, y = float(text.get("x", "")), float(text.get("y", ""))
        left = x - width / 2 if id(text) in inside else x
        yield left, y - size * 0.75, left + width, y


def test_the_width_of_a_text_is_exact() -> None:
    """So no rounding, which differs in Python 3.12, moves a picture's lines."""
    assert svg_style.width_of("a line, a word, it will do", 1) == 13.6


@pytest.mark.parametrize(("mesh", "nnodes"), [*LAYOUTS, ("a_rather_long_name_of_a_dim=2,tp=4", 2)])
def test_no_text_overlaps_another(mesh: str, nnodes: int) -> None:
    """Nor is any cut off at the edge."""
    picture = draw(layout(mesh, nnodes))
    boxes = sorted(boxes_of_text(picture))
    width, height = float(picture.get("width", "")), float(picture.get("height", ""))

    for place, one in enumerate(boxes):
        assert one[2] <= width
        assert one[3] <= height
        for other in boxes[place + 1 :]:
            if other[0] >= one[2]:
                break
            assert other[1] >= one[3] or one[1] >= other[3], (one, other)


@pytest.mark.parametrize(
    ("mesh", "nnodes", "workers", "size"),
    [
        ("dp=2,tp=4", 4, 2, 2),
        ("pp=2,dp=4,tp=8", 8, 8, 3),
        ("dp=9,tp=8", 18, 4, 18),
        ("dp=36,tp=8", 72, 4, 18),
        ("dp=50,tp=8", 100, 4, 18),
        ("dp=20", 20, 1, 1),
        ("dp=10000,tp=8", 10_000, 8, 18),
        ("dp=10000,tp=8", 10_000, 8, 10_000),
        (None, 4, 2, 3),
    ],
)
def test_domains_are_frames_around_their_nodes(
    mesh: str | None, nnodes: int, workers: int, size: int
) -> None:
    """Each contains its nodes' boxes and no other."""
    plan = Layout.parse(mesh, nnodes=nnodes, nproc_per_node=workers, domain_size=size)
    picture = draw(plan)
    width, height = float(picture.get("width", "")), float(picture.get("height", ""))
    places = {
        name: [
            (x, y, x + float(each.get("width", "")), y + float(each.get("height", "")))
            for each in picture.iter(f"{SVG}rect")
            if each.get("class") == name
            for x, y in [(float(each.get("x", "")), float(each.get("y", "")))]
        ]
        for name in ("frame", "box")
    }
    labels = [text.split() for text in texts(picture) if re.fullmatch(r"(node|domain) \d+", text)]
    nodes, domains = (
        [int(at) for kind, at in labels if kind == what] for what in ("node", "domain")
    )

    assert domains == sorted({node // size for node in nodes})
    for domain, frame in zip(domains, places["frame"], strict=True):
        assert 0 < frame[0] < frame[2] < width
        assert 0 < frame[1] < frame[3] < height
        for node, box in zip(nodes, places["box"], strict=True):
            inside = frame[0] < box[0] < box[2] < frame[2] and frame[1] < box[1] < box[3] < frame[3]
            apart = box[2] < frame[0] or frame[2] < box[0] or box[3] < frame[1] or frame[3] < box[1]
            assert (inside, apart) == (node // size == domain, node // size != domain)
    for one, other in combinations(boxes_of_text(picture), 2):
        assert other[0] >= one[2] or one[0] >= other[2] or other[1] >= one[3] or one[1] >= other[3]


@pytest.mark.parametrize("width", [160, 200, 240, 300, 400])
@pytest.mark.parametrize("height", [40, 56, 100])
def test_a_grid_has_few_empty_places(width: float, height: float) -> None:
    """Eight nodes are not seven and one below them."""
    grid = _best_grid([8] * 8, width, height, is_framed=True)
    places = [size * math.ceil(8 / size) for size in (grid.columns, grid.across)]
    assert math.prod(places) <= 1.25 * 64


def test_any_name_is_escaped() -> None:
    """A layout from Python may have names that the command line refuses."""
    spec = MeshSpec(sizes=(2, 2), mesh_dim_names=('<a href="x">&', "\x00\ud800'"))
    picture = draw(Layout(mesh=spec, nproc_per_node=(4,)))

    assert texts(picture)[0].startswith('<a href="x">&=2,\ufffd\ufffd\'=2: 4 ranks')


def test_the_picture_loads_nothing_else() -> None:
    text = render_svg(layout("pp=2,dp=4,tp=8", 8), color_dim=0)

    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"<script|<image|<foreignObject|@import|url\(|var\(", text)
    assert svg_style.DARK_QUERY in text


def test_the_same_layout_is_the_same_text() -> None:
    plan = layout("dp=64,tp=8", 64)

    assert render_svg(plan, color_dim=0) == render_svg(plan, color_dim=0)


def test_the_picture_says_in_words_what_it_shows() -> None:
    picture = draw(layout("tp=4,dp=2", 2))

    assert picture[0].text == "tp=4,dp=2: 8 ranks on 2 nodes \u00d7 4 workers"
    assert "tp: 2 of 2 groups cross nodes. dp: 0 of 4 groups" in (picture[1].text or "")
    assert cells(picture)[3][0].text == "rank 3: node 0, local rank 3; tp=1, dp=1"


def test_without_a_mesh_ranks_have_one_color() -> None:
    found = cells(draw(layout(None, 1, 8)))

    assert {cell.get("class") for cell in found.values()} == {"cell plain"}


@pytest.mark.parametrize("nnodes", [1, 2048])
def test_a_large_plan_says_what_is_left_out(nnodes: int) -> None:
    """The picture stays small."""
    plan = layout("dp=2048,tp=8", nnodes)
    text = render_svg(plan, color_dim=0)

    assert len(text) < 500_000
    notes = " ".join(texts(ET.fromstring(text)))
    left_out = "not drawn: 1,983 nodes, 64 to 2046, with 15,864 ranks"
    assert ("only the first 512 ranks of a node are drawn" if nnodes == 1 else left_out) in notes


# ---- colors -------------------------------------------------------------------------------


def test_numbers_can_be_read_on_every_color() -> None:
    names = [*(f"c{index}" for index in range(8)), *(f"r{step}" for step in range(64))]
    full = {"#000": "#000000", "#fff": "#ffffff"}

    for fill in map(svg_style.color, names):
        assert contrast(fill, full[svg_style.text_color(fill)]) >= 4.5


SEEN = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "no green": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "no blue": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}
"""How a color is seen without one kind of cone (Machado, Oliveira and Fernandes, 2009)."""


def perceived(fill: str, eye: str) -> tuple[float, ...]:
    """Return a color in OKLab, where equal distances look equal."""
    light = linear(fill)
    for matrix in (
        SEEN[eye],
        ((0.4122, 0.5363, 0.0514), (0.2119, 0.6807, 0.1074), (0.0883, 0.2817, 0.6300)),
    ):
        light = [max(0.0, sum(a * b for a, b in zip(row, light, strict=True))) for row in matrix]
    roots = [channel ** (1 / 3) for channel in light]
    to_lab = ((0.2105, 0.7936, -0.0041), (1.9780, -2.4286, 0.4506), (0.0259, 0.7828, -0.8087))
    return tuple(sum(a * b for a, b in zip(row, roots, strict=True)) for row in to_lab)


@pytest.mark.parametrize("eye", SEEN)
def test_colors_differ_for_every_eye(eye: str) -> None:
    """By at least three times the difference that is just noticeable, which is 0.02."""
    seen = [perceived(fill, eye) for fill in svg_style.CATEGORIES]

    for (one_at, one), (other_at, other) in combinations(enumerate(seen), 2):
        assert math.dist(one, other) > 0.06, (one_at, other_at)


def test_a_ramp_grows_lighter() -> None:
    light = [contrast(svg_style.color(f"r{step}"), "#000000") for step in range(64)]

    assert light == sorted(light)
    assert [svg_style.color_class(index, 2048) for index in (0, 2047)] == ["r0", "r63"]


# ---- the command line ----------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, fake_torch: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


SVG_RUN = ("--dry-run", "--format", "svg")


def test_the_picture_of_the_docs_is_the_one_that_is_drawn(folder: Path) -> None:
    """UPDATE_GOLDEN=1 does not update this picture; the command below does."""
    ours = run_meshrun(*SVG_RUN, "-o", "x.svg", "--mesh", "dp=2,tp=4", "--nnodes", "2", "train.py")

    assert (ours.returncode, ours.stdout, ours.stderr) == (0, "", "")
    docs = ROOT / "docs" / "images" / "dp2-tp4-two-nodes.svg"
    assert (folder / "x.svg").read_text() == docs.read_text()


def test_color_dim_chooses_what_colors_mean(folder: Path) -> None:
    ours = run_meshrun(*SVG_RUN, "--color-dim", "tp", "--mesh", "dp=2,tp=4", "train.py")

    assert ours.stdout == render_svg(layout("dp=2,tp=4"), color_dim=1)


@pytest.mark.parametrize(
    ("mesh", "asked", "found", "hint"),
    [
        ("dp=2,tp=4", "ep", "mesh `dp=2,tp=4` has no dim `ep`", "`dp`, `tp`"),
        ("2x4", "2", "mesh `2x4` has no dim `2`", "`0`, `1`"),
        (None, "dp", "--color-dim dp requires --mesh", "--mesh dp=8"),
    ],
)
def test_a_dim_that_does_not_exist(mesh: str | None, asked: str, found: str, hint: str) -> None:
    with pytest.raises(UsageError) as raised:
        choose_color_dim(layout(mesh), asked)

    assert found in raised.value.message
    assert hint in (raised.value.hint or "")


def test_the_default_dim_is_the_slowest_with_several_indexes() -> None:
    assert choose_color_dim(layout("pp=1,dp=2,tp=4"), None) == 1
    assert choose_color_dim(layout("pp=1,dp=1"), None) == 0
    assert choose_color_dim(layout(None), None) is None


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ((*SVG_RUN, "--color-dim", "ep", "--mesh", "dp=2"), 2, "has no dim `ep`"),
        (("-n", "-o", "none/x.svg"), 2, "`none` does not exist"),
        (("-n", "-o", "."), 2, "--output expects a file, found `.`"),
        (("-n", "-o", ""), 2, "--output expects a file"),
        (("-n", "-o", "/dev/full"), 71, ": No space left on device"),
        (("-o", "x"), 2, "--output requires --dry-run"),
        (("-n", "--format", "svgz"), 2, "--format must be text, json or svg"),
    ],
)
def test_an_impossible_request_leaves_no_file(
    args: tuple[str, ...], code: int, message: str, folder: Path
) -> None:
    """Nothing is printed and no file is left behind."""
    ours = run_meshrun(*args, "train.py")

    assert (ours.returncode, ours.stdout) == (code, "")
    assert message in ours.stderr
    assert [path.name for path in folder.iterdir()] == ["train.py"]


def test_the_files_content_is_kept_on_an_error(folder: Path) -> None:
    (folder / "x.svg").write_text("old")

    run_meshrun(*SVG_RUN, "-o", "x.svg", "--color-dim", "ep", "--mesh", "dp=2", "train.py")

    assert (folder / "x.svg").read_text() == "old"


@pytest.mark.parametrize("output_format", ["text", "json", "svg"])
def test_a_dry_run_of_any_format_goes_to_a_file(output_format: str, folder: Path) -> None:
    """The file has what stdout would have; a link and permissions stay."""
    args = ("-n", "--format", output_format, "--mesh", "dp=2", "train.py")
    (folder / "kept").write_text("old")
    (folder / "kept").chmod(0o640)
    (folder / "link").symlink_to("kept")
    ours = run_meshrun("-o", "link", *args)

    assert (ours.returncode, ours.stdout, ours.stderr) == (0, "", "")
    assert (folder / "kept").read_text() == run_meshrun(*args).stdout
    assert (folder / "link").is_symlink()
    assert stat.S_IMODE((folder / "kept").stat().st_mode) == 0o640


def test_a_dash_is_stdout(folder: Path) -> None:
    assert run_meshrun("-n", "-o", "-", "train.py").stdout.startswith("no mesh: 1 rank")
