"""Tests of parsing layouts and of fitting them to a model."""

import pytest

from distill.errors import InputError
from distill.parallel.layout import Layout, check_layout_fits, parse_layout

READ = {
    ("replicated", 1): Layout(),
    ("replicated", 4): Layout(dp=4),
    ("zero1", 2): Layout(dp=2, zero=1),
    ("zero2", 2): Layout(dp=2, zero=2),
    ("zero2", 1): Layout(),
    ("zero3", 2): Layout(fsdp=2),
    ("fsdp", 4): Layout(fsdp=4),
    ("fsdp=2", 2): Layout(fsdp=2),
    ("hsdp=2x4", 8): Layout(dp=2, fsdp=4),
    ("hsdp=2x2,tp=2", 8): Layout(dp=2, fsdp=2, tp=2),
    ("tp=2", 2): Layout(tp=2),
    ("dp=2,tp=2", 4): Layout(dp=2, tp=2),
    (" FSDP=2, tp=3", 6): Layout(fsdp=2, tp=3),
    ("pp=4", 4): Layout(pp=4),
    ("dp=2,pp=2", 4): Layout(dp=2, pp=2),
    ("cp=2", 2): Layout(cp=2),
    ("dp=2,cp=4", 8): Layout(dp=2, cp=4),
    ("fsdp=2,cp=2", 4): Layout(fsdp=2, cp=2),
    ("hsdp=2x2,cp=2", 8): Layout(dp=2, fsdp=2, cp=2),
}


@pytest.mark.parametrize(("text", "processes"), READ)
def test_a_layout_is_parsed_and_its_text_form_parses_to_the_same_layout(text, processes):
    layout = parse_layout(text, processes)
    assert layout == READ[text, processes]
    assert layout.processes == processes
    assert parse_layout(str(layout), processes) == layout


@pytest.mark.parametrize(
    ("text", "processes", "words"),
    [
        ("fsdp=2", 3, ("fsdp=2", "expected 2 processes, found 3")),
        ("hsdp=2x2,tp=2", 4, ("2 x 2 x 2 = 8 processes, found 4",)),
        ("fsdp=2,pp=2", 4, ("expected pp with dp only", "use pp=4")),
        ("tp=2,pp=2", 4, ("expected pp with dp only",)),
        ("cp=2,tp=2", 4, ("expected cp with dp or fsdp only, found tp", "leave one out")),
        ("cp=2,pp=2", 4, ("expected cp with dp or fsdp only, found pp",)),
        ("tp=two", 2, ("tp=two", "expected replicated")),
        ("tp=0", 2, ("tp=0",)),
        ("ddp", 2, ("'ddp'",)),
        ("", 1, ("expected replicated",)),
        ("hsdp=4", 4, ("hsdp=4",)),
        ("fsdp=2,hsdp=2x1", 4, ("expected each axis once, found fsdp twice",)),
    ],
)
def test_an_invalid_layout_is_rejected_with_an_explanation(text, processes, words):
    with pytest.raises(InputError) as rejected:
        parse_layout(text, processes, "student.layout")
    assert str(rejected.value).startswith("student.layout")
    assert all(word in str(rejected.value) for word in words), rejected.value


def test_a_layout_that_does_not_fit_the_models_heads_or_layers_is_rejected():
    with pytest.raises(InputError, match=r"12 attention heads.*tp may be 1, 2, 4"):
        check_layout_fits(Layout(tp=8), 12, 4, 6, "teacher.layout")
    with pytest.raises(InputError, match="2 key and value heads"):
        check_layout_fits(Layout(tp=4), 12, 2, 6, "teacher.layout")
    with pytest.raises(
        InputError, match=r"cp=8: expected a divisor of the model's 12 attention heads.*cp may be 1, 2, 4"
    ):
        check_layout_fits(Layout(cp=8), 12, 4, 6, "teacher.layout")
    with pytest.raises(InputError, match="expected at most 6 stages"):
        check_layout_fits(Layout(pp=7), 12, 12, 6, "teacher.layout")
    check_layout_fits(Layout(tp=2, fsdp=4), 12, 4, 6, "teacher.layout")


def test_a_layout_reports_whether_weights_are_sharded_and_its_data_parallel_size():
    assert not parse_layout("zero2", 2).sharded
    assert parse_layout("hsdp=2x2", 4).sharded
    assert parse_layout("hsdp=2x2,tp=2", 8).data_parallel == 4


def test_segments_share_rows_and_have_whole_weights_unless_fsdp_shards_them_over_all_of_their_processes():
    segments, shards = parse_layout("dp=2,cp=2", 4), parse_layout("fsdp=2,cp=2", 4)
    assert (segments.sharded, segments.data_parallel, segments.processes) == (False, 2, 4)
    assert (shards.shards, shards.data_parallel) == (4, 2)
