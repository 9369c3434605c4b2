"""The page of a run: well-formed, without references to other files, and safe with any text."""

import math
from html.parser import HTMLParser

from megatron_zpp.commands.report import settings_of
from megatron_zpp.config.root import parse_args
from megatron_zpp.reporting.report.charts import chart, short
from megatron_zpp.reporting.report.curves import Curve
from megatron_zpp.reporting.report.page import Report, Setting, page
from tests.config.command_line import MINIMAL
from tests.reporting.test_curves import step

EVIL = "</td></script><script>alert('\"&')</script>"


class Page(HTMLParser):
    """The elements of a page, which must be closed in their order, and the attributes of each."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, text: str) -> None:
        self.texts.append(text)


def test_a_page_needs_nothing_else_and_shows_text_as_it_is() -> None:
    records = [{**step(iteration, 3.0 / iteration), "time_forward_ms": 5.0} for iteration in range(1, 60)]
    records += [
        {"iteration": 59, "valid_loss": 2.0, "valid_perplexity": math.exp(2)},
        {"iteration": 59, "sample": EVIL, "sample_2": "another prompt"},
    ]
    text = page(
        Report(
            title=EVIL,
            source=EVIL,
            records=records,
            iterations=100,
            settings=[
                Setting("model", "--num-layers", EVIL, True),
                Setting("model", "--seq-length", "16", False),
            ],
            memory=[("peak", "1 GiB", "2 GiB", EVIL)],
            traffic=[("between nodes", "3", "3", "equal")],
        )
    )
    found = Page(text)
    assert "script" not in [tag for tag, _ in found.found]
    assert not any({"src", "href"} & set(attributes) for _, attributes in found.found)
    links = [attributes["xlink:href"] for _, attributes in found.found if "xlink:href" in attributes]
    assert all(link.startswith("#") for link in links)
    assert "http" not in text
    assert sum(EVIL in each for each in found.texts) >= 4
    shown = "".join(found.texts)
    assert all(
        said in shown
        for said in ("59", "iterations of 100", "2.0000", "Loss, nats per token", "another prompt")
    )
    assert not any(said in shown for said in ("Gradient norm", "Learning rate"))
    for heading in ("Where the time of a step goes", "Memory of each rank", "Configuration", "Text that the"):
        assert heading in text


def test_the_shown_settings_of_a_run_are_those_that_nothing_implies() -> None:
    shown = [setting.flag for setting in settings_of(parse_args(MINIMAL)) if setting.changed]
    assert "--num-layers" in shown
    assert not {"--ffn-hidden-size", "--kv-channels", "--hidden-dropout"} & set(shown)


def test_a_section_without_content_is_left_out() -> None:
    record = {name: value for name, value in step(1).items() if name != "sample"}
    text = page(Report(title="run", source="", records=[record]))
    Page(text)
    for heading in ("Where the time", "Memory of each rank", "Bytes sent", "Configuration", "Text that"):
        assert heading not in text


def test_the_tile_of_tokens_counts_each_sequence_length() -> None:
    records = [step(10), step(20, length=64), step(30, length=64)]
    found = Page(page(Report(title="run", source="", records=records)))
    assert found.texts[found.texts.index("tokens trained on") - 1] == short(40 * 16 + 80 * 64)


def test_a_chart_has_the_colours_of_the_page_and_leaves_out_what_is_not_finite() -> None:
    curves = {"a&b": Curve([1, 2, 3, 4], [1.0, math.nan, -math.inf, 1e38]), "single": Curve([2], [-3.0])}
    found = Page(drawn := chart(curves, title=EVIL, x_label="iteration"))
    assert {"a&b", "single", "iteration", EVIL} <= set(found.texts)
    assert "var(--series-1)" in drawn
    assert "#0101" not in drawn
    assert "nan" not in drawn
    assert chart({"loss": Curve([1], [math.inf])}, title="t", x_label="x") == ""


def test_short_numbers() -> None:
    shown = ", ".join(map(short, (0.00123, 42, 9999, 12_345, 3.5e6, 2e9, 7.1e12)))
    assert shown == "0.00123, 42, 9999, 12.35 k, 3.5 M, 2 G, 7.1 T"
