"""Charts and pages without a browser: what is drawn of many values, and text that is not markup."""

import pytest
from rich.table import Table

from tpu_offload.cli.html.charts import (
    BLUE,
    MAX_POINTS,
    Axis,
    Series,
    distribution,
    lines,
    log_marks,
    points,
    short,
    stacked,
)
from tpu_offload.cli.html.page import Figure, Page, Section
from tpu_offload.cli.html.replay import run_warnings

X, Y = Axis("x"), Axis("y")


def test_a_distribution_has_each_value_and_ends_at_the_largest():
    chart = distribution("d", [Series("a", [3.0, 1.0, 2.0, 2.0], (), BLUE)], x=X)
    (drawn,) = chart.spec["data"]
    assert drawn["x"] == [1.0, 2.0, 2.0, 3.0]
    assert drawn["y"] == [25, 50, 75, 100]


def test_of_many_values_some_are_drawn():
    num = 5 * MAX_POINTS
    values = list(map(float, range(num)))
    (drawn,) = distribution("d", [Series("a", values, (), BLUE)], x=X).spec["data"]
    assert len(drawn["x"]) <= MAX_POINTS
    assert (drawn["x"][-1], drawn["y"][-1]) == (num - 1, 100)
    few = Series("b", [1, 2], [3.0, 4.0], BLUE)
    chart = points("p", [Series("a", values, values, BLUE, text=[str(v) for v in values]), few], x=X, y=Y, note="All.")
    drawn, other = chart.spec["data"]
    assert other["x"] == [1, 2]
    assert drawn["x"] == drawn["y"] == values[::5]
    assert drawn["hovertext"] == [str(v) for v in values[::5]]
    assert chart.note == "All. a: one point of 5 is drawn."


def test_a_distribution_of_one_value_is_seen():
    (drawn,) = distribution("d", [Series("a", [3.0], (), BLUE)], x=X).spec["data"]
    assert drawn["mode"] == "lines+markers"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.02, "0.02"), (12.34, "12.3"), (690.4, "690"), (8192, "8192"), (131072, "131k"), (999_999, "1M"), (2e9, "2G")],
)
def test_short_numbers_have_no_exponent(value, text):
    assert short(value) == text


def test_the_spread_is_drawn_from_the_value():
    one = Series("a", [1, 2], [4.0, 6.0], BLUE, low=[3.0, 6.0], high=[8.0, 7.0])
    (drawn,) = lines("l", [one], x=X, y=Y).spec["data"]
    assert (drawn["error_y"]["arrayminus"], drawn["error_y"]["array"]) == ([1.0, 0.0], [4.0, 1.0])


def test_names_that_look_like_numbers_stay_names():
    chart = stacked("s", [Series("a", ["5 %", "50 %"], [1.0, 2.0], BLUE)], x=X, y=Y)
    assert chart.spec["layout"]["xaxis"]["type"] == "category"


@pytest.mark.parametrize(
    ("values", "marks"),
    [
        ([], []),
        ([0.0, -1.0], []),
        ([3.0], [1, 2, 5, 10, 20, 50]),
        ([0.02, 0.3], [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5]),
    ],
)
def test_marks_of_a_logarithmic_axis(values, marks):
    assert log_marks(values) == pytest.approx(marks)


def page_with(text):
    table = Table("[b]head[/b]", title=text)
    table.add_row("a \\[b]")
    chart = lines(text, [Series(text, [1], [2.0], BLUE)], x=X, y=Y, note=text)
    section = Section(text, text, [chart], [table], text)
    return Page(text, ["replay", text], text, [Figure(text, text, text)], [text], [section])


def test_text_is_no_markup():
    """File names and errors come from elsewhere; a page is opened in a browser."""
    text = "</script><script>alert('x')</script>"
    content = page_with(text).render().decode()
    plain = page_with("plain").render().decode()
    assert content.count("<script") == plain.count("<script") == 2
    assert content.count("</script") == plain.count("</script") == 2
    assert "<td>a [b]</td>" in content
    assert "head</th>" in content


def test_equal_pages_give_equal_files():
    assert page_with("a").render() == page_with("a").render()


def test_what_is_wrong_comes_first():
    differences = [{"text": f"request {i} differs"} for i in range(12)]
    report = {"differences": differences, "num_compared": 20, "interrupted": True}
    said = run_warnings(report)
    assert said[:2] == ["OUTPUTS DIFFER in 12 of 20 requests.", "request 0 differs"]
    assert len(said) == 12
    assert said[-1].startswith("Interrupted")
    nothing = {"differences": [], "num_compared": 0, "interrupted": False}
    assert run_warnings(nothing) == ["No request finished in both runs, so no output was compared."]
