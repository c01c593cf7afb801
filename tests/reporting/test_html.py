"""The page and the notebook's form: whole, safe, complete in themselves, and with the report's own numbers."""

import base64
import re
import sys
from html import escape
from html.parser import HTMLParser

import pytest
import torch
from support.cst_conversions import small_model
from support.cst_conversions import tokens as cst_tokens
from support.tiny_models import batch_for, tiny_model

import hf_effattn
from hf_effattn import Report
from hf_effattn.measuring.errors import OutputChange
from hf_effattn.reporting import illustrations
from hf_effattn.reporting.drawn_text import text_to_draw, without_marks
from hf_effattn.reporting.findings import MeasuredInput, Measurement

METHODS = [
    {"method": "clustered", "clusters": 5},
    {"method": "i-clustered", "clusters": 5, "topk": 4, "min_length": 0},
    {"method": "bi-clustered", "clusters": 7, "topk": 4, "key_clusters": 6, "min_length": 0},
]
LABELS = [
    "clustered clusters=5",
    "i-clustered clusters=5 topk=4",
    "bi-clustered clusters=7 topk=4 key_clusters=6",
]
VOID = {"meta", "img", "br", "link", "input", "hr"}
# Headings of the table, the report's metric, and what one unit of the number shown is.
METRICS = {
    "attention error": ("attention_error", 0.01),
    "output error": ("hidden_error", 0.01),
    "cosine": ("embedding_cosine_mean", 1),
    "model speed": ("forward_speedup", 1),
    "attention speed": ("attention_speedup", 1),
    "peak memory": ("forward_peak_bytes", 1e6),
}


class Page(HTMLParser):
    """A parsed page; raises where a tag is not closed, or closed by another."""

    def __init__(self, text):
        super().__init__()
        self.stack, self.tags, self.text = [], [], ""
        self.rows = []
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag, self.getpos()

    def handle_data(self, data):
        self.text += data
        if {"td", "th"} & set(self.stack):
            self.rows[-1][-1] += data

    def attributes(self, tag, name):
        return [attrs[name] for kind, attrs in self.tags if kind == tag and name in attrs]


class Words:
    """A tokenizer as far as a page needs one: every id is a word."""

    all_special_ids = (1,)

    def __init__(self, words=None):
        self.words = words or {}

    def convert_ids_to_tokens(self, ids):
        return [self.words.get(token, f"word{token}") for token in ids]


def quick_report(model, inputs, methods=METHODS, **options):
    return hf_effattn.report(model, inputs, methods, **{"repeats": 0, "memory": False, "progress": False} | options)


def text_of(length=40, seed=1):
    return {"input_ids": torch.randint(5, 60, (1, length), generator=torch.Generator().manual_seed(seed))}


def drawings(page):
    """The pictures of a page, as the text of their SVG."""
    sources = page.attributes("img", "src")
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    return [base64.b64decode(source.partition(",")[2]).decode() for source in sources]


@pytest.fixture
def undrawn(monkeypatch):
    """Pictures without content, which take most of a page's time, where a test looks at the words."""
    empty = "data:image/svg+xml;base64," + base64.b64encode(b"<svg/>").decode()
    monkeypatch.setattr(illustrations, "_picture", lambda figure, alt: illustrations.Picture(empty, alt, 100))


@pytest.fixture(scope="module")
def measured():
    """A report on two lengths with everything in it, its model and inputs, and the page."""
    model = tiny_model("bert")
    inputs = [text_of(24), text_of(40)]
    report = quick_report(model, inputs, repeats=1, memory=True)
    return report, model, inputs, report.to_html(model, inputs, Words())


def test_the_page_is_whole_and_loads_nothing(measured):
    text = measured[3]
    page = Page(text)
    assert text.startswith("<!DOCTYPE html>")
    assert [attrs.get("lang") for tag, attrs in page.tags if tag == "html"] == ["en"]
    assert all(page.attributes("img", "alt"))
    assert not {"script", "link", "iframe", "object", "form"} & {tag for tag, _ in page.tags}
    assert not page.attributes("a", "href")
    assert "url(" not in text
    assert "@import" not in text
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    labels = [attrs["aria-labelledby"] for _, attrs in page.tags if "aria-labelledby" in attrs]
    assert set(labels) <= set(ids)
    for drawing in drawings(page):
        assert all(link.startswith(("#", "data:")) for link in re.findall(r'href="([^"]*)"', drawing))
        assert "<script" not in drawing


def test_every_number_of_the_table_is_the_reports(measured):
    report, text = measured[0], measured[3]
    table = report.to_pandas()
    header, *rows = Page(text).rows
    assert header == ["tokens", "method", *METRICS]
    assert len(rows) == 2 * (1 + len(METHODS))
    seen = 0
    for length, method, *cells in rows:
        of_it = table[(table.length == int(length)) & (table.method == method.removesuffix(" ¹"))]
        for heading, cell in zip(METRICS, cells, strict=True):
            metric, unit = METRICS[heading]
            values = of_it[of_it.metric == metric].value
            if not cell:
                assert method == "unpatched"
                continue
            digits = re.match(r"[\d.,]+", cell).group().replace(",", "")
            last_digit = 10.0 ** -len(digits.partition(".")[2])
            assert float(digits) == pytest.approx(values.mean() / unit, rel=1e-6, abs=0.51 * last_digit), heading
            seen += 1
    assert seen == 2 * (3 + 6 * len(METHODS))
    peaks = [m.forward_peak_bytes for m in report.measurements if m.input == 1]
    assert [report.memory_ratio(m) for m in report.measurements[-len(peaks) :]] == [peak / peaks[0] for peak in peaks]
    assert min(peaks[1:]) != peaks[0]


def test_all_the_words_of_the_summary_are_on_the_page(measured):
    report, text = measured[0], measured[3]
    shown = Page(text).text
    for line in report.summary().splitlines():
        assert line.removeprefix("- ") in shown
    for value in (*report.environment["versions"].values(), report.environment["device_name"]):
        assert value in shown
    assert "Interrupted" not in shown
    assert "not measured" not in shown.lower()


@pytest.mark.slow
def test_the_same_report_gives_the_same_page(measured):
    report, model, inputs, text = measured
    assert report.to_html(model, inputs, Words()) == text


def test_where_the_model_looks_is_drawn_and_the_model_stays_as_it_was(measured, undrawn):
    report, model, inputs, text = measured
    page = Page(text)
    # Time, memory, the errors at both lengths, attention.
    assert len(drawings(page)) == 5
    hf_effattn.patch_attention(model, "i-clustered", clusters=4, topk=3, min_length=0)
    stored = dict(model.config.effattn)
    report.to_html(model, inputs, Words())
    assert model.config.effattn == stored
    hf_effattn.unpatch_attention(model)
    assert model.config._attn_implementation == "sdpa"


def test_without_a_model_the_page_says_so(measured, undrawn):
    report = measured[0]
    page = Page(report.to_html())
    assert len(drawings(page)) == 4
    assert page.text.count("Not on this page: it was made without the model and a text.") == 1


def test_inputs_without_tokens_and_images_are_said_to_have_none(measured, undrawn):
    report, model, inputs, _ = measured
    assert "give the tokenizer too" in Page(report.to_html(model, inputs)).text
    vit = tiny_model("vit")
    images = batch_for(vit).inputs
    page = Page(quick_report(vit, images, METHODS[:1]).to_html(vit, images))
    assert "the inputs are no text" in page.text


def test_hostile_names_and_tokens_are_text(measured):
    _, model, inputs, _ = measured
    report = quick_report(model, inputs[1], METHODS[:2])
    hostile = "<script>alert('$x$ & \"y\"')</script>"
    report.environment |= {"device_name": hostile, hostile: hostile}
    words = {int(token): f"{hostile}$$\\frac" for token in inputs[1]["input_ids"][0]}
    text = report.to_html(model, inputs[1], Words(words))
    assert "<script" not in text
    assert Page(text).text.count(hostile) >= 3
    report.environment["model"] = hostile
    text = report.to_html()
    assert escape(hostile, quote=False) in text.replace("&#39;", "'").replace("&#34;", '"')
    assert "<script" not in text + report._repr_html_()


def test_an_interrupted_report_keeps_what_it_has(undrawn):
    model = tiny_model("bert")

    def stop(done, total, what):
        if "40" in what:
            raise KeyboardInterrupt

    with pytest.warns(UserWarning, match="interrupted"):
        report = quick_report(model, [text_of(24), text_of(40)], repeats=1, progress=stop)
    text = report.to_html()
    page = Page(text)
    assert "The measurement was stopped before its end" in page.text
    assert len(drawings(page)) == 2
    assert "interrupted" in Page(report._repr_html_()).text
    empty = Report(report.environment, report.layers, report.methods, complete=False)
    for text in (empty.to_html(), empty._repr_html_()):
        assert "Nothing had been measured yet" in Page(text).text


def test_pictures_are_of_what_was_measured(undrawn):
    model = tiny_model("bert")
    report = quick_report(model, text_of(), METHODS[:1], memory=True)
    page = Page(report.to_html())
    assert len(drawings(page)) == 2
    report = quick_report(model, text_of(), METHODS[:1])
    assert "Neither times nor memory" in Page(report.to_html()).text
    with pytest.raises(ValueError, match="no time and no memory"):
        report.plot_cost()


def test_the_cost_picture_has_a_line_per_method_with_the_reports_numbers(measured):
    report = measured[0]
    time, memory = report.plot_cost().axes
    for panel, metric in ((time, "forward_seconds"), (memory, "forward_peak_bytes")):
        for line, label in zip(panel.get_lines(), ("unpatched", *LABELS), strict=True):
            assert line.get_label() == label
            assert list(line.get_xdata()) == [24, 40]
            assert list(line.get_ydata()) == [report.metrics(m)[metric] for m in report.of(label)]
        assert panel.get_yscale() == "log"


def test_settings_that_leave_a_length_exact_and_numbers_that_are_none():
    report = Report(
        {"model": "m", "dtype": "float32", "device": "cuda", "threads": 1},
        {0: "attention"},
        {LABELS[0]: METHODS[0]},
        [MeasuredInput(2, 8, 14, {})],
        [
            Measurement(0, "unpatched"),
            Measurement(
                0, LABELS[0], "settings", {0: [float("nan")]}, OutputChange(float("inf"), [0.5, 0.25], {"logits": 0.1})
            ),
        ],
    )
    page = Page(report.to_html())
    assert page.rows[-1] == ["8", LABELS[0], "not finite", "not finite", "0.3750"]
    assert "one of its counts reaches the length" in page.text


def test_of_a_causal_model_the_last_tokens_attend():
    """The first ones have nothing that could be approximated."""
    assert text_to_draw(small_model("gpt2"), text_of(), Words()).rows == list(range(28, 40))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["bert", "gpt2"])
def test_a_conversion_without_weights_says_so(model_type, undrawn):
    model, inputs = small_model(model_type), {"input_ids": cst_tokens(batch=1)}
    methods = [{"method": "cst", "slice_length": 5, "composition": "local-global"}]
    page = Page(quick_report(model, inputs, methods).to_html(model, inputs, Words()))
    assert "needs fine-tuning" in page.text
    assert "the weights of none of these methods can be shown" in page.text


def test_the_text_drawn_has_no_padding_and_an_end(undrawn):
    model = tiny_model("bert", max_position_embeddings=400)
    ids = torch.randint(5, 60, (2, 300), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :10] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
    text = text_to_draw(model, [inputs], Words())
    assert torch.equal(text.inputs["input_ids"], ids[:1, 10:266])
    assert text.inputs["token_type_ids"].shape == (1, 256)
    assert (len(text.tokens), text.whole_length) == (256, 290)
    report = quick_report(model, inputs, METHODS[:1])
    assert "The first 256 of the 290 tokens" in Page(report.to_html(model, inputs, Words())).text


def test_a_fast_tokenizers_encoding_needs_no_tokenizer(undrawn):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"[CLS]": 0, "[SEP]": 1, "[UNK]": 2} | {f"w{i}": i for i in range(3, 60)}
    fast = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.post_processor = processors.BertProcessing(("[SEP]", 1), ("[CLS]", 0))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="[UNK]")
    encoded = tokenizer("w5 w6 w7", " ".join(f"w{i}" for i in range(10, 40)), return_tensors="pt")
    model = tiny_model("bert")
    text = text_to_draw(model, encoded)
    assert text.rows == [1, 2, 3]
    assert text.special == [True, False, False, False, True, *[False] * 30, True]
    assert text.tokens[:3] == ["[CLS]", "w5", "w6"]


@pytest.mark.parametrize(
    ("tokens", "shown"),
    [
        (["[CLS]", "pi", "##rri"], ["[CLS]", "pi", "rri"]),
        (["<s>", "it", "Ġis", "âĢĻ", "Ċ"], ["<s>", "it", "is", "’", "↵"]),
        (["<s>", "▁one", "s", "▁"], ["<s>", "one", "s", "␣"]),
    ],
    ids=["wordpiece", "byte-level", "sentencepiece"],
)
def test_tokens_are_shown_as_a_reader_knows_them(tokens, shown):
    assert without_marks(tokens, [True, *[False] * (len(tokens) - 1)]) == shown


def test_mistakes_are_named(measured):
    report, model, inputs, _ = measured
    with pytest.raises(ValueError, match="model without inputs"):
        report.to_html(model)
    with pytest.raises(ValueError, match="inputs without model"):
        report.to_html(inputs=inputs)
    with pytest.raises(ValueError, match="model is another: a RobertaModel"):
        report.to_html(tiny_model("roberta"), inputs, Words())
    with pytest.raises(ValueError, match="head 2 does not exist"):
        report.to_html(model, inputs, Words(), head=2)
    with pytest.raises(TypeError, match="call tokenizer"):
        report.to_html(model, "a text", Words())


def test_a_notebook_shows_words_and_table_without_matplotlib(measured, monkeypatch):
    report, page = measured[0], Page(measured[3])
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    shown = Page(report._repr_html_())
    assert shown.rows == page.rows
    for line in report.summary().splitlines():
        assert line.removeprefix("- ") in shown.text
    assert not {"img", "html", "style", "script"} & {tag for tag, _ in shown.tags}
    with pytest.raises(ImportError, match=r"pip install 'hf_effattn\[plots\]'"):
        report.to_html()
